"""The engine of a service: one version at a time, by the version that was asked for, through an engine that ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from pa_npu.engines.protocol import EngineGone, Generation, LoadedWeights, Sampling
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.service.commands import Probe, Ready
from pa_npu.service.sampler import ProbeLengths, Sampler
from pa_npu.service.wire import Refused

PROMPT = np.array([1, 2], np.int32)
SAMPLING = Sampling(max_tokens=4, temperature=1.0)


class Engine:
    """Answers by the version that it holds. The first `dies_at` answer is none: it has ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version: int | None = None
        self.in_flight = 0

    async def wait_ready(self, *, deadline_s: float) -> None: ...

    async def join_weight_groups(self, joins: Any, *, deadline_s: float) -> None: ...

    async def load_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        assert self.in_flight == 0, "a load with requests in flight"
        await asyncio.sleep(0.01)
        self.version = version
        self.world.loads.append(version)
        return LoadedWeights((version,), ((self.world.arrived or f"d{version}",),))

    async def generate(self, prompt: Any, n: int, seed: int, sampling: Any, **_: Any) -> Any:
        self.in_flight += 1
        await asyncio.sleep(0.005)
        self.in_flight -= 1
        self.world.sampled.append((n, sampling.ignore_eos))
        if self.world.deaths:
            self.world.deaths -= 1
            raise EngineGone("it has ended")
        tokens = np.full(sampling.max_tokens, self.version, np.int32)
        return [Generation(tokens, np.zeros(len(tokens), np.float32), "", "length")] * n

    async def close(self) -> None:
        self.world.closed += 1


class World:
    """Engines, and the trainers that publish. arrived: digest of what arrives; None: what was sent.
    difference: what they answer to a probe; None: there is none.
    """

    def __init__(
        self,
        deaths: int = 0,
        arrived: str | None = None,
        refusals: int = 0,
        difference: str | None = None,
    ) -> None:
        self.deaths, self.arrived, self.refusals = deaths, arrived, refusals
        self.difference = difference
        self.probes: list[Probe] = []
        self.sampled: list[tuple[int, bool]] = []
        self.loads: list[int] = []
        self.epochs: list[int] = []
        self.closed = 0

    async def ask(self, command: Any) -> bytes:
        if isinstance(command, Probe):
            self.probes.append(command)
            return (self.difference or "").encode()
        self.epochs.append(command.epoch)
        if self.refusals:
            self.refusals -= 1
            raise Refused("publish: an engine ended")
        await asyncio.sleep(0.01)
        return f"d{command.version}".encode()

    def sampler(self) -> Sampler:
        return Sampler(
            lambda: Engine(self),  # type: ignore[arg-type, return-value]
            self,  # type: ignore[arg-type]
            Ready(9, "base", "software", "name", {}, "gloo"),
            ("127.0.0.1", 1),
            load_timeout_s=1.0,
            start_timeout_s=1.0,
            probe=None if self.difference is None else ProbeLengths(3, 4),
        )


async def ask(sampler: Sampler, version: int, deadline_s: float = 5.0) -> int:
    (answer,) = await sampler.generate(version, "file", PROMPT, 1, 0, SAMPLING, deadline_s)
    return int(answer.tokens[0])


async def test_every_request_gets_its_version_and_those_that_wait_together_share_a_load() -> None:
    world = World()
    async with world.sampler() as sampler:
        versions = [1, 2, 1, 2, 1, 3, 2, 1]
        answers = await asyncio.gather(*(ask(sampler, version) for version in versions))
    assert answers == versions
    assert sorted(world.loads) == [1, 2, 3] and set(world.epochs) == {1}


async def test_an_engine_that_ends_is_asked_again_in_new_groups() -> None:
    world = World(deaths=2)
    async with world.sampler() as sampler:
        assert await ask(sampler, 4) == 4
    assert world.epochs == [1, 2, 3] and world.closed == 3


async def test_trainers_that_lose_the_engine_publish_again() -> None:
    world = World(refusals=1)
    async with world.sampler() as sampler:
        assert await ask(sampler, 4) == 4
    assert world.epochs == [1, 2]


async def test_weights_that_arrived_otherwise_are_an_error() -> None:
    async with World(arrived="other").sampler() as sampler:
        with pytest.raises(InvariantViolation, match="did not receive weight version 4"):
            await ask(sampler, 4)


async def test_an_engine_that_never_answers_ends_at_the_deadline() -> None:
    async with World(deaths=100).sampler() as sampler:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
            await ask(sampler, 1, deadline_s=0.2)


async def test_every_load_is_probed_with_the_prompt_of_its_request() -> None:
    world = World(difference="")
    async with world.sampler() as sampler:
        answers = await asyncio.gather(*(ask(sampler, version) for version in (1, 1, 2)))
    assert answers == [1, 1, 2]
    probes = [(probe.version, probe.prompt, len(probe.tokens)) for probe in world.probes]
    assert probes == [(1, [1], 16), (2, [1], 16)], "4 tokens have room for one of the prompt"
    assert world.sampled.count((16, True)) == 2


async def test_an_engine_with_other_weights_answers_nobody_and_is_replaced() -> None:
    world = World(difference="I5: other weights")
    async with world.sampler() as sampler:
        for _ in range(2):
            with pytest.raises(Refused, match="I5: other weights"):
                await ask(sampler, 1)
        world.difference = ""
        assert await ask(sampler, 1) == 1
    assert world.epochs == [1, 2, 3] and world.loads == [1, 1, 1]
    assert [n for n, _ in world.sampled] == [16, 16, 16, 1]
