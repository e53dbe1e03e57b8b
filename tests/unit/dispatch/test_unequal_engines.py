"""Settings of single engines: windows of their own, speeds until they are measured, devices in records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import EngineSettings, RolloutConfig
from pa_npu.control.messages import EngineRunsOn, RunsOn
from pa_npu.dispatch.schedule import Schedule, SlowEngineLimit, same_windows, with_fixed_windows
from pa_npu.engines.member import Member
from pa_npu.engines.pool import EnginePool
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.fit import EngineFit
from pa_npu.planning.iteration_model.schedules import first_schedule
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Rules,
)
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.plan_text import derived_lines
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.platform.typical import typical_speed
from pa_npu.publish.engines import Connection, EngineProcessGroups
from pa_npu.publish.messages import StageManifest
from pa_npu.telemetry.report import named_devices
from tests.helpers.reports import trainers_run_on
from tests.helpers.virtual_cluster import CPU_ENGINE, Case, Lengths, rules_of
from tests.unit.engines.test_membership import Job
from tools.cluster.plan import planning_base
from tools.simulate import simulate

NAMES = ("fast", "slow")
SLOW_BY = 0.25


def tree(settings: list[dict[str, Any]], device: str = "cpu", **rollout: Any) -> dict[str, Any]:
    return {
        "run": {"device": device},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"engines": 3, "engine_settings": settings, **rollout},
    }


# --------------------------------------------------------------------------------------------------------
# configuration


@pytest.mark.parametrize(
    ("settings", "rollout", "problem"),
    [
        (
            [{"engines": [3], "speed": 0.5}],
            {},
            "there is no engine 3: the run has 3, numbered from 0",
        ),
        (
            [{"engines": [1], "speed": 0.5}, {"engines": [0, 1]}],
            {},
            "engine 1 is named 2 times; put all .* into one entry",
        ),
        (
            [{"engines": [1, 2], "window": 7}],
            {},
            "a window of 7 for engines 1, 2 cannot hold one group .* = 8; set it to",
        ),
        (
            [{"engines": [1], "device": "CUDA A100"}],
            {},
            "engine 1 on CUDA A100, but the run starts .*rollout.attach",
        ),
        ([{"engines": []}], {}, "at least 1 item"),
        ([{"engines": [0], "speed": 0.0}], {}, "greater than or equal to 0.05"),
        ([{"engines": [0], "speed": float("nan")}], {}, "speed"),
        ([{"engines": [0], "price": 3}], {}, "price"),
    ],
)
def test_what_makes_no_sense_is_refused(
    settings: list[dict[str, Any]], rollout: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        Config.model_validate(tree(settings, **rollout))


def test_kinds_of_devices_may_be_mixed_where_engines_are_attached() -> None:
    settings = [
        {"engines": [1], "device": "cuda A100"},
        {"engines": [2], "device": "a box in the cellar"},
    ]
    attach = [f"http://h{number}:1" for number in range(3)]
    rollout = Config.model_validate(tree(settings, "npu", attach=attach)).rollout
    assert [rollout.settings_of(number).device_kind for number in range(3)] == [None, "cuda", None]
    assert rollout.settings_of(0) == EngineSettings(engines=(0,))


def test_engines_on_other_devices_get_weights_through_host_memory_and_workers_are_numbered_on_by_way() -> (
    None
):
    settings = [{"engines": [2], "device": "cuda H100"}, {"engines": [0], "device": "NPU 910B"}]
    attach = [f"http://h{number}:1" for number in range(3)]
    chosen = Config.model_validate(
        tree(settings, "npu", attach=attach, engines=3, tensor_parallel=2)
    )
    engines: list[Any] = [Engine(f"e{number}") for number in range(3)]
    members = [Member(number, 0, True, engine) for number, engine in enumerate(engines)]
    connection = Connection(
        ("127.0.0.1", 1), "hccl", [StageManifest("s", {})], [StageManifest("late", {})], "npu"
    )
    groups = EngineProcessGroups(chosen.rollout, connection, chosen.publish.timeout_s)
    shape = [
        (g.backend, g.stages[0]["name"], g.first_rank, g.world_size)
        for g in groups.of_members(members, 7)
    ]
    assert shape == [
        ("hccl", "s/7/group", 1, 5),
        ("hccl", "s/7/group", 3, 5),
        ("gloo", "s/7/host", 1, 3),
    ]
    receivers = groups.receivers(members, 7)
    assert (receivers.workers, receivers.host_workers) == (4, 2)
    late = groups.of_late(9)
    assert (late.backend, late.stages[0]["name"], late.world_size) == ("gloo", "late/9/group", 3)


def test_the_dry_run_says_what_is_particular_to_which_engines() -> None:
    settings = [
        {"engines": [1, 2], "speed": 0.5, "window": 16, "device": "cpu old"},
        {"engines": [0], "speed": 2},
    ]
    spec: ModelSpec | None = known_spec("Qwen2.5-7B")
    lines = derived_lines(Config.model_validate(tree(settings)), spec, None, own_memory=False)
    actual = [line for line in lines if line.startswith("engines that differ")]
    assert actual == [
        "engines that differ   engines 1, 2: cpu old, expected speed 0.5, window 16",
        "engines that differ   engine 0: expected speed 2",
    ]


def test_the_dry_run_and_the_plan_of_a_cluster_take_them_into_account() -> None:
    """The plan, which varies how many engines there are, leaves them out."""
    spec = known_spec("Qwen2.5-7B")
    assert spec is not None
    slow, alike = (
        Config.model_validate(tree(s, "npu")) for s in ([{"engines": [2], "speed": 0.25}], [])
    )
    typical = typical_speed("npu")
    generate_s = [
        assumed_basis(c, spec, typical).predict(c, streams=False).generate_s for c in (slow, alike)
    ]
    assert generate_s[0] > 1.3 * generate_s[1]
    assert planning_base(slow, "npu") == planning_base(alike, "npu")


def test_what_a_run_runs_on_has_a_line_for_each_device() -> None:
    engines = [
        EngineRunsOn("a", "vllm", "0.23", "npu 910B"),
        EngineRunsOn("b", "vllm", "0.23"),
        EngineRunsOn("c", "vllm", "0.23"),
    ]
    lines = RunsOn(trainers_run_on(), tuple(engines)).lines()
    assert lines[1:] == ["engines: 1 x vllm 0.23 on npu 910B", "engines: 2 x vllm 0.23"]


async def test_the_fleet_tells_the_pool_and_the_record_of_each_engine_by_its_place_in_the_roster() -> (
    None
):
    job = Job()
    settings = [{"engines": [1], "window": 64, "speed": 0.5, "device": "npu 910B"}]
    job.membership._config = RolloutConfig.model_validate(
        {"engines": 2, "engine_settings": settings}
    )
    async with job.membership:
        for url in ("a", "b"):
            await job.serving(url)
        used = [(name, use.settings) for name, use in job.pool.use().items()]
        actual = {name: (own.window, own.speed, own.device) for name, own in used}
        assert actual == {"a": (None, 1.0, None), "b": (64, 0.5, "npu 910B")}
        assert [(engine.name, engine.device) for engine in job.membership.run_on()] == [
            ("a", None),
            ("b", "npu 910B"),
        ]


def test_a_report_names_the_devices_of_single_engines_and_reads_what_it_does_not_know() -> None:
    settings: list[Any] = [
        {"engines": [1, 2], "device": "npu 910B"},
        {"engines": [0], "device": "npu 910C"},
    ]
    assert (
        named_devices({"rollout": {"engine_settings": settings}})
        == "npu 910B (engines 1, 2), npu 910C (engine 0)"
    )
    unknown: list[Any] = [
        {},
        {"rollout": None},
        {"rollout": {"engine_settings": [3, {"device": "x"}, {"engines": [0]}]}},
    ]
    assert [named_devices(config) for config in unknown] == ["", "", ""]


# -------------------------------------------------------------------------------------------------------------
# windows


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name

    async def close(self) -> None:
        """Nothing is open."""


async def test_an_engine_has_no_more_in_flight_than_its_own_window_whatever_it_is_asked_for() -> (
    None
):
    """Also by evaluations and by other programs, which follow no schedule."""
    async with EnginePool() as pool:
        for name, window in (("small", 8), ("usual", None)):
            engine: Any = Engine(name)
            pool.add(engine, settings=EngineSettings(engines=(0,), window=window))
            pool.serve(engine)
        for _ in range(5):
            await pool.admit(4, 100, lambda name: 12, 1.0)
        assert {name: use.in_flight_sequences for name, use in pool.use().items()} == {
            "small": 8,
            "usual": 12,
        }
        with pytest.raises(Exception, match=r"window 8 to 12"):
            await pool.admit(4, 100, lambda name: 12, 0.01)


def test_windows_of_their_own_are_in_every_schedule_that_is_tried() -> None:
    case = Case("two", (CPU_ENGINE, CPU_ENGINE), 32, 4, 64, Lengths(100, 256, 0.5, 0.3), 64, 0.5)
    controller = ScheduleController(rules_of(case), lambda prompt, lengths: prompt + sum(lengths))
    own = {case.names[1]: 8}
    for number in range(4):
        groups, outlooks = case.work(number)
        schedule = controller.begin_iteration(IterationOutlook(outlooks, case.names, windows=own))
        assert [windows.on_engine(case.names[1]) for windows in schedule.windows] == [8] * len(
            schedule.windows
        )
        assert schedule.windows[-1].on_engine(case.names[0]) > 8, "the other's is chosen"
        outcome = simulate(case.cluster, groups, schedule)
        assert (
            most_in_flight(outcome.timings, case.names[1])
            == 8
            < most_in_flight(outcome.timings, case.names[0])
        )
        for timing in outcome.timings:
            controller.observe(timing)
        controller.end_iteration(IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0))


def test_reach_and_turns_stay_as_they_are_beside_windows_of_their_own() -> None:
    limit = SlowEngineLimit((1.0,), {}, 3.0)
    schedule = Schedule(
        "s", (0,), (same_windows(NAMES, 16), same_windows(NAMES, 32, 4)), slow_engine_limit=limit
    )
    changed = with_fixed_windows(schedule, {"slow": 8})
    assert [(w.on_engine("fast"), w.on_engine("slow"), w.from_group) for w in changed.windows] == [
        (16, 8, 0),
        (32, 8, 4),
    ]
    assert (changed.slow_engine_limit, changed.order) == (limit, (0,)) and with_fixed_windows(
        schedule, {}
    ) is schedule


def most_in_flight(timings: Any, engine: str) -> int:
    mine = [timing for timing in timings if timing.engine == engine]
    return max(
        sum(
            len(another.lengths)
            for another in mine
            if another.start_s <= timing.start_s < another.end_s
        )
        for timing in mine
    )


# --------------------------------------------------------------------------------------------------------------
# speeds


def first(speeds: dict[str, float], room: int = 32, groups: int = 40) -> Schedule:
    rules = Rules("auto", "auto", 4, 4 * room, 16, 1, "completion", 1)
    return first_schedule(
        rules, IterationOutlook([GroupOutlook(1, 10.0, 10.0)] * groups, NAMES, speeds=speeds)
    )


def test_the_first_schedule_has_windows_in_proportion_to_the_speeds_that_are_expected() -> None:
    equal = first({})
    assert [[w.on_engine(name) for name in NAMES] for w in equal.windows] == [[20, 20], [40, 40]]
    unequal = first({"slow": SLOW_BY})
    assert [[w.on_engine(name) for name in NAMES] for w in unequal.windows] == [[32, 8], [64, 16]]
    assert [w.on_engine("another") for w in unequal.windows] == [20, 40], (
        "one that appears meanwhile"
    )
    assert first({"slow": SLOW_BY}, room=8).windows[-1].on_engine("fast") == 32, (
        "no more than there is room for"
    )
    assert first({"slow": 0.05}).windows[0].on_engine("slow") == 4, "a group at least"
    assert first(dict.fromkeys(NAMES, 3.0)).windows == equal.windows, "only what differs counts"


def iterations(speeds: dict[str, float], number: int, slow_by: float = SLOW_BY) -> list[float]:
    """Seconds of generation of a run's iterations, on an engine of a speed of 1 and one of
    `slow_by`.
    """
    engines = (CPU_ENGINE, CPU_ENGINE.scaled(1 / slow_by))
    case = Case("unequal", engines, 40, 4, 64, Lengths(100, 400, 0.5, 0.3), 64, 0.05)
    controller = ScheduleController(rules_of(case), lambda prompt, lengths: prompt + sum(lengths))
    speeds = {
        name: speeds[short]
        for name, short in zip(case.names, NAMES, strict=True)
        if short in speeds
    }
    seconds = []
    for iteration in range(number):
        groups, outlooks = case.work(iteration)
        schedule = controller.begin_iteration(IterationOutlook(outlooks, case.names, speeds=speeds))
        outcome = simulate(case.cluster, groups, schedule)
        for timing in outcome.timings:
            controller.observe(timing)
        controller.end_iteration(IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0))
        seconds.append(outcome.generated_s)
    return seconds


def test_an_expected_speed_that_is_right_shortens_the_first_iteration_and_one_that_is_wrong_only_that() -> (
    None
):
    knowing, unknowing, wrong = (
        iterations(speeds, 5) for speeds in ({"slow": SLOW_BY}, {}, {"slow": 4.0})
    )
    assert knowing[0] < 0.8 * unknowing[0], (knowing, unknowing)
    assert wrong[0] > 1.3 * unknowing[0], "negative control: it is used"
    assert np.mean(wrong[1:]) < 1.1 * np.mean(unknowing[1:]), (
        "from then on engines are as fast as they were measured"
    )
    assert np.mean(knowing[1:]) < 1.1 * np.mean(unknowing[1:])


def timings(engine: str, speed: EngineSpeed, groups: int) -> list[GroupTiming]:
    """Makes the timings of groups of 4 that go one after another on an engine."""
    rng, at, actual = np.random.default_rng(len(engine)), 0.0, []
    for index in range(groups):
        length = int(rng.integers(50, 200))
        seconds = 10 * speed.prompt_token_s + length * (speed.step_s + 4 * speed.sequence_s)
        actual.append(GroupTiming(index, engine, at, at + seconds, 10, (length,) * 4, 0.0, True))
        at += seconds
    return actual


def test_an_engine_that_was_not_seen_yet_is_as_fast_as_expected_beside_those_that_were() -> None:
    fit = EngineFit(64)
    fit.expect({"slow": SLOW_BY})
    fit.observe(timings("fast", CPU_ENGINE, 20))
    seen, expected = fit.speed("fast"), fit.speed("slow")
    total = lambda speed: speed.step_s + 4 * speed.sequence_s  # noqa: E731
    assert total(seen) == pytest.approx(total(CPU_ENGINE), rel=0.02)
    assert total(expected) == pytest.approx(total(CPU_ENGINE) / SLOW_BY, rel=0.02)
    # the first that is seen may be one that differs
    another = EngineFit(64)
    another.expect({"slow": SLOW_BY})
    another.observe(timings("slow", CPU_ENGINE.scaled(4), 20))
    assert total(another.speed("slow")) == pytest.approx(4 * total(CPU_ENGINE), rel=0.02)
    assert total(another.speed("fast")) == pytest.approx(total(CPU_ENGINE), rel=0.02)


def test_what_is_measured_outweighs_what_was_expected() -> None:
    fit = EngineFit(64)
    fit.expect({"slow": 4.0})
    fit.observe([*timings("fast", CPU_ENGINE, 20), *timings("slow", CPU_ENGINE.scaled(4), 20)])
    ratio = fit.speed("slow").step_s / fit.speed("fast").step_s
    assert ratio == pytest.approx(4.0, rel=0.1)
