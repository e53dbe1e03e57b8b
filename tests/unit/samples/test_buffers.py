"""The rollout buffer passes the same checks with its groups in the store and in shards on the nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, host_store
from pa_npu.errors import DeadlineExceeded
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.rollout_buffer import (
    BufferFailed,
    OwnShard,
    RolloutBuffer,
    ShardPayloads,
    host_shard,
    payloads,
)
from pa_npu.samples.wire import to_bytes
from tests.helpers.buffer_conformance import CHECKS, Open, make_group


class Counted:
    """A store on the head. values: all that was put into it and taken from it; counters are not
    among them.
    """

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


def place_of(backend: str, channel: StoreChannel) -> ShardPayloads | None:
    """For a process that hosts nothing.

    With shards there are those of two replicas, which live as long as the channel's store.
    """
    if backend == "shards":
        HOSTED.extend(host_shard(channel, replica, "127.0.0.1") for replica in range(2))
        return ShardPayloads(channel, 30.0)
    return None


HOSTED: list[OwnShard] = []


@pytest.fixture(autouse=True)
def no_shard_stays() -> Iterator[None]:
    yield
    HOSTED.clear()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ["store", "shards"])
def test_every_backend_conforms(
    backend: str, check: Callable[[Open], None], channel: StoreChannel
) -> None:
    place = place_of(backend, channel)
    check(lambda readers: RolloutBuffer(channel, "run", readers, payloads=place))


@pytest.mark.parametrize("backend", ["store", "shards"])
def test_groups_pass_the_store_on_the_head_only_where_there_are_no_shards(
    backend: str, channel: StoreChannel, head: Counted
) -> None:
    """The coordinator and two readers on other nodes, each of which hosts the shard of its replica."""
    place = place_of(backend, channel)
    empty = [shard.server.num_keys() for shard in HOSTED]
    coordinator = RolloutBuffer(channel, "run", 1, payloads=place)
    groups = [make_group(index, longest=900) for index in range(4)]
    payload = [len(to_bytes(group)) for group in groups]
    head.values.clear()
    for index, group in enumerate(groups):
        coordinator.put(group, index % 2, index // 2)
    assert [shard.server.num_keys() > none for shard, none in zip(HOSTED, empty, strict=True)] == [
        True
    ] * len(HOSTED)
    for replica in range(2):
        own = ShardPayloads(channel, 30.0, HOSTED[replica]) if HOSTED else None
        reader = RolloutBuffer(channel, "run", 1, payloads=own)
        iterator = MicrobatchIterator(
            reader,
            **{
                "replica": replica,
                "num_replicas": 2,
                "iteration": 0,
                "groups": 2,
                "order": "prompt",
            },
            **{
                "responses_per_microbatch": 4,
                "shared_prompt": True,
                "pad_multiple": 1,
                "timeout_s": 30.0,
            },
        )
        assert iterator.indices == () and len(list(iterator)) == 2
        iterator.finish()
        traffic = iterator.traffic
        assert (traffic.reads, traffic.buffer_bytes) == (2, sum(payload[replica::2]))
        assert traffic.head_bytes == reader.head_bytes, "what the record says"
    passed = sum(len(value) for value in head.values)
    contains = [
        any(group.tokens.tobytes()[-256:] in value for value in head.values) for group in groups
    ]
    if backend == "store":
        assert passed >= 2 * sum(payload) and contains == [True] * 4, "negative control: in and out"
        assert traffic.head_bytes == traffic.buffer_bytes
    else:
        assert contains == [False] * 4 and passed < 0.02 * 2 * sum(payload), "sizes alone"
        assert 0 < traffic.head_bytes < 0.02 * traffic.buffer_bytes
    assert [shard.server.num_keys() for shard in HOSTED] == empty, "nothing stays in a shard"


def test_a_shard_that_stops_ends_or_never_came_is_one_line_in_time(
    channel: StoreChannel, head: Counted
) -> None:
    program = (
        "import sys, time; from pa_npu.control.channel import StoreChannel, connect\n"
        "from pa_npu.samples.rollout_buffer import host_shard\n"
        "own = host_shard(StoreChannel(connect('127.0.0.1', int(sys.argv[1]), 30.0)), 1, "
        "'127.0.0.1'); time.sleep(60)"
    )
    data = to_bytes(make_group(0))
    with subprocess.Popen([sys.executable, "-c", program, str(head.store.port)]) as process:
        try:
            early = ShardPayloads(channel, 60.0)
            early.put("first", 1, data, "group 0")  # it waits for the shard to come
            hangs = ShardPayloads(channel, 0.2)
            hangs.put("second", 1, data, "group 1")
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(
                BufferFailed,
                match=r"1 was asked to take group 2: .* does not answer within 0\.2 s; .* hangs",
            ):
                hangs.put("third", 1, to_bytes(make_group(2, longest=400_000)), "group 2")
            with pytest.raises(
                BufferFailed, match=r"replica 1 was asked for third: it did not answer before"
            ):
                hangs.get("third", 1)
        finally:
            process.kill()
    started = time.monotonic()
    # a small put is not answered: only the look at what became of it tells that nobody is there
    with pytest.raises(
        BufferFailed, match=r"replica 1 was asked to take group 3: .*probably ended"
    ):
        early.put("fourth", 1, data, "group 3")
    assert time.monotonic() - started < 45
    with pytest.raises(
        DeadlineExceeded, match="trainers: the reader of replica 5 to say where its groups may lie"
    ):
        ShardPayloads(channel, 0.05).put("fifth", 5, data, "group 4")
    with pytest.raises(
        BufferFailed,
        match=r"shard of replica 1 at 127\.0\.0\.1:\d+ cannot be reached within 0\.1 s",
    ):
        ShardPayloads(channel, 0.1).get("first", 1)


def test_shards_are_for_several_nodes_unless_told(channel: StoreChannel) -> None:
    def payloads_of(shards: str, **placement: object) -> ShardPayloads | None:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"engines": 1},
            "trainer": {"devices": 1},
        }
        config = Config.model_validate(
            tree | {"buffer": {"shards": shards}, "placement": placement}
        )
        return payloads(config, channel)

    two: dict[str, object] = {"cluster": "ray", "nnodes": 2}
    assert payloads_of("auto") is None and payloads_of("head", **two) is None
    assert isinstance(payloads_of("auto", **two), ShardPayloads) and isinstance(
        payloads_of("node"), ShardPayloads
    )
