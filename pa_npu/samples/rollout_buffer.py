"""RolloutBuffer: where the coordinator puts groups and the trainer's replicas take them.

Life of a slot (iteration, replica, slot):

    coordinator    put ──┐
    every rank     wait ─┴─> the replica's reader reads, and passes the group to the others ─> done
    last rank                                                        done ─> the key is removed

All ranks of a replica wait for the key, so the key may go only when each of them has seen it:
`readers` is the number of ranks of a replica (tensor x pipeline parallel), and every rank calls
`done` once per slot, after it has the group.

Which slots are filled, and which ranks are done, is always in the store that the launcher hosts on
the head. The groups themselves lie there too, or in shards on the nodes, as buffer.shards says. A
shard is in the memory of the process that reads it, the first rank of the replica that trains its
groups:

    coordinator ──groups──> shard of replica r ──> reader of replica r ──collectives──> other ranks
         └──sizes of groups──> store on the head <──waits, done── all ranks of replica r

A shard is a c10d store that the reader hosts, so that it needs no process of its own and no
watching: it ends with a trainer rank, and then coordinator and trainers start again from the newest
checkpoint, as they do whenever a rank ends. The groups that were in it are generated again, or come
back from the checkpoint. Every attempt of a run has shards of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.control.channel import (
    BoundedCalls,
    NoAnswer,
    StoreChannel,
    StoreError,
    connect,
    host_store,
)
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import SHARD, ShardAddress
from pa_npu.errors import DeadlineExceeded, InvariantViolation, PaNpuError
from pa_npu.samples.columns import LOGPROBS, NONE, Column, RunColumns
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.samples.group import Group
from pa_npu.samples.notice import notice_bytes
from pa_npu.samples.teachers import teacher_columns
from pa_npu.samples.wire import from_bytes, to_bytes

T = TypeVar("T")
# The same for all attempts of a run: the channel's prefix tells these apart.
_NAME = "run"
# For a shard to start, and to take or give one group.
_SHARD_TIMEOUT_S = 120.0


class BufferFailed(PaNpuError):
    """The place where groups lie does not answer, or has lost one."""


@dataclass(eq=False, repr=False)
class RolloutBuffer:
    """The data plane on the c10d store, for the coordinator (put) and trainer ranks (the rest).

    run_id: separates attempts of one run, so that a restarted trainer never sees what a killed one
    left behind.
    readers: ranks of a replica, tensor_parallel x pipeline_parallel; not used by the coordinator.
    ahead: how many newer iterations may have begun when a group is put.
    payloads: where groups lie; None means in the store.
    columns: those of the run, and which of them are read here.
    keeps_whole: whether a notice brings its group along, for checkpoints of iterations ahead.
    head_bytes: bytes read from the store on the head so far.
    """

    channel: StoreChannel
    run_id: str
    readers: int
    ahead: int = 0
    payloads: ShardPayloads | None = None
    columns: RunColumns = NONE
    keeps_whole: bool = False
    head_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.readers < 1:
            raise ValueError(
                f"readers: {self.readers} must be at least 1, the number of ranks of a replica"
            )
        self._filled: dict[int, dict[tuple[int, int], int]] = {}  # by iteration
        self._newest = 0

    def put(self, group: Group, replica: int, slot: int, *, by_rule: bool = False) -> None:
        """Makes a group available to a replica as its slot-th group of `group.iteration`, with the
        columns that the coordinator makes.

        by_rule: only a notice of the group goes there, with the group's bytes if a checkpoint may
        keep them (samples/notice.py).

        Raises InvariantViolation for a slot that is filled already or whose iteration is over (I2),
        and GroupFormatError for a column that is missing or unknown.
        """
        if group.iteration > self._newest:
            self._newest = group.iteration
            self._forget_before(self._newest - self.ahead)
        key = self._key(group.iteration, replica, slot)
        filled = self._filled.setdefault(group.iteration, {})
        problem = None
        if group.iteration < self._newest - self.ahead:
            problem = f"iteration {self._newest} has begun"
        elif (replica, slot) in filled:
            problem = f"group {filled[replica, slot]} of that iteration is already there"
        if problem is not None:
            raise InvariantViolation(
                f"I2 exactly once: {group} put into slot {slot} of replica {replica}, but {problem}"
            )
        if by_rule and not self.keeps_whole:
            data = notice_bytes(group)
        else:
            data = to_bytes(group.made(self.columns.makers("coordinator")), self.columns)
            data = notice_bytes(group, data) if by_rule else data
        if self.payloads is not None:
            self.payloads.put(key, replica, data, str(group))
            data = str(len(data)).encode()
        self.channel.put_bytes(key, data)  # from here on it may be read
        filled[replica, slot] = group.index

    def _forget_before(self, oldest: int) -> None:
        for iteration in [number for number in self._filled if number < oldest]:
            del self._filled[iteration]

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        """Waits until the slot is filled and returns the seconds waited. Raises DeadlineExceeded
        after timeout_s.
        """
        return self.channel.wait(
            self._key(iteration, replica, slot),
            timeout_s,
            f"the group of slot {slot}, replica {replica}, iteration {iteration}, from the "
            "coordinator",
        )

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        """Returns at once whether the slot is filled."""
        return self.channel.exists(self._key(iteration, replica, slot))

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        """Returns the wire format of a filled slot."""
        key = self._key(iteration, replica, slot)
        stored = self.channel.get_bytes(key)
        self.head_bytes += len(stored)
        if self.payloads is None:
            return stored
        data = self.payloads.get(key, replica)
        if len(data) != int(stored):
            raise BufferFailed(
                f"the shard of replica {replica} has {len(data)} bytes of {key}, expected "
                f"{int(stored)}"
            )
        return data

    def read(self, iteration: int, replica: int, slot: int) -> Group:
        """Returns the group of a filled slot."""
        return from_bytes(self.read_bytes(iteration, replica, slot), self.columns)

    def done(self, iteration: int, replica: int, slot: int) -> None:
        """Reports that this rank needs the slot no more; the last of `readers` calls removes it."""
        key = self._key(iteration, replica, slot)
        if self.channel.add(key + "/done", 1) == self.readers:
            self.channel.delete(key)
            self.channel.delete(key + "/done")
            if self.payloads is not None:
                self.payloads.drop(key, replica)

    def written(self, version: int) -> RolloutBuffer:
        """Returns the buffer, in the same place, of the groups that were written before `version`
        and that no update has trained yet. One rank takes them, slot by dispatch index.
        """
        return RolloutBuffer(
            self.channel, f"written-{version}", 1, payloads=self.payloads, columns=self.columns
        )

    def _key(self, iteration: int, replica: int, slot: int) -> str:
        return f"buffer/{self.run_id}/{iteration}/{replica}/{slot}"


def open_buffer(
    config: Config,
    channel: StoreChannel,
    *,
    readers: int = 1,
    ahead: int = 0,
    trains: bool = False,
    own_shard: OwnShard | None = None,
) -> RolloutBuffer:
    """Opens the buffer as this process uses it.

    Args:
        readers, ahead: as RolloutBuffer.
        trains: whether groups are read for the loss, and no columns that it does not read.
        own: the shard that this process hosts.
    """
    place = payloads(config, channel, own_shard)
    columns = trained_columns(config) if trains else run_columns(config)
    keeps_whole = Freshness.from_sections(config.schedule, config.publish).max_staleness > 0
    return RolloutBuffer(channel, _NAME, readers, ahead, place, columns, keeps_whole)


def run_columns(config: Config) -> RunColumns:
    """Returns the columns that the run's algorithm reads, and its expert choices.

    Raises ConfigError for columns that no run can have.
    """
    algorithm = build_algorithm(config)
    return RunColumns.from_columns(
        [*algorithm.loss_columns, *algorithm.credit_columns, *_columns_of_models(config)]
    )


def trained_columns(config: Config) -> RunColumns:
    """Returns the columns for trainers. They leave out columns that only credit reads, unless they
    make a column themselves, which may need any of them.
    """
    columns = run_columns(config)
    if any(column.filled_by == "trainers" for column in columns.declared):
        return columns
    read = [*build_algorithm(config).loss_columns, *_columns_of_models(config)]
    return columns.reading([LOGPROBS.name, *(column.name for column in read)])


def _columns_of_models(config: Config) -> Sequence[Column]:
    """Returns the columns that models read: expert choices that routers replay, the number of the
    group's teacher, and its scores.
    """
    return (*getattr(ExpertChoices.from_config(config), "columns", ()), *teacher_columns(config))


def payloads(
    config: Config, channel: StoreChannel, own_shard: OwnShard | None = None
) -> ShardPayloads | None:
    """Opens the shards if the run's groups lie in these; None if they lie in the store."""
    if not config.buffer.lies_on_nodes(config.placement.nnodes):
        return None
    return ShardPayloads(channel, _SHARD_TIMEOUT_S, own_shard)


@dataclass(frozen=True)
class OwnShard:
    """The shard that this process hosts, for as long as this object exists."""

    replica: int
    server: dist.TCPStore


def host_shard(channel: StoreChannel, replica: int, address: str) -> OwnShard:
    """Hosts the shard for the groups of the replica that this process reads for.

    channel: to the run's store, in which the shard is announced. address: this node's address.

    Raises BufferFailed if the shard cannot listen there.
    """
    try:
        server = host_store(address, 0)
    except OSError as error:
        raise BufferFailed(
            f"the shard of replica {replica} cannot listen on {address} ({error.strerror}); set "
            "buffer.shards=head, or correct this node's address in the cluster"
        ) from None
    SHARD.put(channel, ShardAddress(address, server.port), replica=replica)
    return OwnShard(replica, server)


class ShardPayloads:
    """The groups of one attempt of a run in the shards of its replicas. A group that was put under
    a key is there for `get` until `drop`.

    channel: to the run's store, which knows where shards are.
    timeout_s: deadline for finding a shard, and for every call to it.

    The methods' `replica` is the one that trains the group. They raise BufferFailed if a shard does
    not answer in time, or has lost the key.
    """

    def __init__(
        self, channel: StoreChannel, timeout_s: float, own_shard: OwnShard | None = None
    ) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # by replica: its shard, and what puts a deadline on calls to it
        self._clients: dict[int, tuple[StoreChannel, Callable[[Callable[[], Any]], Any]]] = {}
        if own_shard is not None:
            # without a thread in between: what stops the shard stops this process
            self._clients[own_shard.replica] = (
                StoreChannel(own_shard.server, ""),
                lambda call: call(),
            )

    def put(self, key: str, replica: int, data: bytes, subject: str) -> None:
        """Stores the data; when this returns everybody can get it. subject: for messages."""

        def put(shard: StoreChannel) -> None:
            shard.put_bytes(key, data)
            # a store does not answer a put, but it answers the next question only afterwards
            if not shard.exists(key):
                raise StoreError(f"{key} did not stay where it was put")

        self._ask(replica, f"to take {subject}", put)

    def get(self, key: str, replica: int) -> bytes:
        return self._ask(replica, f"for {key}", lambda shard: shard.get_bytes(key))

    def drop(self, key: str, replica: int) -> None:
        self._ask(replica, f"to drop {key}", lambda shard: shard.delete(key))

    def _ask(self, replica: int, purpose: str, call: Callable[[StoreChannel], T]) -> T:
        shard, bounded = self._client(replica)
        try:
            return bounded(lambda: call(shard))
        except NoAnswer as error:
            reason = str(error)
            if error.asked:
                reason = f"it does not answer within {self._timeout_s:g} s"
            raise BufferFailed(
                f"the shard of replica {replica} was asked {purpose}: {reason}; its trainer rank "
                "hangs, see the trainers' logs"
            ) from None
        except StoreError as error:
            raise BufferFailed(
                f"the shard of replica {replica} was asked {purpose}: {error}"
            ) from error

    def _client(self, replica: int) -> tuple[StoreChannel, Callable[[Callable[[], Any]], Any]]:
        with self._lock:
            if replica not in self._clients:
                address = SHARD.wait(self._channel, self._timeout_s, replica=replica)
                try:
                    store = connect(address.host, address.port, self._timeout_s)
                except DeadlineExceeded:
                    raise BufferFailed(
                        f"the shard of replica {replica} at {address.host}:{address.port} cannot "
                        f"be reached within {self._timeout_s:g} s; does its trainer rank still run, "
                        "and can this machine reach that node?"
                    ) from None
                calls = BoundedCalls(f"shard of replica {replica}", self._timeout_s)
                self._clients[replica] = StoreChannel(store, ""), calls
            return self._clients[replica]
