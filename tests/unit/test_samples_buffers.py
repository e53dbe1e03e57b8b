"""Every backend of the rollout buffer passes the same checks: the store, shards on the nodes, and TransferQueue behind the calls
that are made of it.

The real TransferQueue passes them in tests/integration/test_transfer_queue.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.store_server import host_store
from pa_npu.errors import ConfigError, DeadlineExceeded
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.open_buffer import payloads
from pa_npu.samples.rollout_buffer import BufferFailed, Payloads, StoreRolloutBuffer
from pa_npu.samples.shards import OwnShard, ShardPayloads, host_shard
from pa_npu.samples.transfer_queue import TransferQueuePayloads
from pa_npu.samples.wire import to_bytes
from tests.helpers.buffer_conformance import CHECKS, Open, make_group


class Queue:
    """The key-value interface of TransferQueue 0.1.11, as its documentation and signatures say, in memory."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        self.started = 0

    def init(self, conf: Any) -> None:
        self.started += 1

    def kv_put(self, key: str, partition_id: str, fields: dict[str, torch.Tensor], tag: dict[str, Any]) -> None:
        self.rows[partition_id, key] = {name: tensor.clone() for name, tensor in fields.items()}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        (key,) = keys
        if (partition_id, key) not in self.rows:
            raise ValueError("keys or partition were not found!")
        return {name: self.rows[partition_id, key][name][None] for name in select_fields}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop((partition_id, key), None)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in sys.modules else None)
    monkeypatch.setitem(sys.modules, "transfer_queue", found)  # type: ignore[arg-type]
    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=lambda name, namespace: object())
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return found


class Counted:
    """A store on the head. values: all that was put into it and taken from it; counters are not among them."""

    def __init__(self) -> None:
        self.store = host_store("127.0.0.1", 0)
        self.values: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:
        self.values.append(value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.values.append(self.store.get(key))
        return self.values[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.fixture
def head() -> Counted:
    return Counted()


@pytest.fixture
def channel(head: Counted) -> StoreChannel:
    return StoreChannel(head)  # type: ignore[arg-type]


def in_queue(partition: str = "p", *, starts: bool = True, timeout_s: float = 30.0) -> TransferQueuePayloads:
    return TransferQueuePayloads(partition, starts=starts, address="auto", timeout_s=timeout_s)


def place_of(backend: str, channel: StoreChannel) -> Payloads | None:
    """For a process that hosts nothing. With shards there are those of two replicas, which live as long as the channel's store."""
    if backend == "shards":
        HOSTED.extend(host_shard(channel, replica, "127.0.0.1") for replica in range(2))
        return ShardPayloads(channel, 30.0)
    return in_queue() if backend == "transfer_queue" else None


HOSTED: list[OwnShard] = []


@pytest.fixture(autouse=True)
def no_shard_stays() -> Iterator[None]:
    yield
    HOSTED.clear()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ["store", "shards", "transfer_queue"])
def test_every_backend_conforms(
    backend: str, check: Callable[[Open], None], channel: StoreChannel, queue: Queue
) -> None:
    place = place_of(backend, channel)
    check(lambda readers: StoreRolloutBuffer(channel, "run", readers, payloads=place))
    assert bool(queue.started) == (backend == "transfer_queue" and "deadline" not in check.__name__)


@pytest.mark.parametrize("backend", ["store", "shards"])
def test_groups_pass_the_store_on_the_head_only_where_there_are_no_shards(
    backend: str, channel: StoreChannel, head: Counted
) -> None:
    """The coordinator and two readers on other nodes, each of which hosts the shard of its replica."""
    place = place_of(backend, channel)
    empty = [shard.server.num_keys() for shard in HOSTED]
    coordinator = StoreRolloutBuffer(channel, "run", 1, payloads=place)
    groups = [make_group(index, longest=900) for index in range(4)]
    payload = [len(to_bytes(group)) for group in groups]
    head.values.clear()
    for index, group in enumerate(groups):
        coordinator.put(group, index % 2, index // 2)
    assert [shard.server.num_keys() > none for shard, none in zip(HOSTED, empty, strict=True)] == [True] * len(HOSTED)
    for replica in range(2):
        own = ShardPayloads(channel, 30.0, HOSTED[replica]) if HOSTED else None
        reader = StoreRolloutBuffer(channel, "run", 1, payloads=own)
        iterator = MicrobatchIterator(
            reader,
            **{"replica": replica, "num_replicas": 2, "iteration": 0, "groups": 2, "order": "prompt"},
            **{"responses_per_microbatch": 4, "shared_prompt": True, "pad_multiple": 1, "timeout_s": 30.0},
        )
        assert iterator.indices == () and len(list(iterator)) == 2
        iterator.finish()
        traffic = iterator.traffic
        assert (traffic.reads, traffic.buffer_bytes) == (2, sum(payload[replica::2]))
        assert traffic.head_bytes == reader.head_bytes, "what the record says"
    passed = sum(len(value) for value in head.values)
    contains = [any(group.tokens.tobytes()[-256:] in value for value in head.values) for group in groups]
    if backend == "store":
        assert passed >= 2 * sum(payload) and contains == [True] * 4, "negative control: in and out"
        assert traffic.head_bytes == traffic.buffer_bytes
    else:
        assert contains == [False] * 4 and passed < 0.02 * 2 * sum(payload), "names and sizes of columns"
        assert 0 < traffic.head_bytes < 0.02 * traffic.buffer_bytes
    assert [shard.server.num_keys() for shard in HOSTED] == empty, "nothing stays in a shard"


def test_a_shard_that_stops_ends_or_never_came_is_one_line_in_time(channel: StoreChannel, head: Counted) -> None:
    program = (
        "import sys, time; from pa_npu.control.channel import StoreChannel, connect; from pa_npu.samples.shards import host_shard\n"
        "own = host_shard(StoreChannel(connect('127.0.0.1', int(sys.argv[1]), 30.0)), 1, '127.0.0.1'); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(head.store.port)]) as process:
        try:
            early = ShardPayloads(channel, 60.0)
            early.put("first", 1, make_group(0))  # it waits for the shard to come
            hangs = ShardPayloads(channel, 0.2)
            hangs.put("second", 1, make_group(1))
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(
                BufferFailed, match=r"1 was asked to take group 2 .* does not answer within 0\.2 s; .* hangs"
            ):
                hangs.put("third", 1, make_group(2, longest=400_000))
            with pytest.raises(BufferFailed, match=r"replica 1 was asked for third: it did not answer before"):
                hangs.get("third", 1, b"")
        finally:
            process.kill()
    started = time.monotonic()
    # a small put is not answered: only the look at what became of it tells that nobody is there
    with pytest.raises(BufferFailed, match=r"replica 1 was asked to take group 3 .*probably ended"):
        early.put("fourth", 1, make_group(3))
    assert time.monotonic() - started < 45
    with pytest.raises(DeadlineExceeded, match="trainers: the reader of replica 5 to say where its groups may lie"):
        ShardPayloads(channel, 0.05).put("fifth", 5, make_group(4))
    with pytest.raises(BufferFailed, match=r"shard of replica 1 at 127\.0\.0\.1:\d+ cannot be reached within 0\.1 s"):
        ShardPayloads(channel, 0.1).get("first", 1, b"")


def test_shards_are_for_several_nodes_unless_told_and_not_beside_a_transfer_queue(channel: StoreChannel) -> None:
    def found(shards: str, **placement: object) -> Payloads | None:
        tree = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"engines": 1}, "trainer": {"devices": 1}}
        config = Config.model_validate(tree | {"buffer": {"shards": shards}, "placement": placement})
        return payloads(config, channel)

    two: dict[str, object] = {"cluster": "ray", "nnodes": 2}
    assert found("auto") is None and found("head", **two) is None
    assert isinstance(found("auto", **two), ShardPayloads) and isinstance(found("node"), ShardPayloads)
    with pytest.raises(ValueError, match=r"buffer\.shards: node would be read by nothing; set buffer\.backend=store"):
        Config.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "buffer": {"backend": "transfer_queue", "shards": "node"},
                "placement": {"cluster": "ray"},
            }
        )


def test_a_column_is_fetched_alone_and_a_removed_group_leaves_nothing_in_the_queue(
    channel: StoreChannel, queue: Queue
) -> None:
    place = in_queue()
    buffer = StoreRolloutBuffer(channel, "run", 1, payloads=place)
    buffer.put(make_group(3), 0, 0)
    columns = place.get_columns("buffer/run/0/0/0", ("tokens", "lengths"))
    assert columns.keys() == {"tokens", "lengths"} and columns["tokens"].dtype == torch.int32
    buffer.done(0, 0, 0)
    assert not queue.rows


def test_a_queue_that_hangs_or_has_lost_a_group_is_one_line(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BufferFailed, match=r"asked for numbers, .*: ValueError: keys or partition were not found"):
        in_queue().get("buffer/run/0/0/0", 0, b"")
    stopped = threading.Event()
    monkeypatch.setattr(queue, "kv_put", lambda **_: stopped.wait(30), raising=False)
    hangs = in_queue(timeout_s=0.05)
    with pytest.raises(BufferFailed, match=r"waited 0\.05 s to take group 3 .* does not answer"):
        hangs.put("key", 0, make_group(3))
    with pytest.raises(BufferFailed, match=r"was not asked to take group 4 .* did not answer before"):
        hangs.put("key", 0, make_group(4))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "transfer queue" and thread.is_alive()][
        -1:
    ]
    assert thread.daemon, "the end of the program would wait for the call"
    stopped.set()


def test_a_reader_waits_for_the_coordinator_to_start_the_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there(name: str, namespace: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(sys.modules["ray"], "get_actor", none_there)
    with pytest.raises(BufferFailed, match=r"has not been started|does not answer"):
        in_queue(starts=False, timeout_s=0.2).get("key", 0, b"")
    assert not queue.started, "a reader starts nothing"


def test_attempts_and_runs_do_not_see_each_other_and_the_package_is_asked_for(
    channel: StoreChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configuration(directory: str) -> Config:
        tree = {"run": {"dir": directory}, "model": {"path": "m"}, "data": {"train": "t"}}
        return Config.model_validate(tree | {"buffer": {"backend": "transfer_queue"}, "placement": {"cluster": "ray"}})

    places = []
    for directory, attempt in (("a", "0"), ("b", "0"), ("a", "1")):
        monkeypatch.setenv("PA_NPU_ATTEMPT", attempt)
        found = payloads(configuration(directory), channel, fills=True)
        assert isinstance(found, TransferQueuePayloads)
        places.append(found._partition)
    assert len(set(places)) == 3
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transfer_queue" else name)
    with pytest.raises(
        ConfigError, match=r"transfer_queue is not installed here; pip install -e '\.\[transfer_queue\]'"
    ):
        in_queue().get("key", 0, b"")
