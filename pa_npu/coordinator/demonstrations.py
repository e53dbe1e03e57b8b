"""Demonstrations: rows of data that every iteration trains beside what engines write, from its beginning on.

They are groups of their own, with the first numbers of the iteration, so that trainers have them
while engines still write the first responses. Their tokens are a component of the loss, with a
weight, and the normaliser does not count them: it is what it would be without them. Which rows an
iteration trains follows from its number alone, so that a resumed run goes on with the same ones.
"""

from __future__ import annotations

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.row_groups import sample_of
from pa_npu.data.row_sets import Row, RowSet
from pa_npu.data.row_stream import RowGroup, in_order_of_work
from pa_npu.data.stream import PromptStream
from pa_npu.samples.teachers import teacher_columns, without_scores


class Demonstrations:
    """The groups of data.demonstrations, by iteration. loaded: its rows."""

    def __init__(self, config: Config, loaded: RowSet) -> None:
        demonstrated = config.data.demonstrated
        algorithm = build_algorithm(config)
        assert demonstrated is not None and algorithm.demonstrations is not None
        self._size = config.rollout.responses_per_prompt
        self._num_rows = config.demonstration_groups * self._size
        self._weight = demonstrated.weight
        self._component = algorithm.demonstrations.number
        self._columns = teacher_columns(config)
        self._rows: PromptStream[Row] = PromptStream(
            loaded.rows, config.run.seed, config.data.shuffle
        )

    @property
    def fingerprint(self) -> str:
        """Changes with the rows, their order and their weights."""
        return self._rows.fingerprint

    def groups(self, iteration: int) -> list[ScoredGroup]:
        """Returns the groups that the iteration trains, the longest first."""
        self._rows.go_to(iteration * self._num_rows)
        groups = in_order_of_work(self._rows.next_items(self._num_rows), self._size)
        return [self._group(group) for group in groups]

    def _group(self, prompt: RowGroup) -> ScoredGroup:
        samples = [
            sample_of(row, component=self._component, factor=self._weight) for row in prompt.rows
        ]
        samples = without_scores(samples, self._columns)
        return ScoredGroup(prompt, samples, None, is_demonstration=True)
