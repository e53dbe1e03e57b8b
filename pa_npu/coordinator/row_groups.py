"""Groups that are rows of data: each row becomes a sample as it is, and nothing is generated or rewarded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup, with_components
from pa_npu.coordinator.features import Feature, HookPoints
from pa_npu.coordinator.group_source import Deliver
from pa_npu.coordinator.updates import EveryGroup
from pa_npu.data.prompts import Prompt
from pa_npu.data.row_sets import Row
from pa_npu.data.row_stream import RowGroup
from pa_npu.dispatch.assignment import GroupCost
from pa_npu.errors import PaNpuError
from pa_npu.samples.columns import NO_VERSION
from pa_npu.samples.types import Sample


@dataclass(eq=False, repr=False)
class RowGroups:
    """The GroupSource of a run without engines. work: what training a group costs."""

    config: Config
    work: GroupCost

    def __post_init__(self) -> None:
        self.algorithm = build_algorithm(self.config)

    async def prepare(self, iteration: int, prompts: Sequence[Prompt]) -> None:
        """Does nothing: groups come in their order."""

    def begin(
        self, iteration: int, prompts: Sequence[Prompt], choice: EveryGroup, version: int | None
    ) -> IterationOfRows:
        groups = [group_of(prompt, self.algorithm) for prompt in prompts]
        expected_work = sum(self.work(*group.trained_as) for group in groups)
        return IterationOfRows(choice, groups, expected_work)


@dataclass(eq=False, repr=False)
class IterationOfRows:
    """The IterationGroups of one iteration. groups: by dispatch index."""

    choice: EveryGroup
    groups: Sequence[ScoredGroup]
    expected_work: float | None
    features: Sequence[Feature] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._start_s = time.perf_counter()

    @property
    def numbers(self) -> dict[str, Any]:
        """Returns the number of rows that the iteration trains."""
        return {"rows": sum(len(group.samples) for group in self.groups)}

    async def bring(self, hook_points: HookPoints, deliver: Deliver) -> None:
        while not self.choice.must_wait and (index := await self.choice.next_index()) is not None:
            await deliver(index, self.groups[index])
        for notify in hook_points.all_dispatched:
            notify()


def group_of(prompt: Prompt, algorithm: Algorithm) -> ScoredGroup:
    """Returns the group of a RowGroup, without rewards."""
    if not isinstance(prompt, RowGroup):
        raise PaNpuError(f"prompt {prompt.prompt_id} is no group of rows")
    samples = with_components(algorithm, [sample_of(row) for row in prompt.rows])
    return ScoredGroup(prompt, samples, None)


def sample_of(row: Row, *, component: int = 1, factor: float = 1.0) -> Sample:
    """Returns the row as a sample whose trained tokens have this component, and the row's weights
    times `factor`. No policy wrote any of them.
    """
    num_tokens = len(row.tokens)
    is_trained = row.weight != 0
    values = row.weight * np.float32(factor)
    is_plain = bool((values[is_trained] == 1).all())
    weight = None
    if not is_plain:
        weight = np.where(is_trained, values, 1).astype(np.float32)
    return Sample(
        tokens=row.tokens,
        component=np.where(is_trained, component, 0).astype(np.uint8),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.full(num_tokens, NO_VERSION, np.int32),
        finished=row.finished,
        text=row.text[row.prompt_characters :],
        weight=weight,
    )
