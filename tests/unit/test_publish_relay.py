"""Engines that get their weights through another one: all hold what was sent, the trainers' link carries it once, and who dies is
left out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import Roster
from pa_npu.engines.membership import Fleet, Member
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import LoadedWeights, Sampling
from pa_npu.engines.transformers.client import TransformersEngine
from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.coordinator_side import CoordinatorPublish
from pa_npu.publish.engine_groups import Connection, EngineGroups
from pa_npu.publish.messages import StageManifest
from pa_npu.publish.publisher import Publisher
from pa_npu.publish.routes import MovedBytes, Route, routes, senders
from pa_npu.publish.trainer_side import TrainerPublish
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.relay import Relay
from tests.helpers.engine_conformance import VOCAB, bits, make_engine_model
from tests.helpers.forked_engine import KEY, ForkedEngine
from tests.helpers.weight_sender import manifest_of, tensors_of
from tests.helpers.weights import gloo_group, make_checkpoint, run_threads
from tests.unit.test_publish_weights import World, received

# ------------------------------------------------------------------------------------------------------------ the tree


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ((0, 1, 2, 3), {0: None, 1: 0, 2: 0, 3: 0}),
        ((1, 2, 3), {1: None, 2: 1, 3: 1}),  # the first of those behind the near one takes its place
        ((2, 3), {2: None, 3: 2}),
        ((0, 3), {0: None, 3: 0}),
        ((3,), {3: None}),
    ],
)
def test_engines_behind_one_that_is_gone_stay_behind_one(present: tuple[int, ...], expected: dict[int, int]) -> None:
    assert senders(present, {1: 0, 2: 0, 3: 0}) == expected


def test_a_tree_of_several_levels_keeps_its_shape_around_what_is_gone() -> None:
    via = {1: 0, 2: 1, 3: 1, 4: 3}
    assert senders((0, 1, 2, 3, 4, 5), via) == {0: None, 1: 0, 2: 1, 3: 1, 4: 3, 5: None}
    assert senders((0, 2, 3, 4), via) == {0: None, 2: 0, 3: 2, 4: 3}
    assert senders((2, 4), via) == {2: None, 4: 2}
    assert senders((0, 4), via) == {0: None, 4: 0}


def test_engines_are_numbered_within_the_groups_that_they_share() -> None:
    ways = {0: "group", 1: "host", 2: "host", 3: "group", 4: "host"}
    found = routes((0, 1, 2, 3, 4), {1: 0, 2: 0}, ways)
    assert found == {
        0: Route(None, 0, 2),
        1: Route(0, 0, 2),
        2: Route(0, 1, 2),
        3: Route(None, 1, 2),
        4: Route(None, 0, 1),
    }


def config(number: int, settings: list[dict[str, Any]], device: str = "cpu", **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"device": device},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {
                "engines": number,
                "backend": "transformers",
                "engine_settings": settings,
                "attach": [f"http://127.0.0.1:{1 + n}" for n in range(number)],
                "probe_timeout_s": 30.0,
                **rollout,
            },
            "publish": {"timeout_s": 60.0},
        }
    )


class Named:
    """An engine of which only its name is asked."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_far_engines_and_other_devices_are_reached_through_host_memory_and_two_workers_each_are_numbered_on() -> None:
    settings = [
        {"engines": [2, 3], "via": 1},
        {"engines": [4], "device": "cuda H100"},
        {"engines": [0], "device": "NPU 910B"},
    ]
    chosen = config(5, settings, "npu", tensor_parallel=2, backend="vllm")
    engines: list[Any] = [Named(f"e{number}") for number in range(5)]
    members = [Member(number, 0, True, engine) for number, engine in enumerate(engines)]
    connection = Connection(("127.0.0.1", 1), "hccl", [StageManifest("s", {})], [StageManifest("late", {})], "npu")
    groups = EngineGroups(chosen, EnginePool(engines), connection)
    planned = groups.routes(members)
    joined = groups.of_members(members, planned, 7)
    shape = [(g.backend, g.stages[0]["name"], g.first_rank, g.world_size, g.via) for g in joined]
    assert shape == [
        ("hccl", "s.7", 1, 5, ""),
        ("hccl", "s.7", 3, 5, ""),
        ("gloo", "s.7/relay-1", 1, 5, "e1"),
        ("gloo", "s.7/relay-1", 3, 5, "e1"),
        ("gloo", "s.host.7", 1, 3, ""),
    ]
    assert [g.relay and (g.relay.names, g.relay.workers) for g in joined] == [
        None,
        (("s.7/relay-1",), 4),
        None,
        None,
        None,
    ]
    receivers = groups.receivers(members, planned, 7)
    assert (receivers.workers, receivers.host_workers, receivers.handles_workers) == (4, 2, 0)
    late = groups.of_late(members[2], 9)
    assert (late.backend, late.stages[0]["name"], late.world_size) == ("gloo", "late.host.9", 3)


def test_bytes_that_one_engine_does_not_say_are_not_added_up() -> None:
    said, silent = LoadedWeights((1,), received_bytes=10), LoadedWeights((1,))
    near, far = Route(None, 0, 1), Route(0, 0, 2)
    assert MovedBytes.of([(near, said), (far, said), (far, said)]) == MovedBytes(10, 20)
    assert MovedBytes.of([(near, said), (far, silent)]) == MovedBytes(10, None)


# ------------------------------------------------------------------------------------------------------------ the wire


class Tree:
    """A trainer, a near engine's worker, two behind it and one behind the second of these, as threads in real gloo groups."""

    def __init__(self, world: World, timeout_s: float = 30.0) -> None:
        self.world = world
        (self.publisher,) = world.publishers(timeout_s=timeout_s)
        (near,) = world.connect([self.publisher], timeout_s)
        manifest, messages = near._manifests, [1 + len(near._manifests[0].buckets)]
        groups = run_threads(*(lambda r=r: gloo_group(world.store, "relay-0", r, 3, timeout_s) for r in range(3)))
        second = run_threads(*(lambda r=r: gloo_group(world.store, "relay-2", r, 2, timeout_s) for r in range(2)))
        near._relay = Relay([groups[0]], 2, messages)
        self.near = near

        def far(group: Any, name: str, relay: Relay | None = None) -> Receiver:
            stops = [transport.Abandonment("127.0.0.1", world.server.port, f"{self.publisher._name}/{name}")]
            return Receiver(manifest, [group], 1, torch.device("cpu"), timeout_s, stops, relay, "http://near")

        self.far = [
            far(groups[1], "relay-0"),
            far(groups[2], "relay-0", Relay([second[0]], 1, messages)),
            far(second[1], "relay-2"),
        ]


def test_every_engine_of_a_tree_gets_every_version_bit_for_bit_and_the_trainers_send_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False))
    tree = Tree(world)
    everyone = [tree.near, *tree.far]
    for version in (0, 1):
        results: list[Any] = run_threads(
            lambda v=version: tree.publisher.publish(v), *(received(one, version) for one in everyone)
        )
        errors = [result for result in results if isinstance(result, Exception)]
        assert not errors, errors
        stats, near, *far = results
        assert all(torch.equal(weights[name], near[name]) for weights in far for name in near)
        assert {one.digests for one in everyone} == {(stats.digests,)}
        copy = stats.bytes
        assert [one.received_bytes for one in everyone] == [copy] * 4
        assert [one.relayed_bytes for one in everyone] == [2 * copy, 0, copy, 0]
        with torch.no_grad():
            for parameter in world.modules[0].parameters():
                parameter.add_(1e-6)


def test_what_an_engine_changes_on_the_way_is_found_at_the_engines_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False)))
    send = Relay.send

    def changed(self: Relay, stage: int, tensor: torch.Tensor, *rest: Any) -> int:
        return send(self, stage, tensor * 1.01 if tensor.is_floating_point() else tensor, *rest)

    monkeypatch.setattr(tree.near._relay, "send", changed.__get__(tree.near._relay))
    everyone = [tree.near, *tree.far]
    everything: list[Any] = run_threads(lambda: tree.publisher.publish(0), *(received(one, 0) for one in everyone))
    stats, *results = everything
    assert not [result for result in results if isinstance(result, Exception)], results
    assert tree.near.digests == (stats.digests,)
    assert all(one.digests != (stats.digests,) for one in tree.far)


def test_an_engine_behind_that_never_receives_is_named_by_the_near_one_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False)), timeout_s=4.0)
    tree.near._timeout_s = tree.far[0]._timeout_s = 2.0
    _, near, _ = run_threads(lambda: tree.publisher.publish(0), received(tree.near, 0), received(tree.far[0], 0))
    assert isinstance(near, DeadlineExceeded)
    for part in (
        "passed on to 2 engine workers behind it",
        "not in pa_receive of version 0: rank 2",
        "engine_settings",
    ):
        assert part in str(near)


def test_who_gives_up_a_group_gives_up_what_is_passed_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines behind wait with no collective open; the reason reaches those that know the trainers' group by name alone."""
    world = World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False))
    tree = Tree(world)
    transport.Abandonment("127.0.0.1", world.server.port, tree.publisher._name).declare("engine b is gone")
    with pytest.raises(transport.WeightSyncError, match=r"weight version 3: given up .*engine b is gone"):
        next(tree.far[2].receive(3, begins_within_s=30.0))


# ------------------------------------------------------------------------------------- real engines, and their deaths


class Source:
    """A stage's weights, another bit of them for each version; stops before a bucket until it may go on, where it is told to."""

    is_leader = True

    def __init__(self, model: Path) -> None:
        self.tensors = tensors_of(model)
        self.manifest = manifest_of(self.tensors, {})
        self.stop = False
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def buckets(self, deadline: transport.Deadline) -> Iterator[torch.Tensor]:
        for number, bucket in enumerate(self.manifest.buckets):
            if self.stop and number == len(self.manifest.buckets) // 2:
                self.stop = False
                self.stopped.set()
                assert self.go_on.wait(60)
            parts = [self.tensors[s.name].flatten()[s.start : s.start + s.size] for s in bucket.segments]
            yield torch.cat(parts)

    def update(self) -> None:
        for tensor in self.tensors.values():
            tensor.add_(1e-3)


class Job:
    """The coordinator's side over a fleet of attached engines, and the trainers' side in a thread. Use it with `async with`."""

    def __init__(self, model: Path, urls: list[str], settings: list[dict[str, Any]]) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = ("127.0.0.1", self.store.port)
        self.config = config(len(urls), settings, attach=urls)
        self.source = Source(model)
        self.publisher = Publisher(
            self.source,  # type: ignore[arg-type]
            store_host=address[0],
            store_port=address[1],
            timeout_s=60.0,
            backend="gloo",
            device=torch.device("cpu"),
            scope="pa/0/",
        )
        self.pool = EnginePool((), 30.0)
        self.channel = StoreChannel(dist.TCPStore(*address, wait_for_workers=False))
        self.roster = Roster(StoreChannel(dist.TCPStore(*address, wait_for_workers=False), "engines/"), KEY)
        for url in urls:
            self.roster.announce(url)
        self.fleet = Fleet(self.config.rollout, self.pool, self.roster, lambda url: TransformersEngine(url, VOCAB, KEY))
        stages = [self.publisher.manifest()]
        self.connection = Connection(address, "gloo", stages, stages, "cpu")
        self.publish = CoordinatorPublish(
            self.config, self.fleet, self.pool, self.channel, self.connection, Sampling(8, 1.0)
        )
        self.fleet.deliver_late = None  # these trainers serve nobody inside an iteration
        trainers = StoreChannel(dist.TCPStore(*address, wait_for_workers=False))
        self.trainers = TrainerPublish(trainers, self.publisher.publish, lambda: "", 0, 0, 60.0, Timeline(None, ""))

    async def __aenter__(self) -> Job:
        await self.fleet.__aenter__()
        await self.fleet.wait_all_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.__aexit__()
        await self.pool.close()
        self.publisher.close()

    async def version(self, version: int, dies: ForkedEngine | None = None) -> MovedBytes:
        """Publish it; `dies` is killed when half of it has been sent."""
        self.source.update()
        self.source.stop = dies is not None
        both = asyncio.gather(
            self.publish.publish(version, None, 60.0), asyncio.to_thread(self.trainers.publish, version)
        )
        if dies is not None:
            await asyncio.to_thread(self.source.stopped.wait, 60)
            dies.kill()
            self.source.stopped.clear()
            self.source.go_on.set()
        held, _ = await both
        self.source.go_on.clear()
        return held.moved

    async def started_again(self, index: int, url: str) -> None:
        """As the launcher says it; until it answers."""
        self.roster.renew(index, 1, url)
        deadline = asyncio.get_running_loop().time() + 60
        while self.fleet._members[index].state != "ready":
            assert asyncio.get_running_loop().time() < deadline, "the fleet does not see it"
            await asyncio.sleep(0.02)

    async def responses(self) -> dict[str, Any]:
        """Returns each serving engine's response to one prompt from one seed."""
        tokens = np.arange(2, 20, dtype=np.int32)
        sampling = Sampling(12, 1.0, ignore_eos=True)
        return {
            engine.name: bits(await engine.generate(tokens, 1, 7, sampling, deadline_s=60.0))
            for engine in self.pool.engines
        }


def sent_bytes() -> dict[str, int]:
    """By connection of this process: data that has been sent (tcp_info.tcpi_bytes_sent of Linux 4.19 and later)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found[link] = struct.unpack_from("Q", info, 200)[0]
        except OSError:  # it was closed meanwhile
            continue
    return found


def sent_since(before: dict[str, int]) -> int:
    """Over connections that are still open, as those of a group are."""
    return sum(count - before.get(link, 0) for link, count in sent_bytes().items())


async def test_the_trainers_send_one_copy_to_four_engines_and_a_publish_goes_on_without_who_dies_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines 1, 2 and 3 are behind engine 0. 2 dies in the middle of a publish, then 0, which comes back; at last nobody is
    behind anybody."""
    model = make_engine_model(tmp_path / "model")
    engines = [ForkedEngine(model, tmp_path / f"engine-{number}") for number in range(4)]
    try:
        urls = [engine.url() for engine in engines]
        async with Job(model, urls, [{"engines": [1, 2, 3], "via": 0}]) as job:
            copy = job.source.manifest.num_bytes

            async def all_alike(*which: int) -> None:
                written = await job.responses()
                assert set(written) == {urls[number] for number in which}
                assert len(set(map(str, written.values()))) == 1, "engines hold different weights"

            assert await job.version(0) == MovedBytes(copy, 3 * copy)
            await all_alike(0, 1, 2, 3)
            before = sent_bytes()
            assert await job.version(1) == MovedBytes(copy, 3 * copy)
            on_the_wire = sent_since(before)
            assert copy <= on_the_wire < 1.3 * copy, f"{on_the_wire / copy:.2f} copies left the trainers"

            with caplog.at_level(logging.WARNING):
                assert await job.version(2, dies=engines[2]) == MovedBytes(copy, 2 * copy)
                await all_alike(0, 1, 3)
                assert await job.version(3, dies=engines[0]) == MovedBytes(copy, copy), "1 has taken the place of 0"
                await all_alike(1, 3)
            for version in (2, 3):
                told = [
                    r.getMessage()
                    for r in caplog.records
                    if f"publish of weight version {version} failed" in r.getMessage()
                ]
                assert len(told) == 1 and "\n" not in told[0], told
            lost = [r.getMessage() for r in caplog.records if " is lost: " in r.getMessage()]
            assert [text.split()[1] for text in lost] == [urls[2], urls[0]]

            engines.append(ForkedEngine(model, tmp_path / "engine-0-again"))
            urls[0] = engines[-1].url()
            await job.started_again(0, urls[0])
            assert await job.version(4) == MovedBytes(copy, 2 * copy), "the planned tree, with those that are there"
            await all_alike(0, 1, 3)

            job.publish._groups = EngineGroups(config(4, [], attach=urls), job.pool, job.connection)  # the control
            job.publish._connected = None
            assert await job.version(5) == MovedBytes(3 * copy, 0)
            before = sent_bytes()
            await job.version(6)
            assert sent_since(before) > 1.8 * copy, (
                "several engines of the trainers' group are sent a copy of their own"
            )
            await all_alike(0, 1, 3)
    finally:
        for engine in engines:
            engine.kill()
