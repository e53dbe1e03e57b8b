"""open_buffer: the run's rollout buffer, whose groups lie in its store or in shards on the nodes, as buffer.shards says.

A shard is in the memory of the process that reads it, the first rank of the replica that trains its groups:

    coordinator ──columns──> shard of replica r ──> reader of replica r ──collectives──> its other ranks
         └──the columns' names and sizes──> store on the head <──who waits, and who is done── all ranks of replica r

A shard is a c10d store that the reader hosts, so that it needs no process of its own and nobody to watch over it: it ends with a
trainer rank, and then coordinator and trainers start again from the newest checkpoint, as whenever a rank ends. The groups that
were in it are generated again, or come back from the checkpoint. Every attempt of a run has shards of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch.distributed as dist
from safetensors.numpy import load, save

from pa_npu.algorithm.advantages import find_group_advantage
from pa_npu.algorithm.policy_losses import find_policy_loss
from pa_npu.config.schema import Config
from pa_npu.control.channel import BoundedCalls, NoAnswer, StoreChannel, StoreError, connect, host_store
from pa_npu.control.messages import SHARD, ShardAddress
from pa_npu.errors import DeadlineExceeded
from pa_npu.samples.columns import LOGPROBS, NONE, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import BufferFailed, RolloutBuffer
from pa_npu.samples.routes import routes_of
from pa_npu.samples.wire import from_tensors, tensor_names, tensors_of

T = TypeVar("T")
Cells = Mapping[str, np.ndarray]
# Its keys are those of one attempt of the run, which the channel's prefix is.
_NAME = "run"
# Of a shard to take or give one group, and to start.
_SHARD_TIMEOUT_S = 120.0


def open_buffer(
    config: Config,
    channel: StoreChannel,
    *,
    readers: int = 1,
    ahead: int = 0,
    trains: bool = False,
    own: OwnShard | None = None,
) -> RolloutBuffer:
    """Opens the buffer as this process uses it.

    Args:
        readers, ahead: as RolloutBuffer.
        trains: whether groups are read for the loss, and no columns that it does not read.
        own: the shard that this process hosts.
    """
    place = payloads(config, channel, own)
    columns = trained_columns(config) if trains else run_columns(config)
    return RolloutBuffer(channel, _NAME, readers, ahead, place, columns)


def run_columns(config: Config) -> RunColumns:
    """The run's routes, and the columns that loss and advantage declare. Raises ConfigError for those that no run can have."""
    features: list[Any] = [find_policy_loss(config.algorithm.loss)]
    if config.algorithm.advantage != "batch-std":  # which is of no group
        features.append(find_group_advantage(config.algorithm.advantage))
    return RunColumns.of_features([*features, routes_of(config)])


def trained_columns(config: Config) -> RunColumns:
    """The same for trainers: of columns that only the advantage reads nothing travels to them, unless they make some column."""
    columns = run_columns(config)
    if any(column.filled_by == "trainers" for column in columns.declared):
        return columns
    loss = RunColumns.of_features([find_policy_loss(config.algorithm.loss), routes_of(config)])
    return columns.reading([LOGPROBS.name, *(column.name for column in loss.declared)])


def payloads(config: Config, channel: StoreChannel, own: OwnShard | None = None) -> ShardPayloads | None:
    """Opens the place that groups lie in; None is the store itself."""
    return ShardPayloads(channel, _SHARD_TIMEOUT_S, own) if config.has_shards else None


@dataclass(frozen=True)
class OwnShard:
    """The shard that this process hosts, as long as this is there."""

    replica: int
    server: dist.TCPStore


def host_shard(channel: StoreChannel, replica: int, address: str) -> OwnShard:
    """For the groups of the replica that this process reads for. channel: to the run's store. address: of this node.

    Raises BufferFailed where nothing can listen there.
    """
    try:
        server = host_store(address, 0)
    except OSError as error:
        raise BufferFailed(
            f"the shard of replica {replica} cannot listen on {address} ({error.strerror}); set buffer.shards=head, or "
            f"correct this node's address in the cluster"
        ) from None
    SHARD.put(channel, ShardAddress(address, server.port), replica=replica)
    return OwnShard(replica, server)


class StoreShard:
    """Rows of columns in a c10d store, of another node for one, which this process is a client of."""

    def __init__(self, channel: StoreChannel) -> None:
        self._channel = channel

    def put(self, row: str, cells: Cells) -> None:
        """They are there for everybody who asks when this returns."""
        for column, value in cells.items():
            self._channel.put_bytes(f"{row}/{column}", save({column: np.ascontiguousarray(value)}))
        # a store answers no put; what it is asked after the last one, it answers when it has them all
        if not all(self._channel.exists(f"{row}/{column}") for column in tuple(cells)[-1:]):
            raise StoreError(f"{row}: its columns {list(cells)} did not stay where they were put")

    def get(self, row: str, columns: Sequence[str]) -> dict[str, np.ndarray]:
        """These columns and no others."""
        return {column: load(self._channel.get_bytes(f"{row}/{column}"))[column] for column in columns}

    def drop(self, row: str, columns: Iterable[str]) -> None:
        for column in columns:
            self._channel.delete(f"{row}/{column}")


class ShardPayloads:
    """The groups of one attempt of a run in the shards of its replicas: one put under a key is there for `get` until `drop`.

    channel: to the run's store, which knows where shards are. timeout_s: of finding a shard, and of every call to it.
    replica, everywhere: that trains the group. All raise BufferFailed where a shard does not answer in time, or has lost the key.
    """

    def __init__(self, channel: StoreChannel, timeout_s: float, own: OwnShard | None = None) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # by replica: its shard, and what makes calls to it, which have no deadline of their own
        self._clients: dict[int, tuple[StoreShard, Callable[[Callable[[], Any]], Any]]] = {}
        if own is not None:
            # asked without a thread between: what stops the shard stops this process
            self._clients[own.replica] = StoreShard(StoreChannel(own.server, "")), lambda call: call()

    def put(self, key: str, replica: int, group: Group, columns: RunColumns = NONE) -> bytes:
        """Returns what the store is to say of it."""
        cells = tensors_of(group, columns)
        self._ask(replica, f"to take {group}", lambda shard: shard.put(key, cells))
        return msgspec.json.encode(_sizes(cells))

    def get(self, key: str, replica: int, said: bytes, columns: RunColumns = NONE) -> bytes:
        """The wire format, without columns that are not read. said: by the store."""
        cells = self._ask(replica, f"for {key}", lambda shard: shard.get(key, tensor_names(columns)))
        sizes, put = _sizes(cells), msgspec.json.decode(said)
        if sizes != (put if columns.reads is None else {name: put.get(name) for name in sizes}):
            raise BufferFailed(f"the shard of replica {replica} has {sizes} bytes of {key}, expected {put}")
        return from_tensors(cells)

    def drop(self, key: str, replica: int, columns: RunColumns = NONE) -> None:
        names = tensor_names(replace(columns, reads=None))
        self._ask(replica, f"to drop {key}", lambda shard: shard.drop(key, names))

    def _ask(self, replica: int, what: str, call: Callable[[StoreShard], T]) -> T:
        shard, bounded = self._client(replica)
        try:
            return bounded(lambda: call(shard))
        except NoAnswer as error:
            reason = f"it does not answer within {self._timeout_s:g} s" if error.asked else str(error)
            raise BufferFailed(
                f"the shard of replica {replica} was asked {what}: {reason}; its trainer rank hangs, see the trainers' logs"
            ) from None
        except StoreError as error:
            raise BufferFailed(f"the shard of replica {replica} was asked {what}: {error}") from error

    def _client(self, replica: int) -> tuple[StoreShard, Callable[[Callable[[], Any]], Any]]:
        with self._lock:
            if replica not in self._clients:
                where = SHARD.wait(self._channel, self._timeout_s, replica=replica)
                try:
                    store = connect(where.host, where.port, self._timeout_s)
                except DeadlineExceeded:
                    raise BufferFailed(
                        f"the shard of replica {replica} at {where.host}:{where.port} cannot be reached within "
                        f"{self._timeout_s:g} s; does its trainer rank still run, and can this machine reach that node?"
                    ) from None
                calls = BoundedCalls(f"shard of replica {replica}", self._timeout_s)
                self._clients[replica] = StoreShard(StoreChannel(store, "")), calls
            return self._clients[replica]


def _sizes(cells: Cells) -> dict[str, int]:
    return {name: cell.nbytes for name, cell in cells.items()}
