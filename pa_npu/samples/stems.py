"""Stems: what all pieces of a group begin with, computed once where the pieces do not fit together.

    group, cut into pieces      p0 p1 p2 p3 a0 a1 | p0 p1 p2 p3 b0 | p0 p1 p2 p3 c0 c1
    depth first                 p0 p1 p2  ·  p3 a0 a1  ·  p3 b0  ·  p3 c0 c1

A stem ends before the first row that predicts a target of any sample: every target is predicted
from a row of its own piece, and a stem has none. Pieces are microbatches as ever, with PathRows in
place of a PrefixLayout. A stem that is longer than a microbatch may be is cut into several, one
behind the other. What is done with them in turn is pa_npu.backends.in_step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.attention.stems import KeptKeys, PathRows
from pa_npu.config.pieces import MIN_SAVED_ROWS, saved_rows
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, filler, pack, shared_prompts


@dataclass(frozen=True, eq=False)
class Stem:
    """Rows [start, end) of a group's pieces.

    piece: any of them. behind: the stems before this one.
    """

    piece: Group
    start: int
    end: int
    behind: tuple[Stem, ...]
    kept: KeptKeys = field(init=False, repr=False)
    _microbatches: list[Microbatch] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", KeptKeys(self.end - self.start))

    def packed(self) -> Microbatch:
        """Returns a microbatch without targets, which belongs to no response; always the same one."""
        if self._microbatches:
            return self._microbatches[0]
        whole = pack([self.piece], True, 1)
        rows = slice(self.start, self.end)
        layout = PathRows(
            PrefixLayout((self.end,), (-1,)),
            stems=tuple(stem.kept for stem in self.behind),
            own=self.kept,
        )
        microbatch = replace(
            filler(self.end - self.start, torch.device("cpu")),
            layout=layout,
            tokens=whole.tokens[rows],
            packed={name: column[rows] for name, column in whole.packed.items()},
            iteration=whole.iteration,
            group_indices=whole.group_indices,
        )
        self._microbatches.append(microbatch)
        return microbatch


@dataclass(frozen=True, eq=False)
class Branch:
    """A piece behind stems.

    ends: whether it is the last one behind them. counted: rows of the stems that are counted among
    those computed for this piece.
    """

    piece: Group
    stems: tuple[Stem, ...]
    ends: bool
    counted: int

    def packed(self, pad_multiple: int) -> Microbatch:
        """Returns the microbatch of the rows behind the stems, padded as `pack` does."""
        whole = pack([self.piece], True, pad_multiple)
        start = self.stems[-1].end
        layout = whole.layout
        assert isinstance(layout, PrefixLayout), "pack makes whole sequences"
        return replace(
            whole,
            layout=PathRows(layout, stems=tuple(stem.kept for stem in self.stems)),
            tokens=whole.tokens[start:],
            rows=whole.rows - start,
            packed={name: column[start:] for name, column in whole.packed.items()},
            num_computed_tokens=whole.num_computed_tokens - start + self.counted,
            before=tuple(stem.packed() for stem in self.stems),
            ends_stems=self.ends,
        )


def with_stems(
    pieces: Sequence[Group],
    group: Group,
    multiple: int,
    max_tokens: int | None,
    min_saved_rows: int = MIN_SAVED_ROWS,
) -> list[Group | Stem | Branch]:
    """Returns the pieces of a group, behind stems where that saves as many rows as a stem costs.

    Args:
        group: what was cut into `pieces`.
        multiple: of which a stem's rows are a multiple, as pieces are padded.
        max_tokens: of a stem; None for any number.
    """
    if len(pieces) < 2:
        return list(pieces)
    rows = _common_rows(group) // multiple * multiple
    if saved_rows(len(pieces), rows) < max(1, min_saved_rows):
        return list(pieces)
    if group.placeholders:  # their positions are not those of tokens
        return list(pieces)
    step = rows
    if max_tokens is not None:
        step = max(multiple, max_tokens // multiple * multiple)
    stems: list[Stem] = []
    for start in range(0, rows, step):
        stems.append(Stem(pieces[0], start, min(rows, start + step), tuple(stems)))
    branches = []
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        counted = 0 if number else rows
        branches.append(Branch(piece, tuple(stems), ends=is_last, counted=counted))
    return [*stems, *branches]


def _common_rows(group: Group) -> int:
    """Returns how many tokens all samples begin with, before the row that predicts the first target
    of any.
    """
    common = min(group.prompt_lengths()[0], *shared_prompts(group)[1:])
    offsets = group.offsets()
    trained = group.trained.nonzero()[0]  # every sample has some
    firsts = trained[trained.searchsorted(offsets[:-1])] - offsets[:-1]
    return max(0, min(common, int(firsts.min()) - 1))
