"""An environment that is the usual one, whose construction makes its process follow six schedules
that differ in everything, and, where devices decode and train, change a role at every chance.

environment.name has it constructed in the coordinator's process, and importing it changes nothing:
tests import the names below.
"""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.coordinator import roles
from pa_npu.dispatch.roles import Decision, Rest
from pa_npu.dispatch.schedule import DispatchTurn, EngineSpeed, Schedule, Windows, same_windows
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import IterationOutlook

NAMES = ("ramp", "one after another", "rotated", "all at once", "thinning", "one at a time")


class Scripted(SingleTurn):
    """SingleTurn as it is, in a process whose schedules are scripted from here on."""

    def __init__(self, context: EnvironmentContext) -> None:
        super().__init__(context)
        ScheduleController.begin_iteration = _begin_scripted  # type: ignore[method-assign]
        roles.decoding_units = _one_fewer


class ChangesRoles(SingleTurn):
    """SingleTurn as it is, in a process that changes a role at every chance."""

    def __init__(self, context: EnvironmentContext) -> None:
        super().__init__(context)
        roles.decoding_units = _one_fewer


def _one_fewer(rest: Rest, speed: EngineSpeed) -> Decision:
    return Decision(units=max(1, rest.decoding - 1), end_s=0.0, turns_s=0.0, decoded_s=0.0)


def scripted(number: int, outlook: IterationOutlook, responses: int) -> Schedule:
    """The schedule of iteration `number`."""
    groups, engines = len(outlook.groups), outlook.engines

    def windows(*steps: tuple[int, int]) -> tuple[Windows, ...]:
        """steps: (groups per engine, from which group dispatched on)."""
        return tuple(same_windows(engines, places * responses, start) for places, start in steps)

    indices = range(groups)
    backwards, odd_first = tuple(reversed(indices)), tuple([*indices[1::2], *indices[::2]])
    turns = tuple(DispatchTurn(max(0, place - 1), 0.01 * (place % 3)) for place in indices)
    rotated = tuple((index * 3 + 2) % groups for index in indices)
    order: Sequence[tuple[int, ...]] = (
        backwards,
        odd_first,
        rotated,
        tuple(indices),
        backwards,
        rotated,
    )
    limits = (
        windows((1, 0), (3, 2), (1, 6)),
        windows((2, 0)),
        windows((2, 0)),
        windows((groups, 0)),
        windows((3, 0), (1, 5)),
        windows((1, 0)),
    )
    assert sorted(order[number]) == list(indices), "each group once"
    return Schedule(NAMES[number], order[number], limits[number], turns if number == 1 else ())


_begin = ScheduleController.begin_iteration
_begun = 0


def _begin_scripted(
    self: ScheduleController, outlook: IterationOutlook, iteration: int = 0
) -> Schedule:
    """As chosen, but for what is scripted; what is recorded is what was followed."""
    global _begun
    _begin(self, outlook, iteration)
    running = self._running[iteration]
    running.schedule = scripted(_begun % len(NAMES), outlook, self._rules.responses)
    _begun += 1
    return running.schedule
