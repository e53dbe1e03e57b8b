"""Engines of unequal speed: what slower ones take, the bound against all assignments, and how near schedules come to it."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from pa_npu.dispatch.schedule import Schedule, SlowEngineLimit
from pa_npu.planning.iteration_model.flow import unequal
from pa_npu.planning.iteration_model.schedules import bound_s, choose
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupOutlook,
    IterationOutlook,
    Rules,
    VirtualCluster,
    VirtualGroup,
)
from tools.bench_balance import case_of, generate_ratio, main, virtual
from tools.simulate import simulate

GROUPS, RESPONSES, STEP_S = 64, 8, 0.01


def cluster(*speeds: float) -> VirtualCluster:
    return VirtualCluster(
        {f"engine {n}": EngineSpeed(STEP_S / speed, 0.0) for n, speed in enumerate(speeds)}, 10**6
    )


def heavy_tailed(seed: int) -> list[VirtualGroup]:
    lengths = np.minimum(
        4096, 300 * np.exp(0.6 * np.random.default_rng(seed).standard_normal(GROUPS) + 0.5)
    )
    return [
        VirtualGroup(i, 0, (float(n),) * RESPONSES, 1e-3, float(n)) for i, n in enumerate(lengths)
    ]


def test_an_engine_takes_the_first_group_in_order_that_it_ends_in_time_or_the_shortest() -> None:
    limit = SlowEngineLimit((9.0, 7.0, 5.0, 3.0), {"slow": 2.0}, 12.0)
    assert limit.place("fast", [0, 1, 2, 3], 11.9) == 0, (
        "an engine that is not named takes the next one"
    )
    assert limit.place("slow", [0, 1, 2, 3], 0.0) == 2, "5 tokens of 2 s end by 12 s, 7 do not"
    assert limit.place("slow", [0, 1, 2, 3], 4.0) == 3
    assert limit.place("slow", [1, 3, 0, 2], 11.0) == 1, "nothing ends in time: the shortest"


def test_no_assignment_of_jobs_to_places_is_shorter_than_the_bound() -> None:
    """All assignments of six jobs to three places of two speeds; some bound is met."""
    rng, met = np.random.default_rng(1), 0
    for _ in range(20):
        lengths = [float(n) for n in rng.integers(1, 12, 6)]
        token_s = (1.0, 1.0, 2.5)
        ends = [
            max(
                sum(n * token_s[p] for n, p in zip(lengths, places, strict=True) if p == place)
                for place in range(3)
            )
            for places in itertools.product(range(3), repeat=6)
        ]
        bound = bound_s(lengths, {"fast": (1.0, 2), "slow": (2.5, 1)})
        assert bound <= min(ends) + 1e-9
        met += min(ends) <= 1.1 * bound
    assert met >= 5, "the bound says something"


def chosen(engines: VirtualCluster, groups: list[VirtualGroup], places: int) -> Schedule:
    """With room for so many groups per engine, in the widest window."""
    rules = Rules("auto", "auto", RESPONSES, places * RESPONSES // 2, 4096, 1, "completion", 1)
    outlook = IterationOutlook(
        [GroupOutlook(0, g.longest, g.longest) for g in groups], tuple(engines.engines)
    )
    return choose(rules, engines, outlook, groups, [groups], varies=True).schedule


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (1.0, 0.5, 0.5, 0.25)])
@pytest.mark.parametrize("waves", [2, 4, 8])
def test_slower_engines_that_take_what_they_end_in_time_end_generation_near_its_bound(
    waves: int, speeds: tuple[float, ...]
) -> None:
    """Lengths are known here, so that slower ones are taken to need no longer than is expected."""
    engines, ratios, plain = cluster(*speeds), [], []
    places = GROUPS // (len(speeds) * waves)
    for seed in range(8):
        groups = heavy_tailed(seed)
        schedule = chosen(engines, groups, places)
        windows = {
            name: schedule.windows[0].on_engine(name) // RESPONSES for name in engines.engines
        }
        bound = bound_s(
            [g.longest for g in groups],
            {name: (s.step_s, windows[name]) for name, s in engines.engines.items()},
        )
        outcome = simulate(engines, groups, schedule)
        assert sorted(timing.index for timing in outcome.timings) == list(range(GROUPS)), (
            "each group once"
        )
        ratios.append(outcome.generated_s / bound)
        same = Schedule("longest-first", schedule.order, schedule.windows)
        plain.append(simulate(engines, groups, same).generated_s / bound)
    assert np.mean(ratios) <= (1.1 if waves == 2 else 1.06), ratios
    if waves == 2:
        assert np.mean(plain) > np.mean(ratios) + 0.05, (
            "negative control: longest first alone gives slow engines long groups"
        )


def test_engines_of_one_speed_are_left_as_they_are() -> None:
    assert (
        not unequal(cluster(1.0, 1.0, 0.95))
        and not unequal(cluster(1.0))
        and unequal(cluster(1.0, 0.5))
    )


def test_the_producer_with_learned_speeds_and_lengths_is_within_a_twentieth_of_the_bound() -> None:
    """Epochs after the first, in which nothing is known; lengths are expected from one group of
    each prompt.
    """
    iterations = virtual(case_of(16, 0.5, (1.0, 0.5)), "longest-first", True, 0)
    assert generate_ratio(iterations[4:]) <= 1.05
    assert all(i.generate_s >= i.bound_s * 0.999 for i in iterations)


@pytest.mark.parametrize("speeds", ["", "1,fast", "1,0", "1,-2"])
def test_speeds_that_are_none_are_refused_in_one_line(
    speeds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_balance", "--speeds", speeds])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"{speeds!r} is no list of speeds from 0.01 to 100, as 1,0.5\n"
    )
