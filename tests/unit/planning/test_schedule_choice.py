"""The controller's choice on simulated clusters: near the optimum, better than constant windows, quick to begin, explained."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.virtual_cluster import (
    CPU,
    EQUAL,
    HEAVY,
    LONG,
    NPU,
    Case,
    Lengths,
    Ran,
    rules_of,
    run_controller,
)

from pa_npu.coordinator.admission import ResponseLengths
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.schedule import Schedule, Windows
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupOutlook,
    IterationOutlook,
    IterationTimes,
    VirtualGroup,
)
from tools.simulate import simulate

LATER = range(3, 6)


def mean_s(ran: list[Ran], numbers: range = LATER) -> float:
    return float(np.mean([ran[number].end_s for number in numbers]))


EQUAL_CASES = {
    "cpu, 16 groups": CPU,
    "cpu, 64 groups": replace(CPU, groups=64),
    "7b, engine-bound": replace(NPU, train=0.5),
    "7b, balanced": NPU,
    "7b, trainer-bound": replace(NPU, train=2.0),
    "7b, 4 waves": replace(NPU, max_num_seqs=64),
    "7b, 4 replicas": replace(NPU, replicas=4),
}


@functools.cache
def ran_equal(name: str) -> list[Ran]:
    return run_controller(EQUAL_CASES[name], 6)


@pytest.mark.parametrize("name", EQUAL_CASES)
def test_with_equal_lengths_it_is_near_the_optimum_and_never_behind_the_best_constant_window(name):
    case, ran = EQUAL_CASES[name], ran_equal(name)
    best_window, optimum = case.best_constant_s([0], ("longest-first",)), case.optimum_s([0])
    assert mean_s(ran) <= 1.025 * optimum, (
        f"{mean_s(ran):.2f} s, optimum {optimum:.2f} s: {ran[-1].schedule.name}"
    )
    assert mean_s(ran) <= 1.001 * best_window
    errors = [abs(r.prediction.error) for r in ran[1:]]
    assert np.median(errors) <= 0.02 and max(errors) <= 0.06, errors


@pytest.mark.parametrize(
    "name, gain", [("cpu, 16 groups", 0.93), ("7b, balanced", 0.91), ("7b, engine-bound", 0.95)]
)
def test_groups_that_begin_one_after_another_beat_every_constant_window(name, gain):
    case = EQUAL_CASES[name]
    assert mean_s(ran_equal(name)) <= gain * case.best_constant_s([0], ("longest-first",))


def halved(case: Case) -> Case:
    """Half the groups and half the places of an engine, or half the engines: as many waves, half
    the time to simulate them.
    """
    if len(case.engines) == 8:
        return replace(case, groups=case.groups // 2, engines=case.engines[:4], replicas=1)
    return replace(case, groups=case.groups // 2, max_num_seqs=case.max_num_seqs // 2)


HEAVY_NPU = replace(NPU, lengths=HEAVY)
HEAVY_CASES = {
    "7b, 1 wave": (HEAVY_NPU, 1.04),
    "7b, trainer-bound": (replace(HEAVY_NPU, train=2.0), 1.03),
    "7b, 4 waves": (replace(HEAVY_NPU, max_num_seqs=64), 1.0),
    "7b, 4 waves, engine-bound": (replace(HEAVY_NPU, max_num_seqs=64, train=0.5), 0.9),
    "16k": (LONG, 1.05),
    "16k, trainer-bound": (replace(LONG, train=2.0), 1.05),
}


@pytest.mark.parametrize(
    "name",
    [
        name if "waves" in name else pytest.param(name, marks=pytest.mark.nightly)
        for name in HEAVY_CASES
    ],
)
@pytest.mark.parametrize("size", ["half", pytest.param("full", marks=pytest.mark.nightly)])
def test_with_heavy_tailed_lengths_it_is_within_five_percent_of_the_optimum_that_knows_them(
    name, size
):
    """Below 1 with waves: the optimum keeps a group's places until it ends, the engine's own queue
    does not.
    """
    case, most = HEAVY_CASES[name]
    case, later = (halved(case), LATER) if size == "half" else (case, range(4, 8))
    ran = run_controller(case, 10)
    optimum, constant = case.optimum_s(later), case.best_constant_s(later, ("longest-first",))
    mean = mean_s(ran, later)
    assert mean <= most * optimum, f"{mean:.1f} s, optimum {optimum:.1f} s: {ran[-1].schedule.name}"
    assert mean <= 1.02 * constant
    errors = [abs(r.prediction.error) for r in ran[1:]]
    assert np.median(errors) <= 0.06 and max(errors) <= 0.15, errors


def climbing_first_s(case: Case) -> float:
    """A window that begins at 16 sequences and grows by factors of 4, a wave each: what one would
    do without a model.
    """
    groups, outlooks = case.work(0)
    places, start, levels = max(1, 16 // case.responses), 0, []
    while start < case.groups:
        places = min(places, case.most_places)
        levels.append(Windows({}, places * case.responses, start))
        start += max(places, 3) * len(case.engines)
        places *= 4
    order = case.constant(outlooks, 1).order
    return simulate(case.cluster, groups, Schedule("climb", order, tuple(levels))).end_s


@pytest.mark.parametrize(
    "case",
    [
        *EQUAL_CASES.values(),
        *(case for case, _ in HEAVY_CASES.values()),
        replace(HEAVY_NPU, max_num_seqs=16),
    ],
    ids=lambda case: (
        f"{case.name} {case.groups} {case.train} {case.max_num_seqs} {case.lengths.equal}"
    ),
)
def test_the_first_iteration_is_no_slower_than_climbing_from_a_small_window(case):
    assert run_controller(case, 1)[0].end_s <= 1.03 * climbing_first_s(case)


def test_trainers_that_are_the_slower_side_get_short_groups_first():
    ran = run_controller(halved(replace(LONG, train=2.0)), 6)
    assert "shortest-first" in ran[-1].schedule.name


def test_engines_of_unequal_speed_have_windows_of_their_own():
    fast = NPU.engines[0]
    mild = Lengths(400, 1024, 0.2, 0.2)
    case = replace(
        NPU, groups=96, engines=(fast, fast, fast, fast.scaled(2.0)), lengths=mild, train=0.5
    )
    ran, later = run_controller(case, 5), range(3, 5)
    windows = ran[-1].schedule.windows[0].sequences
    assert windows["engine 3"] < 0.7 * windows["engine 0"], windows
    assert mean_s(ran, later) < 0.97 * case.best_constant_s(later), (
        "no window that is the same for all is as good"
    )
    busy = halved(replace(case, lengths=EQUAL, max_num_seqs=64))
    assert mean_s(run_controller(busy, 6)) <= 1.02 * busy.best_constant_s([0]), (
        "nor are they where all must be full"
    )


def test_an_engine_that_leaves_and_one_that_comes_change_the_schedule_at_once():
    case = replace(NPU, groups=96, train=1.0)

    def three(number, cluster):
        return (
            replace(cluster, engines=dict(list(cluster.engines.items())[:3]))
            if 4 <= number < 7
            else cluster
        )

    ran = run_controller(case, 8, disturb=three)
    alone = run_controller(case, 6, disturb=lambda _, cluster: three(4, cluster))
    assert ran[4].end_s <= 1.03 * alone[-1].end_s, (
        "the first iteration with three engines is as good as the later ones"
    )
    assert ran[7].end_s <= 1.02 * ran[3].end_s, "and so is the first with four again"


def test_predictions_hold_under_noise_and_the_choice_does_not_jump():
    ran = run_controller(halved(halved(HEAVY_NPU)), 10, noise=0.1)
    errors = [abs(r.prediction.error) for r in ran[2:]]
    assert np.median(errors) <= 0.06 and max(errors) <= 0.15, errors
    names = [r.schedule.name for r in ran[3:]]
    assert sum(a != b for a, b in itertools.pairwise(names)) <= 2, names


def test_an_engine_that_becomes_slower_is_in_the_next_predictions():
    def slower(number, cluster):
        engines = (
            {name: speed.scaled(2.0) for name, speed in cluster.engines.items()}
            if number >= 4
            else cluster.engines
        )
        return replace(cluster, engines=engines)

    errors = [
        r.prediction.error
        for r in run_controller(halved(halved(HEAVY_NPU)), 12, disturb=slower)[1:]
    ]
    assert errors[3] < -0.2, "negative control: the first iteration with it was predicted too short"
    assert max(abs(error) for error in errors[-3:]) <= 0.1, errors


def test_a_fixed_window_is_kept_predicted_and_dispatched_in_the_better_order():
    case = halved(replace(LONG, train=2.0))
    ran = run_controller(case, 6, rules_of(case, window=24))
    for r in ran:
        assert [windows.on_engine("engine 0") for windows in r.schedule.windows] == [
            24
        ] and not r.schedule.turns
    assert ran[-1].prediction.predicted_s == pytest.approx(ran[-1].end_s + case.border_s, rel=0.12)
    assert ran[-1].schedule.name == "window 24, shortest-first"
    reported = run_controller(case, 4, rules_of(case, window=24, dispatch="longest-first"))
    assert reported[-1].schedule.name == "window 24, longest-first"


def test_a_told_order_is_kept_by_every_candidate():
    case = halved(replace(HEAVY_NPU, train=2.0))
    for r in run_controller(case, 3, rules_of(case, dispatch="in-order")):
        assert r.schedule.order == tuple(range(case.groups))


def test_prompt_order_is_dispatched_so_that_trainers_get_their_slots_in_turn():
    for case in (CPU, replace(CPU, lengths=Lengths(64, 256, 0.6, 0.4))):
        ran = run_controller(case, 8, rules_of(case, order="prompt"))
        assert sum(r.schedule.order == tuple(range(case.groups)) for r in ran[1:]) >= 6, [
            r.schedule.name for r in ran
        ]
    first = run_controller(CPU, 8, rules_of(CPU, order="prompt"))
    assert first[-1].end_s <= 0.95 * CPU.best_constant_s([0], ("in-order",)), (
        "turns help it as much"
    )


def test_synchronous_iterations_have_a_schedule_of_their_own():
    """They end when the last response and then all training is done, so the widest window is best
    for them.
    """
    ran = run_controller(CPU, 10, streams=lambda number: number % 2 == 1)
    assert all(r.schedule.largest_window == 128 and not r.schedule.turns for r in ran[2::2])
    assert all(r.schedule.turns for r in ran[3::2]), "and periodic ones begin one after another"
    assert max(abs(r.prediction.error) for r in ran[4:]) <= 0.03


def test_several_updates_order_each_share_by_itself():
    case = replace(HEAVY_NPU, groups=64)
    for r in run_controller(case, 3, rules_of(case, updates=2)):
        assert sorted(r.schedule.order[:32]) == list(range(32)) and not r.schedule.turns


def test_dynamic_sampling_is_predicted_with_the_replacements_it_will_need():
    """Every second group is uninformative: about twice as many are generated, and half of them
    trained.
    """
    case = replace(CPU, lengths=Lengths(64, 256, 0.3, 0.3), groups=32)
    rules = rules_of(case)
    controller = ScheduleController(rules, lambda prompt, lengths: prompt + sum(lengths))
    errors = []
    for number in range(6):
        further, outlooks = zip(*(case.work(100 * number + part) for part in range(4)), strict=True)
        groups = [group for groups in further for group in groups]
        keeps = np.random.default_rng(number).random(len(groups)) < 0.5
        groups = [
            replace(g, index=i, informative=bool(k))
            for i, (g, k) in enumerate(zip(groups, keeps, strict=True))
        ]
        schedule = controller.begin_iteration(IterationOutlook(outlooks[0], case.names))
        outcome = simulate(case.cluster, groups, schedule)
        for timing in outcome.timings:
            controller.observe(timing)
        prediction = controller.end_iteration(
            IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0)
        )
        errors.append(prediction.error)
    assert len(outcome.timings) > 55, "negative control: that many more than 32"
    assert max(abs(error) for error in errors[2:]) < 0.25, errors


def test_the_choice_explains_itself_in_one_line_per_change(caplog):
    with caplog.at_level(logging.INFO, logger="pa_npu.planning.iteration_model.controller"):
        ran = run_controller(CPU, 8)
    messages = [record.getMessage() for record in caplog.records]
    changes = sum(a.schedule.name != b.schedule.name for a, b in itertools.pairwise(ran))
    assert len(messages) == changes >= 1, messages
    for part in (
        "one after another",
        "s predicted",
        "border 0.25 s",
        "a decode step takes",
        "trainers 0.21",
    ):
        assert part in messages[0], messages[0]


def test_nothing_is_predicted_before_anything_is_known_and_no_engine_is_no_error():
    controller = ScheduleController(rules_of(CPU), lambda prompt, lengths: prompt + sum(lengths))
    with pytest.raises(ValueError, match="without begin_iteration"):
        controller.end_iteration(IterationTimes(1.0, 0.0, 1.0, 0.0))
    outlook = IterationOutlook([GroupOutlook(10, 20.0, 20.0)] * 4, ())
    assert sorted(controller.begin_iteration(outlook).order) == [0, 1, 2, 3], (
        "engines are being replaced"
    )
    prediction = controller.end_iteration(IterationTimes(1.0, 0.0, 1.0, 0.0))
    assert prediction.predicted_s is None and prediction.error is None


def test_lengths_that_were_expected_at_the_limit_in_the_beginning_do_not_shorten_later_predictions():
    """With the estimates of a run: at first every response is expected at the limit, then at the
    mean, then by its prompt.
    """
    case = replace(CPU, lengths=Lengths(64, 256, 0.6, 0.4), groups=32)
    prompts = [
        Prompt(i, np.full(case.prompt, 1, np.int32), "", "", {}) for i in range(2 * case.groups)
    ]
    estimates = ResponseLengths(256)
    controller = ScheduleController(rules_of(case), lambda prompt, lengths: prompt + sum(lengths))
    numbers, errors = np.random.default_rng(5), []
    factors = np.exp(0.6 * numbers.standard_normal(len(prompts)))
    for number in range(12):
        mine = [number % 2 * case.groups + i for i in range(case.groups)]
        drawn = [50 * factors[i] * np.exp(0.4 * numbers.standard_normal(8)) for i in mine]
        lengths = [tuple(float(n) for n in np.clip(np.round(row), 1, 256)) for row in drawn]
        outlooks = [
            GroupOutlook(case.prompt, estimates.longest(prompts[i]), estimates.mean(prompts[i]))
            for i in mine
        ]
        groups = [
            VirtualGroup(i, case.prompt, row, 3e-4 * (128 + sum(row)), 0.0)
            for i, row in enumerate(lengths)
        ]
        outcome = simulate(
            case.cluster, groups, controller.begin_iteration(IterationOutlook(outlooks, case.names))
        )
        for timing in outcome.timings:
            controller.observe(timing)
        estimates.observe(
            [(prompts[i], [int(n) for n in row]) for i, row in zip(mine, lengths, strict=True)]
        )
        errors.append(
            controller.end_iteration(IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0)).error
        )
    assert abs(np.mean(errors[2:])) <= 0.04 and np.median(np.abs(errors[2:])) <= 0.08, errors


def test_an_iteration_of_which_something_is_missing_is_learned_from_as_far_as_it_goes():
    """Groups whose engine died have no timing, and a report may have no seconds of training."""
    controller = ScheduleController(rules_of(CPU), lambda prompt, lengths: prompt + sum(lengths))
    groups, outlooks = CPU.work(0)
    outlook = IterationOutlook(outlooks, CPU.names)
    for number in range(4):
        outcome = simulate(CPU.cluster, groups, controller.begin_iteration(outlook))
        for timing in outcome.timings[: 16 - 4 * number]:
            controller.observe(timing)
        times = IterationTimes(outcome.end_s, 0.0, outcome.train_s if number != 2 else 0.0, 0.0)
        prediction = controller.end_iteration(times)
    assert prediction.error == pytest.approx(0.0, abs=0.1)


def test_a_schedule_that_was_prepared_is_taken_and_costs_nothing_at_the_border(monkeypatch):
    from pa_npu.planning.iteration_model import controller as module

    controller = ScheduleController(rules_of(CPU), lambda prompt, lengths: prompt + sum(lengths))
    groups, outlooks = CPU.work(0)
    outlook = IterationOutlook(outlooks, CPU.names)
    # nothing is known yet: the first iteration's schedule is chosen when it begins
    controller.prepare(outlook)
    predictions = []
    for number in range(6):
        if number:
            controller.prepare(outlook)
        with monkeypatch.context() as patch:
            if number > 1:
                patch.setattr(
                    module, "choose", lambda *_, **__: pytest.fail("it was chosen before")
                )
            schedule = controller.begin_iteration(outlook)
        outcome = simulate(CPU.cluster, groups, schedule)
        for timing in outcome.timings:
            controller.observe(timing)
        # of another iteration than the one that comes
        controller.prepare(IterationOutlook(outlooks[:4], CPU.names))
        predictions.append(
            controller.end_iteration(IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0))
        )
    assert abs(predictions[-1].error) <= 0.02


def test_what_steps_take_beside_many_sequences_decides_the_window_not_a_rule():
    """An engine that sequences slow down in full gains nothing from many; one that they do not slow
    down needs all.
    """
    saturated = replace(
        CPU, engines=(EngineSpeed(0.0001, 0.001),), groups=64, lengths=EQUAL, train=0.5
    )
    free = replace(saturated, engines=(EngineSpeed(0.02, 0.0),))
    few = run_controller(saturated, 5)[-1]
    many = run_controller(free, 5)[-1]
    assert few.end_s <= 1.03 * saturated.optimum_s([0]) and many.end_s <= 1.03 * free.optimum_s([0])
    assert math.isfinite(few.end_s)


def test_groups_that_moved_between_engines_are_training_that_was_done_and_no_measure_of_an_engine():
    """Trainers report the seconds of all groups, moved or not."""

    def learned(moved: range) -> tuple[EngineSpeed, float]:
        controller = ScheduleController(
            rules_of(CPU), lambda prompt, lengths: prompt + sum(lengths)
        )
        groups, outlooks = CPU.work(0)
        outcome = simulate(
            CPU.cluster, groups, controller.begin_iteration(IterationOutlook(outlooks, CPU.names))
        )
        for timing in outcome.timings:
            # of two engines' seconds, the second of which began anew
            late = replace(
                timing, start_s=timing.start_s + 0.9 * (timing.end_s - timing.start_s), moved=True
            )
            controller.observe(late if timing.index in moved else timing)
        controller.end_iteration(IterationTimes(outcome.end_s, 0.0, outcome.train_s, 0.0))
        speeds = controller.speeds()
        assert speeds is not None
        return EngineSpeed(speeds[0].step_s, speeds[0].sequence_s), speeds[1]

    engine, seconds_per_work = learned(range(0))
    beside, beside_per_work = learned(range(4, 12))
    assert beside_per_work == pytest.approx(seconds_per_work)
    full, half = (speed.step_s + 64 * speed.sequence_s for speed in (engine, beside))
    assert half > 0.5 * full, "a moved group's last engine had a tenth of its tokens"


def test_what_the_flow_leaves_out_of_an_iteration_is_learned():
    """Roles that follow the work, say, which end it earlier than in turns."""
    case = halved(HEAVY_NPU)
    controller = ScheduleController(rules_of(case), lambda prompt, lengths: prompt + sum(lengths))
    errors = []
    for number in range(10):
        groups, outlooks = case.work(number)
        schedule = controller.begin_iteration(IterationOutlook(outlooks, case.names, False))
        outcome = simulate(case.cluster, groups, schedule, streams=False)
        for timing in outcome.timings:
            controller.observe(timing)
        times = IterationTimes(0.7 * outcome.end_s, 0.0, outcome.train_s, 0.0)
        errors.append(controller.end_iteration(times).error)
    assert errors[1] > 0.1, "negative control"
    assert np.median(np.abs(errors[5:])) <= 0.06, errors
