"""Publication policies of the coordinator: what engines are asked for at a border, in which order, and what waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.milestones import Milestones
from pa_npu.control.tasks import TaskScope
from pa_npu.coordinator.publication import (
    BlockingPublication,
    DelayedPublication,
    RollingPublication,
    SkippingPublication,
    publication_kind,
)
from pa_npu.coordinator.record import BorderOutcome
from pa_npu.engines.protocol import EngineError
from pa_npu.publish.engines_hold import EnginesHold
from pa_npu.publish.messages import READY, TrainersReady
from pa_npu.publish.probes import ProbePlan
from tests.helpers.policies import publication

LAST = 6
PROMPT: Any = "prompt"
MEMBERS: Any = ["engine 0", "engine 1", "engine 2"]
HELD = EnginesHold(probe=None, ready_s=1.0, loaded_s=2.0, compared_s=2.5, done_s=3.0)


class Publish:
    """The protocol's coordinator side: notes what it is asked for in `events`.

    prepares: whether a version can be sent while engines generate. first_swapped, all_swapped: when
    engines have swapped.
    """

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.prepares = True
        self.fails = False
        self.first_swapped = asyncio.Event()
        self.all_swapped = asyncio.Event()

    async def publish(self, version: int, prompt: Any, trainers_within_s: float) -> EnginesHold:
        self.events.append(f"load {version}" + (" and probe" if prompt is not None else ""))
        return HELD

    async def prepare(self, version: int, trainers_within_s: float) -> Any:
        self.events.append(f"prepare {version}")
        return MEMBERS if self.prepares else None

    async def swap(self, version: int, prepared: Any, begins: Callable[[], None]) -> EnginesHold:
        assert prepared == MEMBERS
        self.events.append(f"swap {version}")
        await self.first_swapped.wait()
        if self.fails:
            raise EngineError("no engine is left")
        begins()
        await self.all_swapped.wait()
        return HELD


class Guest:
    """A guest with requests in flight."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.is_running = True

    async def make_way(self, version: int) -> None:
        self.events.append(f"make way for {version}")

    def engines_hold(self, version: int) -> None:
        self.events.append(f"may use {version}")


class Border:
    """Crosses borders by a policy, and notes what happens in `events`."""

    def __init__(self, kind: type[BlockingPublication], **parts: Any) -> None:
        self.events: list[str] = []
        self.publish = Publish(self.events)
        self.channel = StoreChannel(dist.HashStore(), "pa/0/")  # type: ignore[attr-defined]
        self.is_written = asyncio.Event()
        self.is_written.set()
        self.policy = publication(
            kind,
            last=LAST,
            **{
                "channel": self.channel,
                "publish": self.publish,
                "written": self.written,
                **parts,
            },
        )

    async def written(self, version: int) -> None:
        await self.is_written.wait()
        self.events.append(f"written before {version}")

    async def crossed(self, outcome: BorderOutcome) -> None:
        self.events.append("crossed")

    async def cross(self, version: int, scope: TaskScope) -> asyncio.Future[BorderOutcome]:
        return await self.policy.cross(version, PROMPT, self.crossed, scope)

    async def cross_wholly(self, version: int) -> BorderOutcome:
        async with TaskScope() as scope:
            return await (await self.cross(version, scope))

    async def expect(self, version: int) -> asyncio.Future[BorderOutcome]:
        """The border before `version`, which is still open."""
        before: asyncio.Future[BorderOutcome] = asyncio.get_running_loop().create_future()
        self.policy.expect(version, before)
        await settle()
        return before

    async def arrived(self, version: int) -> None:
        """Version 0 is held, and `version` has been sent while engines generate."""
        outcome = await self.cross_wholly(0)
        (await self.expect(version)).set_result(outcome)
        await settle()
        self.events.clear()


async def settle() -> None:
    """Lets all tasks run until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def ready(border: Border, version: int, *, publishes: bool = True) -> None:
    READY.put(border.channel, TrainersReady(version, publishes=publishes), version=version)


def test_each_mode_has_its_policy() -> None:
    def kind(**publish: Any) -> type[BlockingPublication]:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "schedule": {"max_staleness": 1},
            "rollout": {"engines": 4},
            "publish": publish,
        }
        return publication_kind(Config.model_validate(tree).publish)

    assert kind() is BlockingPublication
    assert kind(mode="delayed") is DelayedPublication
    assert kind(mode="rolling") is RollingPublication
    assert kind(divergence=0.1) is SkippingPublication


async def test_a_version_is_loaded_when_all_groups_are_written_and_the_iteration_ends_before_guests_return() -> (
    None
):
    border = Border(BlockingPublication)
    border.policy.guests = [Guest(border.events)]
    with pytest.raises(AssertionError, match="no version"):
        _ = border.policy.version
    ready(border, 0)
    outcome = await border.cross_wholly(0)
    assert border.events == [
        "make way for 0",
        "written before 0",
        "load 0 and probe",
        "may use 0",
        "crossed",
    ]
    assert border.policy.version == 0 and outcome.held is HELD and outcome.engines == 2


async def test_a_guest_with_nothing_in_flight_is_not_waited_for() -> None:
    border = Border(BlockingPublication)
    guest = Guest(border.events)
    guest.is_running = False
    border.policy.guests = [guest]
    await border.cross_wholly(0)  # the trainers are not ready
    assert "make way for 0" not in border.events


@pytest.mark.parametrize("rides", [True, False])
async def test_the_first_and_the_last_version_are_probed_and_others_where_no_group_is_the_probe(
    rides: bool,
) -> None:
    probes = ProbePlan(num_tokens=4, num_responses=16, rides=rides)
    border = Border(BlockingPublication, probes=probes, first=2)
    for version in range(2, LAST + 1):
        await border.cross_wholly(version)
    loads = [event for event in border.events if event.startswith("load")]
    assert [load for load in loads if load.endswith("and probe")] == (
        ["load 2 and probe", "load 6 and probe"] if rides else loads
    )


async def test_a_version_that_trainers_leave_out_changes_nothing_on_the_engines() -> None:
    border = Border(SkippingPublication)
    border.policy.guests = [Guest(border.events)]
    ready(border, 0)
    await border.cross_wholly(0)
    border.events.clear()
    ready(border, 1, publishes=False)
    outcome = await border.cross_wholly(1)
    assert border.events == ["make way for 1", "may use 0", "crossed"]
    assert border.policy.version == 0 and outcome.publish_s == 0.0
    ready(border, 2)
    await border.cross_wholly(2)
    assert border.policy.version == 2 and "load 2" in border.events, "negative control"


async def test_a_delayed_version_is_prepared_after_the_border_before_it_and_swapped_to_at_its_own() -> (
    None
):
    border = Border(DelayedPublication)
    outcome = await border.cross_wholly(0)
    before = await border.expect(1)
    assert "prepare 1" not in border.events, "second buffers are not free yet"
    before.set_result(outcome)
    await settle()
    assert border.events[-1] == "prepare 1"
    border.events.clear()
    border.publish.first_swapped.set()
    border.publish.all_swapped.set()
    await border.cross_wholly(1)
    assert border.events == ["swap 1", "written before 1", "crossed"]
    assert border.policy.version == 1


@pytest.mark.parametrize("kind", [DelayedPublication, RollingPublication])
async def test_a_version_that_could_not_be_prepared_is_loaded_at_the_border_without_a_probe(
    kind: type[DelayedPublication],
) -> None:
    border = Border(kind, probes=ProbePlan(num_tokens=4, num_responses=16, rides=False))
    border.publish.prepares = False
    await border.arrived(1)
    await border.cross_wholly(1)
    assert border.events == ["written before 1", "load 1", "crossed"]


async def test_the_last_version_does_not_come_while_engines_generate() -> None:
    border = Border(DelayedPublication)
    outcome = await border.cross_wholly(0)
    (await border.expect(LAST)).set_result(outcome)
    await settle()
    await border.cross_wholly(LAST)
    assert border.events[-2:] == [f"load {LAST} and probe", "crossed"]


async def test_new_groups_go_to_the_first_engines_that_have_swapped_while_others_still_write() -> (
    None
):
    border = Border(RollingPublication)
    await border.arrived(1)
    border.is_written.clear()
    assert border.policy.swaps_in_turn(1)
    async with TaskScope() as scope:
        crossing = asyncio.create_task(border.cross(1, scope))
        await settle()
        assert not crossing.done(), "no engine has swapped"
        border.publish.first_swapped.set()
        crossed = await asyncio.wait_for(crossing, 5)
        assert border.policy.version == 1 and not crossed.done()
        border.publish.all_swapped.set()
        await settle()
        assert not crossed.done() and border.events == ["swap 1"], "groups are not written yet"
        border.is_written.set()
        await asyncio.wait_for(crossed, 5)
    assert border.events == ["swap 1", "written before 1", "crossed"]


@pytest.mark.parametrize("due", [{"save_every": 1}, {"evaluate_every": 1}])
async def test_engines_swap_together_to_a_version_that_is_saved_or_evaluated(
    due: dict[str, Any],
) -> None:
    border = Border(RollingPublication, milestones=Milestones(last=LAST, **due))
    await border.arrived(1)
    assert not border.policy.swaps_in_turn(1)
    border.publish.first_swapped.set()
    async with TaskScope() as scope:
        crossing = asyncio.create_task(border.cross(1, scope))
        await settle()
        assert not crossing.done(), "all engines have to swap"
        border.publish.all_swapped.set()
        assert (await asyncio.wait_for(crossing, 5)).done()


@pytest.mark.parametrize("kind", [DelayedPublication, RollingPublication])
async def test_a_swap_that_fails_ends_the_border(kind: type[DelayedPublication]) -> None:
    border = Border(kind)
    await border.arrived(1)
    border.publish.fails = True
    border.publish.first_swapped.set()
    with pytest.raises(EngineError, match="no engine is left"):
        await asyncio.wait_for(border.cross_wholly(1), 5)


async def test_what_is_under_way_ends_with_the_run() -> None:
    border = Border(RollingPublication)
    await border.arrived(1)
    crossing = asyncio.create_task(border.cross_wholly(1))
    await settle()
    crossing.cancel()
    await asyncio.wait({crossing})
    await border.policy.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
