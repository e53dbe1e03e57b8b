"""Choosing a schedule takes a share of an iteration whatever the cluster's size, and a part of a cluster chooses well for all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.virtual_cluster import HEAVY, NPU, Case, Lengths, rules_of, run_controller

from pa_npu.planning.iteration_model import controller as controller_module
from pa_npu.planning.iteration_model import matched as matched_module
from pa_npu.planning.iteration_model.cluster import Cluster, EngineSpeed, GroupTiming, VirtualGroup
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import GroupOutlook, IterationOutlook, IterationTimes, Rules
from pa_npu.planning.iteration_model.part import cost, halves, part_of
from pa_npu.planning.iteration_model.simulate import simulate

# What a sequence costs, in seconds, alone on an engine; with E engines (1 + E / 87) times that.
SEQUENCE_S = 1 / 200_000


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The cost of every simulation, in sequences: what time goes into, on any machine."""
    costs: list[float] = []

    def counted(cluster, groups, schedule, **keywords):
        costs.append(cost(len(groups), len(groups[0].lengths), len(cluster.engines)))
        return simulate(cluster, groups, schedule, **keywords)

    for module in (controller_module, matched_module):
        monkeypatch.setattr(module, "simulate", counted)
    yield costs


def observe_iteration(
    controller: ScheduleController, outlook: IterationOutlook, speed: EngineSpeed, rng: np.random.Generator
) -> float:
    """An iteration in one wave, without simulating it: what it took."""
    end_s, engines = 0.0, outlook.engines
    each = math.ceil(len(outlook.groups) / len(engines))
    for index, group in enumerate(outlook.groups):
        engine = index % len(engines)
        lengths = tuple(int(n) for n in np.clip(group.mean * rng.lognormal(0.0, 0.4, 8), 1, 1024))
        slower = 1.0 + engine % 2 if "unequal" in engines[0] else 1.0
        took_s = slower * max(lengths) * (speed.step_s + speed.sequence_s * 4 * each)
        controller.observe(GroupTiming(index, engines[engine], 0.0, took_s, group.prompt_tokens, lengths))
        end_s = max(end_s, took_s)
    return end_s + 2.0


@pytest.mark.parametrize("kind", [pytest.param("equal", marks=pytest.mark.nightly), "unequal"])
@pytest.mark.parametrize(("engines", "each"), [(4, 4), (64, 16), (512, 8)])
def test_choosing_never_takes_more_than_a_few_percent_of_an_iteration(
    simulated: list[float], kind: str, engines: int, each: int
) -> None:
    """4 engines with 16 groups, 64 with 1,024 and 512 with 4,096: the choice, and what is learned from its error."""
    names = tuple(f"{kind} engine {number}" for number in range(engines))
    rules = Rules("auto", "auto", 8, 256, 1024, max(1, engines // 4), "completion", 1)
    rng = np.random.default_rng(7)
    prompts = [GroupOutlook(100, float(longest), 0.6 * longest) for longest in rng.lognormal(5.5, 0.5, engines * each)]
    controller = ScheduleController(rules, lambda prompt, lengths: prompt + sum(lengths))
    outlook = IterationOutlook(prompts, names, True)
    for number in range(3):
        simulated.clear()
        schedule = controller.begin_iteration(outlook)
        assert sorted(schedule.order) == list(range(len(prompts))), "all groups, whatever was tried"
        assert set(schedule.windows[0].sequences) >= set(names), "and all engines"
        iteration_s = observe_iteration(controller, outlook, NPU.engines[0], rng)
        prediction = controller.end_iteration(IterationTimes(iteration_s, 0.5, 0.6 * iteration_s, 0.0))
        assert sum(simulated) * SEQUENCE_S <= max(0.045 * iteration_s, 0.05), (
            f"iteration {number} of {iteration_s:.0f} s"
        )
        if number:
            assert prediction.predicted_s is not None and len(simulated) >= 10, "and it is a choice"


def test_an_iteration_too_short_for_anything_keeps_the_schedule(simulated: list[float]) -> None:
    names, prompts = ("a",), [GroupOutlook(4, 4.0, 4.0)] * 4096
    controller = ScheduleController(Rules("auto", "auto", 8, 256, 8, 1, "completion", 1), lambda *_: 1.0)
    for _ in range(2):
        outlook = IterationOutlook(prompts, names)
        schedule = controller.begin_iteration(outlook)
        simulated.clear()
        for index in range(len(prompts)):
            controller.observe(GroupTiming(index, "a", 0.0, 0.1, 4, (4, 2) * 4))
        prediction = controller.end_iteration(IterationTimes(0.5, 0.0, 0.1, 0.0))
        assert not simulated and prediction.predicted_s is None and len(schedule.order) == 4096


WIDE = Case("wide", (NPU.engines[0],) * 16, 256, 8, 300, HEAVY, 256, 1.0, replicas=4, border_s=1.0)


@pytest.mark.parametrize(
    "case",
    [
        WIDE,
        pytest.param(replace(WIDE, train=2.0), marks=pytest.mark.nightly),
        pytest.param(replace(WIDE, max_num_seqs=64, train=0.5), marks=pytest.mark.nightly),
        pytest.param(replace(WIDE, lengths=Lengths(512, 512)), marks=pytest.mark.nightly),
        replace(WIDE, engines=(NPU.engines[0],) * 12 + (NPU.engines[0].scaled(2.0),) * 4, train=0.5),
    ],
    ids=["balanced", "trainer-bound", "waves", "equal lengths", "unequal engines"],
)
def test_what_a_part_chooses_is_nearly_as_good_as_what_the_whole_would(
    case: Case, simulated: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine so slow that 3% of an iteration are too little for 24 simulations of the whole."""
    monkeypatch.setattr(controller_module, "_DRAWS", 2)
    ran = run_controller(case, 4)
    of_whole = np.median(simulated)
    simulated.clear()
    monkeypatch.setattr(controller_module, "_SEQUENCES_PER_S", 20 * of_whole / (0.03 * ran[-1].end_s))
    by_part = run_controller(case, 4)
    assert np.median(simulated) < 0.5 * of_whole, "negative control: a part was simulated"
    ends, part_ends = (np.mean([r.end_s for r in some[2:]]) for some in (ran, by_part))
    assert part_ends <= 1.05 * ends, (
        f"{by_part[-1].schedule.name}: {part_ends:.1f} s; {ran[-1].schedule.name}: {ends:.1f} s"
    )
    errors = [abs(r.prediction.error) for r in by_part[1:]]
    assert np.median(errors) <= 0.1 and max(errors) <= 0.25, errors


def test_a_part_has_engines_replicas_and_groups_in_proportion_and_all_kinds_of_them() -> None:
    case = replace(WIDE, engines=(NPU.engines[0],) * 12 + (NPU.engines[0].scaled(2.0),) * 4)
    _, outlooks = case.work(0)
    outlook = IterationOutlook(outlooks, case.names)
    cluster = Cluster(dict(zip(case.names, case.engines, strict=True)), 256, 4)
    rules = rules_of(case)
    part = part_of(outlook, cluster, rules, 4)
    small = part.cluster(cluster)
    assert (len(small.engines), small.replicas, len(part.indices)) == (4, 1, 64) and part.share == 16
    assert (part.train_scale, part.engine_scale) == (1.0, 1.0)
    assert sum(speed.step_s > 0.03 for speed in small.engines.values()) == 1, "one in four is slow, as in the whole"
    expected = [group.longest for group in part.outlook.groups]
    assert np.mean(expected) == pytest.approx(np.mean([group.longest for group in outlooks]), rel=0.03)
    assert halves(outlook, rules) == 2, "4 engines are the least"
    assert halves(replace(outlook, engines=case.names[:7]), rules) == 0


def test_groups_per_engine_and_replica_are_kept_where_numbers_do_not_divide() -> None:
    speed = EngineSpeed(0.02, 0.0)
    outlook = IterationOutlook([GroupOutlook(1, 10.0, 10.0)] * 210, tuple(f"e{number}" for number in range(10)))
    cluster = Cluster({name: speed for name in outlook.engines}, 64, 3)
    part = part_of(outlook, cluster, Rules("auto", "auto", 8, 64, 10, 3, "completion", 1), 2)
    small = part.cluster(cluster)
    groups = [VirtualGroup(index, 1, (10.0,), 2.0, 10.0) for index in range(210)]
    some = part.of(groups)
    assert some is not None and [group.index for group in some] == list(range(len(part.indices)))
    assert sum(group.train_s for group in some) / small.replicas == pytest.approx(210 * 2.0 / 3)
    per_engine = len(some) / len(small.engines) * next(iter(small.engines.values())).step_s
    assert per_engine == pytest.approx(21 * 0.02)
