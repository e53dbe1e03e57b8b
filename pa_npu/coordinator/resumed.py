"""Puts back what a continued run had produced before it was interrupted: from the checkpoint into the buffer.

Only with schedule.max_staleness: otherwise a checkpoint lies between two iterations, and nothing is ahead of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pa_npu.checkpoints.ahead import AheadIteration, read_ahead
from pa_npu.checkpoints.directories import read_meta
from pa_npu.checkpoints.provenance import Change, change_of, differences
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.iterations_ahead import IterationsAhead
from pa_npu.coordinator.production import Produced
from pa_npu.coordinator.updates import Updates, restored
from pa_npu.errors import DataError
from pa_npu.samples.columns import NONE, RunColumns
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.wire import from_bytes

CARRIED_KEY = "carried"
"""In the numbers of what is no iteration, but groups that are carried to one (pa_npu.trainer.border)."""

logger = logging.getLogger(__name__)


def take_up(
    config: Config,
    freshness: Freshness,
    ahead: IterationsAhead,
    updates: Updates,
    buffer: RolloutBuffer,
) -> None:
    """Takes up the groups that the run had produced ahead of the checkpoint that it goes on from."""
    found = usable_ahead(config, freshness)
    whole = [one for one in found if CARRIED_KEY not in one.numbers]
    for produced, state in put_back(whole, buffer, config.mesh):
        ahead.resume(produced, state)
    for one in found[len(whole) :]:
        updates.carry_on(*carried_of(one, buffer.columns))


def usable_ahead(config: Config, freshness: Freshness) -> list[AheadIteration]:
    """The iterations that checkpoint.load has ahead of its version, by number, where this run may train them.

    None where the run's keys are others, so that these groups would not be its own: they are produced anew, from the same prompts.
    """
    if not config.checkpoint.load or not freshness.max_staleness:
        return []
    directory = Path(config.checkpoint.load)
    found = read_ahead(directory)
    changed = [key for key in differences(read_meta(directory).config, config) if change_of(key) is Change.NEW_RUN]
    if found and changed:
        logger.info("iterations ahead of %s are produced anew: %s differ", directory, ", ".join(changed))
        return []
    return found


def put_back(
    ahead: Sequence[AheadIteration], buffer: RolloutBuffer, mesh: Mesh
) -> Iterator[tuple[Produced, dict[str, Any]]]:
    """Their groups into the buffer, in the same order and as many for each replica; yields what was produced, and data."""
    for one in ahead:
        dispatched = []
        for number, data in enumerate(one.groups):
            group, (replica, slot) = from_bytes(data, buffer.columns), mesh.slot_of(number)
            buffer.put(group, replica, slot)
            lengths = tuple(int(length) for length in group.trained_lengths)
            dispatched.append(DispatchedGroup(group.index, replica, lengths))
        yield Produced(one.iteration, one.numbers, one.samples, Dispatched(one.iteration, tuple(dispatched))), one.data


def carried_of(one: AheadIteration, columns: RunColumns = NONE) -> tuple[list[ScoredGroup], float | None]:
    """The groups that are carried, and TokenBudget.group_tokens. Raises DataError where they cannot be read."""
    try:
        carried = one.numbers[CARRIED_KEY]
        told = zip(one.groups, carried["groups"], strict=True)
        groups = [restored(from_bytes(data, columns), about) for data, about in told]
        return groups, carried["group_tokens"]
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"groups that a checkpoint carries cannot be read ({error}); take an earlier checkpoint"
        ) from error
