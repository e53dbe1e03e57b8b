"""Engines that want to leave: whatever state they are in, they are gone once nothing is in flight and no publish has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.config.sections.rollout import RolloutConfig
from pa_npu.control.channel import StoreChannel
from pa_npu.control.roster import Roster
from pa_npu.engines.member import Member
from pa_npu.engines.membership import EngineMembership
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineCapabilities, EngineGone
from pa_npu.errors import ConfigError, PaNpuError


class SlowToStart:
    """Answers once it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = asyncio.Event()
        self.closed = False
        self.capabilities = EngineCapabilities("vllm")

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        await asyncio.wait_for(self.answers.wait(), deadline_s)
        return self.capabilities

    async def close(self) -> None:
        self.closed = True


class Job:
    """A membership over a roster in memory, whose trainers give nobody a version inside an
    iteration.

    engines: those it has made clients for, by URL.
    """

    def __init__(self, needs_expert_choices: bool = False) -> None:
        self.roster = Roster(StoreChannel(dist.HashStore()), "")
        self.pool = EnginePool()
        self.engines: dict[str, SlowToStart] = {}
        self.membership = EngineMembership(
            RolloutConfig(),
            self.pool,
            Roster(self.roster._channel, ""),
            self._make,
            needs_expert_choices,
        )

    async def deliver_late(self, member: Member, version: int) -> bool:
        return False

    def _make(self, url: str) -> Any:
        return self.engines.setdefault(url, SlowToStart(url))

    async def until(self, condition: Callable[[], bool], description: str) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, description
            await asyncio.sleep(0.01)

    async def serving(self, url: str) -> int:
        """An engine that joined and serves version 0; its index."""
        index = self.roster.announce(url, restarts=False)
        await self.until(lambda: url in self.engines, "the membership sees it")
        self.engines[url].answers.set()
        await self.until(lambda: self.membership._members[index].state == "ready", "it is ready")
        async with self.membership.border():
            self.membership.serve(await self.membership.members(), 0, self.deliver_late)
        return index


async def test_an_engine_that_leaves_finishes_what_it_has_in_flight_first():
    job = Job()
    async with job.membership:
        await job.serving("a")
        index = await job.serving("b")
        lease = await job.pool.admit(1, 1, lambda _: 8, 1.0)
        another = await job.pool.admit(1, 1, lambda _: 8, 1.0)
        leaving = next(held for held in (lease, another) if held.engine.name == "b")
        job.roster.ask_leave(index)
        await job.until(lambda: len(job.pool.engines) == 1, "nothing more is admitted to it")
        await asyncio.sleep(0.6)  # several looks of the membership
        assert not job.roster.has_left(index), "a group is in flight on it"
        leaving.close()
        await job.until(lambda: job.roster.has_left(index), "it has left")
        assert job.engines["b"].closed and [engine.name for engine in job.pool.engines] == ["a"]


async def test_an_engine_that_wants_to_leave_before_it_was_ready_leaves_and_never_serves():
    job = Job()
    async with job.membership:
        await job.serving("a")
        index = job.roster.announce("b", restarts=False)
        await job.until(lambda: "b" in job.engines, "the membership sees it")
        job.roster.ask_leave(index)
        await job.until(lambda: job.roster.has_left(index), "it has left")
        job.engines["b"].answers.set()
        async with job.membership.border():
            assert [member.name for member in await job.membership.members()] == ["a"]


async def test_an_engine_that_asked_to_leave_while_no_coordinator_ran_has_left_for_the_next_one():
    job = Job()
    index = job.roster.announce("a", restarts=False)
    job.roster.ask_leave(index)
    async with job.membership:
        assert job.roster.has_left(index) and not job.engines


async def test_an_engine_that_wants_to_leave_inside_a_publish_stays_until_it_is_done():
    """Its workers are in the trainers' groups; without them the publish would fail for all."""
    job = Job()
    async with job.membership:
        await job.serving("a")
        index = await job.serving("b")
        async with job.membership.border():
            members = await job.membership.members()
            job.roster.ask_leave(index)
            await job.until(
                lambda: members[1].state == "leaving", "the membership has seen the wish"
            )
            await asyncio.sleep(0.6)  # several looks of the membership
            assert not job.roster.has_left(index) and not job.engines["b"].closed
            job.membership.serve(members, 1, job.deliver_late)
        assert [engine.name for engine in job.pool.engines] == ["a"], (
            "it does not serve the new version"
        )
        await job.until(lambda: job.roster.has_left(index), "it has left")


@pytest.mark.parametrize("wants", [True, False])
async def test_a_lost_engine_that_nothing_starts_again_has_left(wants):
    job = Job()
    async with job.membership:
        await job.serving("a")
        index = await job.serving("b")
        if wants:
            job.pool.in_flight = lambda engine: 1  # type: ignore[method-assign]
            job.roster.ask_leave(index)
            await job.until(
                lambda: job.membership._members[index].state == "leaving",
                "the membership has seen the wish",
            )
        await job.membership.report_lost(job.engines["b"], "it died")  # type: ignore[arg-type]
        assert job.roster.has_left(index) and job.membership.size == 1


async def test_an_engine_that_joined_before_a_publish_takes_part_in_it_and_one_that_does_not_answer_delays_it_little():
    job = Job()
    async with job.membership:
        await job.serving("a")
        job.engines["b"] = SlowToStart("b")
        job.engines["b"].answers.set()
        for url in ("b", "c"):
            job.roster.announce(url, restarts=False)
        began = asyncio.get_running_loop().time()
        async with job.membership.border():
            assert [member.name for member in await job.membership.members()] == ["a", "b"]
        assert asyncio.get_running_loop().time() - began < 20


async def test_an_engine_that_joins_while_others_are_asked_to_load_gets_that_version_right_after():
    """They are asked when nothing is in flight any more, which may be long before the trainers have
    the version.
    """
    delivered: list[tuple[str, int]] = []

    class DeliversLate(Job):
        async def deliver_late(self, member: Member, version: int) -> bool:
            delivered.append((member.name, version))
            return True

    job = DeliversLate()
    async with job.membership:
        await job.serving("a")
        inside = job.roster.announce(
            "b", restarts=False
        )  # the control: inside an iteration it waits for the next publish
        await job.until(lambda: "b" in job.engines, "the membership sees it")
        job.engines["b"].answers.set()
        await job.until(lambda: job.membership._members[inside].state == "ready", "it is ready")
        async with job.membership.border():
            members = await job.membership.members()
            assert [member.name for member in members] == ["a", "b"]
            index = job.roster.announce("c", restarts=False)
            await job.until(lambda: "c" in job.engines, "the membership sees it")
            job.engines["c"].answers.set()
            await job.until(lambda: job.membership._members[index].state == "ready", "it is ready")
            assert delivered == [], "not among the loads of a publish"
            job.membership.serve(members, 1, job.deliver_late)
        await job.until(
            lambda: job.membership._members[index].state == "serving",
            "it serves inside the iteration",
        )
    assert delivered == [("c", 1)]


async def test_a_fleet_that_ends_while_it_removes_an_engine_ends():
    """The engine takes a while to stop; the end of the membership comes in between and must not be
    taken for that.
    """
    job = Job()
    stopping = asyncio.Event()

    class SlowToStop(SlowToStart):
        async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
            try:
                return await super().wait_ready(deadline_s=deadline_s)
            finally:
                stopping.set()
                await asyncio.sleep(0.2)

    job.engines["a"] = SlowToStop("a")
    await job.membership.__aenter__()
    index = job.roster.announce("a", restarts=False)
    await job.until(lambda: job.membership.size == 1, "the membership sees it")
    job.roster.ask_leave(index)
    await asyncio.wait_for(stopping.wait(), 10)
    await asyncio.wait_for(job.membership.__aexit__(None, None, None), 10)


async def test_an_engine_that_answers_what_nobody_expects_ends_the_run_at_once():
    """Nobody waits for the tasks of the membership: without a word from them, engines would be
    waited for until a deadline.
    """

    class Odd(SlowToStart):
        async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
            raise KeyError("version")

    job = Job()
    job.engines["a"] = Odd("a")
    async with job.membership:
        job.roster.announce("a", restarts=False)
        with pytest.raises(PaNpuError, match="the watch over the engines failed: KeyError"):
            await asyncio.wait_for(job.pool.admit(1, 1, lambda _: 8, 60.0), 10)
        with pytest.raises(PaNpuError, match="the watch over the engines failed: KeyError"):
            await asyncio.wait_for(job.membership.wait_all_ready(), 10)


@pytest.mark.parametrize(
    ("capabilities", "problem"),
    [
        (
            EngineCapabilities("vllm", num_workers=2),
            "has 2 workers, but rollout.tensor_parallel = 1",
        ),
        (EngineCapabilities("vllm", "0.9"), r"\(0.9\) does not say which experts a token took"),
    ],
)
async def test_an_engine_that_is_not_what_the_run_needs_ends_it_before_a_publish_waits_for_its_workers(
    capabilities, problem
):
    job = Job(needs_expert_choices="experts" in problem)
    job.engines["a"] = SlowToStart("a")
    job.engines["a"].capabilities = capabilities
    job.engines["a"].answers.set()
    async with job.membership:
        job.roster.announce("a", restarts=False)
        await job.until(lambda: job.membership.size == 1, "the membership sees it")
        with pytest.raises(ConfigError, match=problem):
            await asyncio.wait_for(job.membership.wait_all_ready(), 10)


async def test_the_end_of_the_last_engine_says_what_happened_to_it():
    """An attached engine, which nothing starts again: the reason is in the line that ends the run."""
    job = Job()
    async with job.membership:
        await job.serving("a")
        await job.membership.report_lost(job.engines["a"], "engine a: it was started again")  # type: ignore[arg-type]
        with pytest.raises(
            EngineGone, match=r"no engine is left, .* the last, a: engine a: it was started again"
        ):
            await job.pool.admit(1, 1, lambda _: 8, 1.0)


async def test_the_roster_knows_them_and_they_are_no_devices_of_their_own():
    job = Job()
    async with job.membership:
        for url in ("own", "shared"):
            job.roster.announce(url, shared=url == "shared")
            await job.until(lambda url=url: url in job.engines, "the membership sees it")
            job.engines[url].answers.set()
        await job.until(
            lambda: all(m.state == "ready" for m in job.membership._members.values()),
            "both are ready",
        )
        assert job.membership.size == 1
        assert {name: use.shared for name, use in job.pool.use().items()} == {
            "own": False,
            "shared": True,
        }
