"""Chooses each iteration's schedule at its border, with what the run's own iterations have taught, and says how wrong it was.

    prepare           does the same before the border, while trainers still train, with what is known by then
    begin_iteration   chooses by the predicted flow of the coming iteration (schedules.choose)
    observe           a group was generated
    end_iteration     speeds, shapes of groups and the border are learned; what was predicted is compared with what was measured

A prediction is of the time until the last optimizer step, not until the last response. How far predictions were off corrects the
next one. With rollout.window=N windows are given; the order, where schedule.dispatch leaves it open, and the prediction remain.
Engines may have a window of their own, and an expected speed, which counts until their groups have shown it
(rollout.engine_settings).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pa_npu.dispatch.roles import Speeds
from pa_npu.dispatch.schedule import Schedule
from pa_npu.planning.iteration_model.cluster import GroupTiming
from pa_npu.planning.iteration_model.learned import Learned
from pa_npu.planning.iteration_model.messages import IterationOutlook, IterationTimes, Prediction, Rules
from pa_npu.planning.iteration_model.schedules import Choice, choose, first_schedule, flow_of

logger = logging.getLogger(__name__)

# Draws of the lengths to come, and groups of all of them together: the flow of a thousand takes a hundredth of a second.
_DRAWS, _GROUPS_DRAWN = 12, 8192


@dataclass
class _Running:
    """The iteration that goes on."""

    outlook: IterationOutlook
    schedule: Schedule
    predicted_s: float | None = None
    timings: list[GroupTiming] = field(default_factory=list)


class ScheduleController:
    """One per run. work: what training a group costs, in any unit, from its prompt's and its responses' lengths (GroupWork)."""

    def __init__(self, rules: Rules, work: Callable[[int, Sequence[int]], float]) -> None:
        self._rules = rules
        self._learned = Learned(rules, work)
        self._last: dict[bool, Choice] = {}  # by streams
        self._running: dict[int, _Running] = {}  # by iteration
        self._prepared: _Running | None = None
        self._last_error: float | None = None

    def prepare(self, outlook: IterationOutlook) -> None:
        """Choose for the coming iteration before the one that runs is ended; with nothing else called meanwhile."""
        self._prepared = self._choose(outlook) if self._learned.enough and outlook.engines else None

    def begin_iteration(self, outlook: IterationOutlook, iteration: int = 0) -> Schedule:
        """The schedule of the coming iteration. The one before may go on; what was begun earlier and not ended is forgotten."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.outlook != outlook:
            known = self._learned.enough and outlook.engines
            prepared = self._choose(outlook) if known else _Running(outlook, first_schedule(self._rules, outlook))
        self._running = {number: running for number, running in self._running.items() if number == iteration - 1}
        self._running[iteration] = prepared
        return prepared.schedule

    def observe(self, timing: GroupTiming, iteration: int = 0) -> None:
        """A group of this iteration was generated and delivered."""
        if (running := self._running.get(iteration)) is not None:
            running.timings.append(timing)

    def end_iteration(self, times: IterationTimes, iteration: int = 0) -> Prediction:
        """This iteration has ended so. Raises ValueError when it was not begun."""
        running = self._running.pop(iteration, None)
        if running is None:
            raise ValueError(f"end_iteration of iteration {iteration} without begin_iteration")
        learned, outlook = self._learned, running.outlook
        self._last_error = None
        if running.predicted_s is not None and times.iteration_s > 0:
            self._last_error = running.predicted_s / times.iteration_s - 1.0
        learned.observe(outlook, running.timings, times)
        groups = learned.seen(outlook, running.timings) if running.predicted_s is not None else None
        if groups is not None:
            # with speeds that were learned from it too, so that this is the model's own error, and none of an expectation
            flow_s = flow_of(learned.cluster(outlook), groups, running.schedule, streams=outlook.streams).end_s
            learned.note_error(outlook.streams, flow_s, times.iteration_s - times.border_s)
        return Prediction(running.schedule.name, running.predicted_s, self._last_error, learned.numbers(outlook))

    def speeds(self) -> tuple[Speeds, float] | None:
        """An engine's, and a replica's seconds for a unit of work; None before they were learned."""
        return self._learned.speeds

    def _choose(self, outlook: IterationOutlook) -> _Running:
        learned, last = self._learned, self._last.get(outlook.streams)
        expected = learned.expected(outlook)
        draws = [expected]
        if learned.varies or learned.replaces:
            number = max(1, min(_DRAWS, _GROUPS_DRAWN // len(outlook.groups)))
            draws = [learned.draw(outlook, seed) for seed in range(number)]
        cluster, varies = learned.cluster(outlook), learned.varies
        chosen = choose(self._rules, cluster, outlook, expected, draws, varies=varies, last=last)
        predicted_s = learned.bias(outlook.streams) * chosen.end_s + learned.border_s
        if last is None or chosen.schedule.name != last.schedule.name:
            self._explain(outlook, chosen.schedule, predicted_s)
        self._last[outlook.streams] = chosen
        return _Running(outlook, chosen.schedule, predicted_s)

    def _explain(self, outlook: IterationOutlook, schedule: Schedule, predicted_s: float) -> None:
        learned = self._learned.numbers(outlook)
        logger.info(
            "schedule%s: %s, at most %d sequences per engine: %.2f s predicted, of which border %.2f s; a decode step takes "
            "%.2f ms and %.3f ms per sequence, trainers %.3f s a group%s",
            "" if outlook.streams else " of synchronous iterations",
            schedule.name,
            schedule.largest_window,
            predicted_s,
            self._learned.border_s,
            1000 * learned["decode_step_s"],
            1000 * learned["decode_sequence_s"],
            learned["train_group_s"],
            "" if self._last_error is None else f"; the last prediction was off by {self._last_error:+.1%}",
        )
