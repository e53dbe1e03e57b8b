"""An iteration in virtual time: against cases computed by hand, a brute force step by step, and the optimum with known lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.virtual_cluster import CPU, HEAVY, NPU, Case, Lengths

from pa_npu.dispatch.schedule import DispatchTurn, Schedule, Windows, same_windows
from pa_npu.planning.iteration_model.fit import EngineFit
from pa_npu.planning.iteration_model.flow import backwards_turns, predict_flow
from pa_npu.planning.iteration_model.schedules import predict_schedule
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupTiming,
    VirtualCluster,
    VirtualGroup,
)
from tools.optimum import optimum_s
from tools.simulate import Outcome, simulate


def groups_of(
    lengths: Sequence[Sequence[float]], train_s: float = 0.0, prompt: int = 0
) -> list[VirtualGroup]:
    return [VirtualGroup(i, prompt, tuple(row), train_s, sum(row)) for i, row in enumerate(lengths)]


def in_order(
    count: int, window: int, engines: Sequence[str] = ("a",), turns: Sequence[DispatchTurn] = ()
) -> Schedule:
    return Schedule("test", tuple(range(count)), (same_windows(engines, window),), tuple(turns))


def one_engine(speed: EngineSpeed, **values: object) -> VirtualCluster:
    return VirtualCluster({"a": speed}, **{"max_num_seqs": 10**6, **values})


# -------------------------------------------------------------------------------------------------------
# by hand


def test_one_group_takes_its_prompt_and_as_many_steps_as_its_longest_response():
    # 100 prompt tokens; 10 steps of 3 sequences, 10 of 2, 20 of 1
    outcome = simulate(
        one_engine(EngineSpeed(1.0, 0.1, 0.01)), groups_of([[10, 20, 40]], 5.0, 100), in_order(1, 8)
    )
    assert outcome.generated_s == pytest.approx(1.0 + 10 * 1.3 + 10 * 1.2 + 20 * 1.1)
    assert outcome.end_s == pytest.approx(
        outcome.generated_s + 5.0
    ) and outcome.train_s == pytest.approx(5.0)


def test_equal_groups_in_one_wave_overlap_nothing_and_one_by_one_all_but_the_ends():
    speed = EngineSpeed(1.0, 0.0)
    groups = groups_of([[10, 10]] * 4, train_s=10.0)
    assert simulate(one_engine(speed), groups, in_order(4, 8)).end_s == pytest.approx(10 + 40)
    assert simulate(one_engine(speed), groups, in_order(4, 2)).end_s == pytest.approx(40 + 10)
    turns = [DispatchTurn(0, 10.0 * i) for i in range(4)]
    staggered = simulate(one_engine(replace(speed)), groups, in_order(4, 8, turns=turns))
    assert staggered.end_s == pytest.approx(50), (
        "all four may be in flight, but each begins when its turn comes"
    )


def test_delivery_and_optimizer_steps_add_to_the_end():
    cluster = one_engine(EngineSpeed(1.0, 0.0), step_s=3.0, delivery_s=0.5)
    assert simulate(cluster, groups_of([[10]], 2.0), in_order(1, 8)).end_s == pytest.approx(
        10 + 0.5 + 2 + 3
    )


def test_replicas_wait_for_each_other_at_each_optimizer_step():
    cluster = one_engine(EngineSpeed(1.0, 0.0), replicas=2, updates=2, step_s=1.0, order="prompt")
    groups = [
        replace(group, train_s=t)
        for group, t in zip(groups_of([[1]] * 4), (2.0, 6.0, 3.0, 4.0), strict=True)
    ]
    # all there after 1 s: replicas 0 and 1 train 2 and 6, step, then 3 and 4, step
    assert simulate(cluster, groups, in_order(4, 8)).end_s == pytest.approx(1 + 6 + 1 + 4 + 1)


def test_prompt_order_waits_for_the_first_index_and_completion_order_takes_what_comes():
    groups = groups_of([[100], [1], [2]], train_s=10.0)
    cluster = one_engine(EngineSpeed(1.0, 0.0))
    assert simulate(
        replace(cluster, order="prompt"), groups, in_order(3, 8)
    ).end_s == pytest.approx(100 + 30)
    assert simulate(cluster, groups, in_order(3, 8)).end_s == pytest.approx(100 + 10), (
        "others are trained meanwhile"
    )


def test_held_groups_are_trained_after_the_last_response():
    groups = groups_of([[10], [20]], train_s=5.0)
    outcome = simulate(one_engine(EngineSpeed(1.0, 0.0)), groups, in_order(2, 8), streams=False)
    assert outcome.end_s == pytest.approx(20 + 10)


def test_uninformative_groups_are_replaced_and_cost_trainers_nothing():
    groups = groups_of([[10], [10], [10], [10]], train_s=1.0)
    groups[0] = replace(groups[0], informative=False)
    groups[2] = replace(groups[2], informative=False)
    # 0 and 1 together; 2 in place of 0, 3 in place of 2
    outcome = simulate(one_engine(EngineSpeed(1.0, 0.0)), groups, in_order(2, 8))
    assert outcome.generated_s == pytest.approx(30) and outcome.end_s == pytest.approx(31)
    assert len(outcome.timings) == 4


def test_what_has_no_place_waits_in_the_engine():
    cluster = one_engine(EngineSpeed(1.0, 0.0), max_num_seqs=2)
    assert simulate(
        cluster, groups_of([[10, 10], [5, 5]]), in_order(2, 8)
    ).generated_s == pytest.approx(15)
    assert simulate(
        cluster, groups_of([[10, 4], [5, 5]]), in_order(2, 8)
    ).generated_s == pytest.approx(14)


# ----------------------------------------------------------------------------------------------
# against brute force


def brute_force(
    case_groups: list[VirtualGroup], speeds: dict[str, EngineSpeed], window: int, most: int
) -> Outcome:
    """Decode step by decode step on every engine, one trainer, everything looked at again after
    every step of any engine.
    """
    state: dict[str, Any] = {name: {"now": 0.0, "jobs": [], "prompts": 0.0} for name in speeds}
    waiting, done = list(case_groups), []

    def admit(now: float) -> None:
        while waiting:
            room = []
            for name, engine in state.items():
                sequences = sum(job["sequences"] for job in engine["jobs"])
                if not sequences or sequences + len(waiting[0].lengths) <= window:
                    room.append((sum(job["group"].expected_tokens for job in engine["jobs"]), name))
            if not room:
                return
            name = min(room, key=lambda item: item[0])[1]
            group = waiting.pop(0)
            engine = state[name]
            engine["now"] = max(engine["now"], now) if not engine["jobs"] else engine["now"]
            engine["prompts"] += speeds[name].prompt_token_s * group.prompt_tokens
            left = [int(n) for n in group.lengths]
            engine["jobs"].append(
                {"group": group, "left": left, "sequences": len(left), "live": 0, "start": now}
            )

    admit(0.0)
    while any(engine["jobs"] for engine in state.values()):
        # the engine whose next step ends first
        def step_end(name: str) -> float:
            engine = state[name]
            living = min(most, sum(sum(n > 0 for n in job["left"]) for job in engine["jobs"]))
            if not living:
                return math.inf
            return (
                engine["now"]
                + engine["prompts"]
                + speeds[name].step_s
                + speeds[name].sequence_s * living
            )

        name = min(state, key=step_end)
        now, engine = step_end(name), state[name]
        engine["now"], engine["prompts"], places = now, 0.0, most
        for job in engine["jobs"]:
            for i, n in enumerate(job["left"]):
                if n > 0 and places:
                    job["left"][i] -= 1
                    places -= 1
        for job in list(engine["jobs"]):
            if not any(job["left"]):
                engine["jobs"].remove(job)
                done.append((now, job["group"]))
        admit(now)
    busy = 0.0
    for at, group in sorted(done, key=lambda item: item[0]):
        busy = max(busy, at) + group.train_s
    return Outcome(busy, max(at for at, _ in done), 0.0, ())


@pytest.mark.parametrize("seed", range(12))
def test_the_model_is_the_brute_force_but_for_rounding_to_steps(seed):
    numbers = random.Random(seed)
    speeds = {
        name: EngineSpeed(
            numbers.uniform(0.5, 2.0), numbers.uniform(0.0, 0.3), numbers.uniform(0.0, 0.02)
        )
        for name in "ab"[: numbers.randint(1, 2)]
    }
    many, size = numbers.randint(3, 9), numbers.randint(1, 4)
    groups = [
        VirtualGroup(i, 20, lengths, numbers.uniform(0.0, 40.0), sum(lengths))
        for i in range(many)
        for lengths in [tuple(float(numbers.randint(60, 200)) for _ in range(size))]
    ]
    window, most = size * numbers.randint(1, 4), 10**6
    cluster = VirtualCluster(speeds, most)
    model = simulate(cluster, groups, in_order(many, window, tuple(speeds)))
    exact = brute_force(groups, speeds, window, most)
    # a group that comes in the middle of an engine's step waits for its end in the brute force
    waves = math.ceil(many * size / window) + 1
    step = max(speed.step_s + speed.sequence_s * window for speed in speeds.values())
    assert exact.generated_s == pytest.approx(model.generated_s, abs=waves * step, rel=0.0)
    assert exact.end_s == pytest.approx(model.end_s, abs=(waves + 1) * step, rel=0.0)
    if len(speeds) == 1:
        assert exact.generated_s == pytest.approx(model.generated_s, rel=1e-9), (
            "one engine: every event is at a step"
        )


def test_the_model_has_the_figures_of_an_independent_simulator():
    """Iterations of 16 groups on a core and of 128 on four devices, computed by another program
    from the same tables.
    """
    groups = [VirtualGroup(i, 128, (64.0,) * 8, 0.21, 640) for i in range(16)]
    for window, seconds in ((128, 7.75), (64, 6.26), (32, 5.81)):
        assert simulate(
            CPU.cluster, groups, in_order(16, window, CPU.names)
        ).end_s == pytest.approx(seconds, abs=0.01)
    assert NPU.shortest_generation_s == pytest.approx(15.55, abs=0.01)


# -------------------------------------------------------------------------------------------------
# running backwards


def forwards(
    cluster: VirtualCluster, groups: list[VirtualGroup], places: int, slack: float = 1.0
) -> float:
    order, turns = backwards_turns(cluster, groups, places * len(cluster.engines), slack)
    size = len(groups[0].lengths)
    windows = (same_windows(tuple(cluster.engines), places * size),)
    return simulate(cluster, groups, Schedule("turns", order, windows, turns)).end_s


def test_backwards_is_optimal_for_equal_lengths_on_one_engine():
    """Against all plans of a small case: every way to space out admissions on a grid of times."""
    speed = EngineSpeed(1.0, 0.5)
    groups = groups_of([[20]] * 4, train_s=12.0)
    best = optimum_s(one_engine(speed), groups, same_windows(["a"], 4))
    grid = [5.0 * i for i in range(16)]
    actual = min(
        simulate(
            one_engine(speed),
            groups,
            in_order(4, 4, turns=[DispatchTurn(0, t) for t in (0.0, x, y, z)]),
        ).end_s
        for x in grid
        for y in grid
        for z in grid
        if x <= y <= z
    )
    assert best <= actual + 1e-9, f"running backwards {best}, the best of the grid {actual}"
    assert best >= 0.93 * actual, "and it is no promise that nothing keeps"


@pytest.mark.parametrize("train", [0.3, 0.77, 1.0, 2.0])
@pytest.mark.parametrize("groups", [16, 64])
def test_turns_end_within_four_percent_of_the_optimum_where_lengths_are_equal(groups, train):
    case = replace(CPU, groups=groups, train=train)
    known, _ = case.work(0)
    best = optimum_s(case.cluster, known, same_windows(case.names, case.max_num_seqs))
    got = min(forwards(case.cluster, known, case.most_places, slack) for slack in (1.0, 0.95, 0.85))
    assert best - 1e-9 <= got <= 1.04 * best
    if groups == 16 and train < 2:
        constant = case.best_constant_s([0], ("longest-first",))
        assert got < 0.98 * constant, "negative control: no constant window comes as near"


def test_no_schedule_beats_the_optimum_on_several_engines_by_more_than_how_they_are_chosen():
    case = replace(NPU, groups=64, train=1.0)
    known, _ = case.work(0)
    best = optimum_s(case.cluster, known, same_windows(case.names, case.max_num_seqs))
    assert case.best_constant_s([0], ("longest-first",)) > best
    assert forwards(case.cluster, known, case.most_places) > 0.97 * best


def test_turns_of_prompt_order_go_out_in_prompt_order():
    known, _ = CPU.work(0)
    cluster = replace(CPU.cluster, order="prompt")
    order, turns = backwards_turns(cluster, known, 16, 1.0)
    assert order == tuple(range(16)) and turns[0] == DispatchTurn(0, pytest.approx(0.0, abs=1e-9))
    assert (
        simulate(cluster, known, Schedule("t", order, (same_windows(CPU.names, 128),), turns)).end_s
        < 5.3
    )


# ------------------------------------------------------------------------------------------------------------
# the flow

FLOWS = {
    "one engine": replace(CPU, lengths=Lengths(64, 256, 0.6, 0.4), groups=64),
    "an engine with a queue of its own": replace(
        CPU, lengths=Lengths(64, 256, 0.6, 0.4), groups=64, max_num_seqs=64
    ),
    "four engines": replace(NPU, lengths=HEAVY),
    "four engines, four waves": replace(NPU, lengths=HEAVY, max_num_seqs=64),
    "several replicas": replace(NPU, lengths=HEAVY, replicas=4),
    "equal lengths": replace(NPU, max_num_seqs=64),
}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("share", [2.0, 0.5])
def test_the_flow_of_an_iteration_ends_with_the_iteration_that_is_simulated_engine_by_engine(
    name, share
):
    """Both in turn, with lengths that are known: within 2% in the mean, and each within 4%."""
    case = FLOWS[name]
    places, ratios = max(1, math.ceil(share * case.most_places)), []
    for number in range(4):
        groups, outlooks = case.work(number)
        schedule = case.constant(outlooks, places)
        for streams in (True, False):
            exact = simulate(case.cluster, groups, schedule, streams=streams)
            actual = predict_schedule(case.cluster, groups, schedule, streams=streams)
            ratios += [actual.end_s / exact.end_s, actual.generated_s / exact.generated_s]
    assert (
        np.mean(ratios) == pytest.approx(1.0, abs=0.02)
        and max(abs(r - 1.0) for r in ratios) <= 0.05
    ), ratios


def test_the_flow_of_turns_ends_as_they_do():
    for case in (CPU, NPU):
        groups, _ = case.work(0)
        order, turns = backwards_turns(
            case.cluster, groups, case.most_places * len(case.engines), 0.95
        )
        schedule = Schedule(
            "t", order, (same_windows(case.names, case.most_places * case.responses),), turns
        )
        exact = simulate(case.cluster, groups, schedule).end_s
        assert predict_schedule(
            case.cluster, groups, schedule, streams=True
        ).end_s == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_the_flow_counts_replicas_steps_deliveries_and_groups_that_are_replaced(order):
    """One by one on one engine, 10 s each; every third is uninformative."""
    cluster = one_engine(
        EngineSpeed(1.0, 0.0), replicas=2, updates=2, step_s=3.0, delivery_s=0.5, order=order
    )
    groups = [
        replace(group, informative=group.index % 3 != 2)
        for group in groups_of([[10]] * 6, train_s=25.0)
    ]
    actual = predict_flow(cluster, groups, 1)
    assert (actual.starts_s, actual.ends_s) == ((0, 10, 20, 30, 40, 50), (10, 20, 30, 40, 50, 60))
    # groups 0 and 1, ready at 10.5 and 20.5, a step at 45.5; groups 3 and 4, ready at 40.5 and 50.5
    assert (
        actual.end_s == pytest.approx(50.5 + 25.0 + 3.0)
        and actual.busy_s == 60.0
        and actual.dispatched_s == 50.0
    )


# ----------------------------------------------------------------------------------------------------------
# the fit


def timings_of(case: Case, places: int, number: int = 0, noise: float = 0.0) -> list[GroupTiming]:
    groups, outlooks = case.work(number)
    outcome = simulate(case.cluster, groups, case.constant(outlooks, places))
    rng = np.random.default_rng(number)
    return [
        replace(
            t,
            end_s=t.start_s + (t.end_s - t.start_s) * float(np.exp(noise * rng.standard_normal())),
        )
        for t in outcome.timings
    ]


@pytest.mark.parametrize("case", [replace(NPU, lengths=HEAVY), CPU], ids=["7b", "cpu"])
def test_speeds_are_found_again_from_two_levels_of_sequences_in_flight(case):
    fit = EngineFit(case.max_num_seqs)
    for number, places in enumerate((case.most_places, max(1, case.most_places // 3))):
        fit.observe(timings_of(case, places, number))
    truth, actual = case.engines[0], fit.speed(case.names[0])
    for sequences in (8, 64, 128):
        wanted = truth.step_s + truth.sequence_s * sequences
        assert actual.step_s + actual.sequence_s * sequences == pytest.approx(wanted, rel=0.06), (
            sequences
        )


def test_speeds_are_found_under_noise_and_one_stalled_group_does_not_move_them():
    case = replace(NPU, lengths=HEAVY)
    quiet, stalled = EngineFit(256), EngineFit(256)
    for number in range(3):
        timings = timings_of(case, 32 if number % 2 else 12, number, noise=0.1)
        quiet.observe(timings)
        worst = [replace(timings[0], end_s=timings[0].end_s + 1000.0), *timings[1:]]
        stalled.observe(worst)
    truth = 0.018 + 0.000045 * 128
    for fit in (quiet, stalled):
        actual = fit.speed("engine 0")
        assert actual.step_s + 128 * actual.sequence_s == pytest.approx(truth, rel=0.06)


def test_with_one_level_alone_fewer_sequences_look_no_faster():
    fit = EngineFit(128)
    timings = [GroupTiming(i, "a", 0.0, 10.0, 100, (100,) * 8) for i in range(16)]
    fit.observe(timings)
    actual = fit.speed("a")
    assert actual.step_s + 128 * actual.sequence_s == pytest.approx(0.1, rel=0.05)
    assert actual.step_s > 0.09, "no evidence that a smaller window is faster"


def test_a_decode_step_is_never_learned_to_cost_nothing_and_small_windows_are_not_chosen_for_it():
    """Two engines that slowed each other down looked like this, and 5.3 s an iteration came of it
    instead of 2.4 s.
    """
    free = replace(CPU, engines=(EngineSpeed(0.0, 0.0004),) * 2, groups=24, max_num_seqs=256)
    fit = EngineFit(free.max_num_seqs)
    for number, places in enumerate((3, 12)):
        fit.observe(timings_of(free, places, number))
    actual = fit.speed(free.names[0])
    assert actual.step_s >= 4.0 * actual.sequence_s > 0.0
    full, one = (actual.step_s + actual.sequence_s * places * free.responses for places in (12, 1))
    assert 12 * one > 1.2 * full, "12 groups one by one take longer than together"


def test_an_engine_that_is_slower_has_a_speed_of_its_own_and_a_new_one_that_of_all():
    slow = NPU.engines[0].scaled(2.0)
    case = replace(NPU, engines=(*NPU.engines[:3], slow), lengths=HEAVY)
    fit = EngineFit(256)
    for number in range(3):
        fit.observe(timings_of(case, 16, number))
    fast, slower = fit.speed("engine 0"), fit.speed("engine 3")
    assert slower.step_s / fast.step_s == pytest.approx(2.0, rel=0.1)
    new = fit.speed("engine 9")
    assert fast.step_s * 0.9 < new.step_s < slower.step_s


def test_an_engine_that_becomes_faster_is_followed():
    case = replace(NPU, lengths=HEAVY)
    fit = EngineFit(256)
    for number in range(4):
        fit.observe(timings_of(case, 16, number))
    faster = replace(case, engines=tuple(speed.scaled(0.5) for speed in case.engines))
    for number in range(4):
        fit.observe(timings_of(faster, 16, number))
    actual = fit.speed("engine 0")
    assert actual.step_s + 128 * actual.sequence_s == pytest.approx(
        0.5 * (0.018 + 128 * 0.000045), rel=0.2
    )


def test_unequal_windows_are_for_the_engines_they_name():
    """One engine is three times as fast: with a window three times as large both end together, with
    equal ones it waits.
    """
    speeds = {"fast": EngineSpeed(1.0, 0.5), "slow": EngineSpeed(3.0, 1.5)}
    groups = groups_of([[10]] * 8)
    cluster = VirtualCluster(speeds, 100)
    by_speed = Schedule("s", tuple(range(8)), (Windows({"fast": 6, "slow": 2}, 4),))
    # the fast one decodes 6 at 1 + 6 / 2 seconds a step, the slow one 2 at 3 + 2 * 1.5
    assert simulate(cluster, groups, by_speed).generated_s == pytest.approx(60)
    assert simulate(cluster, groups, in_order(8, 4, ("fast", "slow"))).generated_s == pytest.approx(
        90
    )
