"""Choosing a schedule takes a share of an iteration whatever the cluster's size."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from helpers.virtual_cluster import NPU

from pa_npu.planning.iteration_model import flow
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import (
    EngineSpeed,
    GroupOutlook,
    GroupTiming,
    IterationOutlook,
    IterationTimes,
    Rules,
)

# Seconds of a flow for each of its events, of which a group has two: measured, 8 to 10 microseconds
# a group.
EVENT_S = 5e-6


def observe_iteration(
    controller: ScheduleController,
    outlook: IterationOutlook,
    speed: EngineSpeed,
    rng: np.random.Generator,
) -> float:
    """An iteration in one wave, without simulating it: what it took."""
    end_s, engines = 0.0, outlook.engines
    each = math.ceil(len(outlook.groups) / len(engines))
    for index, group in enumerate(outlook.groups):
        engine = index % len(engines)
        lengths = tuple(int(n) for n in np.clip(group.mean * rng.lognormal(0.0, 0.4, 8), 1, 1024))
        slower = 1.0 + engine % 2 if "unequal" in engines[0] else 1.0
        took_s = slower * max(lengths) * (speed.step_s + speed.sequence_s * 4 * each)
        controller.observe(
            GroupTiming(index, engines[engine], 0.0, took_s, group.prompt_tokens, lengths)
        )
        end_s = max(end_s, took_s)
    return end_s + 2.0


@pytest.mark.parametrize("kind", [pytest.param("equal", marks=pytest.mark.nightly), "unequal"])
@pytest.mark.parametrize(("engines", "each"), [(4, 4), (64, 16), (512, 8)])
def test_choosing_never_takes_more_than_a_few_percent_of_an_iteration(
    monkeypatch: pytest.MonkeyPatch, kind: str, engines: int, each: int
) -> None:
    """4 engines with 16 groups, 64 with 1,024 and 512 with 4,096: the choice, and what is learned
    from its error.
    """
    events = 0

    class Counted:
        heappush = staticmethod(heapq.heappush)
        heapreplace = staticmethod(heapq.heapreplace)

        @staticmethod
        def heappop(heap):
            nonlocal events
            events += 1
            return heapq.heappop(heap)

    monkeypatch.setattr(flow, "heapq", Counted)
    names = tuple(f"{kind} engine {number}" for number in range(engines))
    rules = Rules("auto", "auto", 8, 256, 1024, max(1, engines // 4), "completion", 1)
    rng = np.random.default_rng(7)
    prompts = [
        GroupOutlook(100, float(longest), 0.6 * longest)
        for longest in rng.lognormal(5.5, 0.5, engines * each)
    ]
    controller = ScheduleController(rules, lambda prompt, lengths: prompt + sum(lengths))
    outlook = IterationOutlook(prompts, names, True)
    for number in range(2):
        events = 0
        schedule = controller.begin_iteration(outlook)
        assert sorted(schedule.order) == list(range(len(prompts))), "all groups, whatever was tried"
        assert set(schedule.windows[0].sequences) >= set(names), "and all engines"
        iteration_s = observe_iteration(controller, outlook, NPU.engines[0], rng)
        prediction = controller.end_iteration(
            IterationTimes(iteration_s, 0.5, 0.6 * iteration_s, 0.0)
        )
        assert events * EVENT_S <= max(0.045 * iteration_s, 0.05), (
            f"iteration {number} of {iteration_s:.0f} s"
        )
        if number:
            assert prediction.predicted_s is not None and events >= 2 * len(prompts), (
                "and it is a choice"
            )
