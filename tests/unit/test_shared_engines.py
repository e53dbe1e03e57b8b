"""Engines on the trainers' devices: where they are, what they are given and when, what they cost, and how they are counted."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.virtual_cluster import CPU, NPU, Case, Lengths, rules_of, run_controller

from pa_npu.config import Config
from pa_npu.dispatch.schedule import Dispatching, Schedule, Turn, engine_with_room, same_windows
from pa_npu.engines.membership import Member
from pa_npu.engines.pool import EnginePool
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import place, place_nodes
from pa_npu.planning.iteration_model.cluster import Cluster, EngineSpeed, VirtualGroup
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import GroupOutlook, IterationOutlook, IterationTimes
from pa_npu.planning.iteration_model.simulate import simulate
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.plan_text import derived_lines
from pa_npu.planning.shortages import shortages
from pa_npu.publish.engine_groups import Connection, EngineGroups
from pa_npu.publish.messages import StageManifest

GIB = 2**30


def known(path: str) -> ModelSpec:
    spec = known_spec(path)
    assert spec is not None
    return spec


QWEN_7B = known("models/Qwen2.5-7B")


def make_config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def shared_config(engines: int = 1, **sections: dict[str, Any]) -> Config:
    rollout = {"shared_engines": engines, **sections.pop("rollout", {})}
    return make_config(rollout=rollout, **sections)


# ------------------------------------------------------------------------------------------------------- where they are


def test_they_take_the_trainers_devices_and_cores_in_order_and_add_none():
    config = shared_config(2, rollout={"tensor_parallel": 2}, trainer={"devices": 4})
    placement = place(config, 8, range(64))
    assert placement.engine_devices == ((0, 1), (2, 3), (4, 5)) and placement.trainer_devices == (2, 3, 4, 5)
    assert placement.engines == (0, 1, 2)
    assert config.num_devices == 6 and config.num_engines == 3, "each device counts once"
    assert "engine-1 on device 2,3, shared with trainers" in placement.lines()
    assert "engine-0 on device 0,1" in placement.lines(), "negative control"
    on_cores = place(shared_config(), None, [4, 7])
    assert on_cores.engine_cores == ((4,), (7,)) and on_cores.trainer_cores == ((7,),)


def test_on_several_nodes_they_are_where_their_trainers_are():
    config = shared_config(
        8,
        rollout={"engines": 8},
        trainer={"devices": 8},
        schedule={"prompts_per_iteration": 8},
        placement={"cluster": "ray", "nnodes": 2},
    )
    first, second = place_nodes(config)
    assert first.engines == tuple(range(8)) and second.engines == tuple(range(8, 16))
    assert second.engine_devices == tuple((device,) for device in second.trainer_devices)
    wide = shared_config(
        1,
        rollout={"engines": 1, "tensor_parallel": 4},
        trainer={"devices": 4, "tensor_parallel": 2},
        placement={"cluster": "ray", "nnodes": 4, "devices_per_node": 4, "trainer_devices": [4, 5, 8, 9]},
    )
    with pytest.raises(ConfigError, match="peers on several nodes"):
        place_nodes(wide)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"shared_engines": 2}, "rollout.shared_engines: 2 engines of 1 device .* set it to at most 1"),
        ({"shared_engines": 1, "tensor_parallel": 2}, "more than the 1 trainer device;"),
        (
            {"shared_engines": 1, "attach": ["http://a"]},
            r"1 URLs for rollout.engines = 1 \+ rollout.shared_engines = 1",
        ),
    ],
)
def test_more_than_the_trainers_have_devices_for_is_refused(rollout: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=expected):
        make_config(rollout=rollout)


def test_with_staleness_trainers_never_wait_and_shared_engines_are_refused():
    with pytest.raises(ValueError, match="trainers that are behind never wait"):
        shared_config(schedule={"max_staleness": 1})


# ------------------------------------------------------------------------------------------------------- memory


def test_one_line_says_whether_both_fit_on_a_device_and_what_to_change_if_not():
    schedule = {"prompts_per_iteration": 16}
    trainer = {"devices": 8, "tensor_parallel": 8, "sequence_parallel": True, "recompute": "full"}
    short = {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "tensor_parallel": 4, "shared_memory_fraction": 0.3}
    fits = shared_config(2, rollout=short, trainer={**trainer, "tensor_parallel": 4}, schedule=schedule)
    assert not [s for s in shortages(fits, QWEN_7B, 80 * GIB, True) if s.role == "shared engine"]

    tight = shared_config(
        2, rollout={**short, "shared_memory_fraction": 0.7}, trainer=fits.trainer.model_dump(), schedule=schedule
    )
    (shortage,) = (s for s in shortages(tight, QWEN_7B, 80 * GIB, True) if s.role == "shared engine")
    assert not shortage.fatal and "of the engine beside it are more than nine tenths" in shortage.line()
    assert shortage.proposal is not None and shortage.proposal["rollout.shared_memory_fraction"] < 0.7

    small = shared_config(
        2, rollout={**short, "shared_memory_fraction": 0.02}, trainer=fits.trainer.model_dump(), schedule=schedule
    )
    (shortage,) = (s for s in shortages(small, QWEN_7B, 80 * GIB, True) if s.role == "shared engine")
    assert shortage.fatal and "less than one sequence" in shortage.line()

    never = shared_config(rollout={"max_num_seqs": 32}, trainer={"devices": 1})
    (shortage,) = (s for s in shortages(never, QWEN_7B, 64 * GIB, True) if s.role == "shared engine")
    assert shortage.proposal == {"rollout.shared_engines": 0} and "\n" not in shortage.line()


def test_the_dry_run_shows_them_and_counts_their_devices_once():
    config = shared_config()
    text = "\n".join(derived_lines(config, QWEN_7B, 80 * GIB, True))
    assert "2 = 1 engine x 1 + 1 trainer rank; 1 more engine x 1 on trainers' devices" in text
    assert "shared engine memory  24.0 GiB" in text and "with its trainer" in text
    assert "shared" not in "\n".join(derived_lines(make_config(), QWEN_7B, 80 * GIB, True)), "negative control"


# ------------------------------------------------------------------------------------------------------- dispatch


@dataclass
class Load:
    in_flight_sequences: int
    in_flight_tokens: float
    shared: bool = False


LOADS = {"own": Load(8, 100.0), "shared": Load(0, 0.0, True)}


def test_a_shared_engine_takes_what_is_for_it_and_nothing_else_while_others_serve():
    assert engine_with_room(LOADS, 8, lambda _: 64) == "own", "although the shared one is idle"
    assert engine_with_room(LOADS, 8, lambda _: 8) is None, "a full engine is waited for"
    assert engine_with_room(LOADS, 8, lambda _: 8, "shared") == "shared", "whatever the window"
    assert engine_with_room(LOADS, 8, lambda _: 64, "gone") == "own", (
        "an engine that died leaves its groups to the others"
    )
    assert engine_with_room(LOADS, 8, lambda _: 64, everywhere=True) == "shared"
    assert engine_with_room({"shared": LOADS["shared"]}, 8, lambda _: 64) == "shared", "nobody else serves"


def test_turns_are_those_of_the_groups_behind_the_shared_ones():
    turns = (Turn(0, 0.0), Turn(0, 3.0), Turn(1, 1.0))
    schedule = Schedule("s", tuple(range(5)), (same_windows(["own"], 64),), turns, shared=("shared", "shared"))
    progress = Dispatching(schedule, 1)
    for _ in range(2):
        assert progress.place() == "shared" and progress.ready_at() == 0.0
        progress.dispatched("shared")
    assert progress.place() is None and progress.ready_at() == 0.0
    progress.dispatched("own")
    assert progress.ready_at() == 3.0
    progress.completed(2.0, "shared")
    assert progress.ready_at() == 3.0, "a shared group's end is nobody's turn, and the engine is not idle for it"
    progress.dispatched("own")
    assert progress.ready_at() == math.inf
    progress.completed(9.0, "own")
    assert progress.ready_at() == 0.0 or progress.ready_at() == 10.0


def test_a_schedule_whose_shared_engine_died_is_followed_to_its_end():
    """Its groups take turns like the others, whatever ends where."""
    turns = tuple(Turn(index, 0.0) for index in range(4))
    schedule = Schedule("s", tuple(range(6)), (same_windows(["own"], 64),), turns, shared=("shared", "shared"))
    progress = Dispatching(schedule, 1)
    for number in range(6):
        assert progress.ready_at() < math.inf, f"group {number} could never go"
        progress.dispatched("own")
        progress.completed(float(number), "shared" if number == 5 else "own")


async def test_a_shared_engine_that_dies_before_it_has_its_group_keeps_nobody_waiting():
    async with EnginePool() as pool:
        own, shared = (SimpleNamespace(name=name, close=lambda: asyncio.sleep(0)) for name in ("own", "shared"))
        pool.add(own)
        pool.add(shared, shared=True)
        pool.serve(own)
        pool.serve(shared)
        assert pool.num_places(everywhere=False) == 1 and pool.num_places(everywhere=True) == 2
        first = await pool.admit(8, 10, lambda _: 8, 5.0, place="shared")
        assert first.engine is shared
        pool.suspend(shared)
        assert (await pool.admit(8, 10, lambda _: 8, 5.0, place="shared")).engine is own
        waiting = asyncio.create_task(pool.admit(8, 10, lambda _: 8, 5.0))
        pool.serve(shared)
        await asyncio.sleep(0)
        assert not waiting.done(), "negative control: an idle shared engine is no room"
        first.close()
        pool.suspend(own)
        assert (await waiting).engine is shared, "the last that serves"


@pytest.mark.parametrize(
    ("backend", "through", "expected"),
    [("gloo", "auto", "gloo"), ("nccl", "auto", "handles"), ("hccl", "auto", "handles"), ("hccl", "host", "host")],
)
async def test_no_publish_group_has_two_ranks_on_a_device_where_the_backend_forbids_it(
    backend: str, through: str, expected: str
):
    """Two engines of two workers, the shared one started first, and one stage."""
    rollout, trainer = {"tensor_parallel": 2}, {"devices": 2}
    config = shared_config(rollout=rollout, trainer=trainer, publish={"shared_through": through})
    async with EnginePool() as pool:
        engines = {name: SimpleNamespace(name=name, close=lambda: asyncio.sleep(0)) for name in ("shared", "own")}
        for name, engine in engines.items():
            pool.add(engine, shared=name == "shared")
        connection = Connection(("127.0.0.1", 1), backend, [StageManifest("stage", {})], [StageManifest("late", {})])
        members = [Member(number, 0, True, engine) for number, engine in enumerate(engines.values())]
        groups = EngineGroups(config, pool, connection)
        joined = groups.of_members(members, 0)
    found = {member.name: one for member, one in zip(members, joined, strict=True)}
    shape = {name: (g.backend, g.stages[0]["name"], g.first_rank, g.world_size) for name, g in found.items()}
    if expected == "gloo":
        assert shape == {"shared": ("gloo", "stage", 1, 5), "own": ("gloo", "stage", 3, 5)}
    elif expected == "handles":
        assert shape == {"shared": ("handles", "stage.handles", 1, 3), "own": (backend, "stage", 1, 3)}
    else:
        assert shape == {"shared": ("gloo", "stage.host", 1, 3), "own": (backend, "stage", 1, 3)}


# ------------------------------------------------------------------------------------------------------- the model


def shared_cluster(**values: Any) -> Cluster:
    speed = EngineSpeed(1.0, 0.0)
    return Cluster({"own": speed, "shared": speed}, 10**6, shared=("shared",), **values)


def equal_groups(steps: list[float], train_s: float) -> list[VirtualGroup]:
    return [VirtualGroup(i, 0, (float(n),), train_s, float(n)) for i, n in enumerate(steps)]


def test_trainers_begin_when_the_shared_engines_have_ended_what_they_began_with():
    """own: groups of 10 s, one after another. shared: 16 s. All train from then on."""
    groups = equal_groups([16, 10, 10], 8.0)
    schedule = Schedule("s", (0, 1, 2), (same_windows(["own"], 1),), shared=("shared",))
    outcome = simulate(shared_cluster(delivery_s=0.5), groups, schedule)
    assert {timing.index: timing.end_s for timing in outcome.timings} == {1: 10.0, 0: 16.0, 2: 20.0}
    # the first group of the others, which was ready at 10.5 s, from 16 s on; then the shared one's, then the third
    assert outcome.end_s == pytest.approx(16.0 + 3 * 8.0)
    apart = replace(schedule, shared=(), everywhere=True)
    assert simulate(shared_cluster(delivery_s=0.5), groups, apart).end_s == pytest.approx(10.5 + 3 * 8.0)


def with_shared(case: Case) -> Case:
    """An engine on each replica's devices, as fast as the others."""
    return replace(case, shared=case.replicas)


ENGINE_BOUND = replace(CPU, train=0.5)


@pytest.mark.parametrize(
    "case, most",
    [
        (replace(CPU, groups=64, train=1.0), 1.06),
        (replace(CPU, train=1.0), 1.18),
        (replace(CPU, groups=64, train=0.5), 0.79),
        (ENGINE_BOUND, 0.89),
        (replace(NPU, max_num_seqs=64, train=0.5, replicas=4), 0.92),
        (replace(CPU, lengths=Lengths(64, 256, 0.6, 0.4), groups=64, train=0.5), 0.9),
    ],
    ids=["balanced, 64", "balanced, 16", "engine-bound, 64", "engine-bound, 16", "7b", "heavy, 64"],
)
def test_iterations_with_shared_engines_go_below_what_separate_devices_can_do(case, most):
    """most: over max(Tg, Tt) without them, which separate devices cannot beat; balanced ones come near it."""
    numbers = range(4, 8)
    ran = run_controller(with_shared(case), 8)
    mean_s, bound_s = np.mean([ran[number].end_s for number in numbers]), case.bound_s(numbers)
    assert mean_s <= most * bound_s, f"{mean_s / bound_s:.3f}: {ran[-1].schedule.name}"
    errors = [abs(r.prediction.error) for r in ran[2:]]
    assert np.median(errors) <= 0.06, errors


def test_where_trainers_are_the_slower_side_a_shared_engine_costs_nothing():
    case = replace(CPU, groups=64, train=2.0)
    alone, ran = run_controller(case, 8), run_controller(with_shared(case), 8)
    assert np.mean([r.end_s for r in ran[4:]]) <= 1.01 * np.mean([r.end_s for r in alone[4:]])


def test_synchronous_iterations_and_runs_without_other_engines_use_them_like_any():
    controller = ScheduleController(rules_of(CPU), lambda prompt, lengths: prompt + sum(lengths))
    groups = [GroupOutlook(10, 20.0, 20.0)] * 4
    for outlook in (
        IterationOutlook(groups, ("a", "b"), False, ("b",)),
        IterationOutlook(groups, ("b",), True, ("b",)),
    ):
        schedule = controller.begin_iteration(outlook)
        assert schedule.everywhere and not schedule.shared
    periodic = controller.begin_iteration(IterationOutlook(groups, ("a", "b"), True, ("b",)))
    assert periodic.shared == ("b",) and not periodic.everywhere, "the first iteration learns how fast it is"
    assert not controller.begin_iteration(IterationOutlook(groups, ("a",), True)).everywhere
    controller.end_iteration(IterationTimes(1.0, 0.1, 0.2, 0.1))
