"""Groups of rows: the stream of rows cut into groups that begin alike, which the trainers compute once.

    rows, in seeded epochs ──take B x G──> sorted by their tokens ──> B groups of G rows

A group stands where a prompt stands in a run with engines: one per slot of an iteration. Rows with
equal beginnings are neighbours once they are sorted, so that they come into one group as far as G
allows; a group may also hold rows that have nothing in common, which then are computed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.data.prompts import Prompt
from pa_npu.data.row_sets import Row
from pa_npu.data.stream import Outcome, TrainingStream


@dataclass(frozen=True, eq=False)
class RowGroup(Prompt):
    """The rows of a group. As a prompt it is what all of them begin with, and has the number of the
    first.
    """

    rows: tuple[Row, ...] = ()

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> RowGroup:
        first = rows[0]
        tokens = first.tokens[: num_common([row.tokens for row in rows])]
        sources = {row.source for row in rows}
        return cls(
            prompt_id=first.row_id,
            tokens=tokens,
            answer="",
            text=first.text[: first.prompt_characters],
            row={},
            source=first.source if len(sources) == 1 else "",
            rows=tuple(rows),
        )


class RowGroupStream:
    """Has the calls of a TrainingStream of prompts.

    size: items of a group. groups_of: makes groups of so many; None: of rows (groups_of_rows).
    """

    def __init__(
        self,
        items: TrainingStream[Any],
        size: int,
        groups_of: Callable[[Sequence[Any], int], list[RowGroup]] | None = None,
    ) -> None:
        self._rows = items
        self._size = size
        self._groups_of = groups_of_rows if groups_of is None else groups_of

    def next_items(self, num_groups: int) -> list[RowGroup]:
        """Returns the next groups, of the next num_groups x size items, in an order by which
        replicas that take turns get about as many tokens.
        """
        return _longest_first(
            self._groups_of(self._rows.next_items(num_groups * self._size), self._size)
        )

    def observe(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Numbers for the record of an iteration: how many times the data has been gone through."""
        return {"epoch": self._rows.epochs}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, JSON."""
        return self._rows.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was asked for. Raises DataError where it is of other data."""
        self._rows.restore(state)


def groups_of_rows(rows: Sequence[Row], size: int) -> list[RowGroup]:
    """Returns the rows in groups of `size`, of which the last may be smaller; neighbours begin
    alike.
    """
    ordered = sorted(rows, key=lambda row: (row.tokens.tolist(), row.row_id))
    starts = range(0, len(ordered), size)
    return [RowGroup.from_rows(ordered[start : start + size]) for start in starts]


def in_order_of_work(rows: Sequence[Row], size: int) -> list[RowGroup]:
    """Returns the same, the groups with the most tokens first."""
    return _longest_first(groups_of_rows(rows, size))


def _longest_first(groups: list[RowGroup]) -> list[RowGroup]:
    return sorted(groups, key=_num_tokens, reverse=True)


def _num_tokens(group: RowGroup) -> tuple[int, int]:
    return sum(len(row.tokens) for row in group.rows), -group.prompt_id


def num_common(arrays: Sequence[npt.NDArray[np.int32]]) -> int:
    """Returns the number of tokens with which all arrays begin alike."""
    shortest = min(len(array) for array in arrays)
    heads = np.stack([array[:shortest] for array in arrays])
    differs = np.flatnonzero((heads != heads[0]).any(axis=0))
    return int(differs[0]) if len(differs) else shortest
