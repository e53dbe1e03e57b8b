"""What a rank computes in turn: its microbatches, the stems before them, and fillers while only other ranks have work.

    microbatches of a group     stem · piece · piece · piece (the last behind the stem)
    turns                       open(stem) · train · train · train · close(stem)

A stem's forward pass keeps the keys that its pieces take, and its backward comes after theirs
(pa_npu.samples.stems). All else is trained in one turn, forward and backward.

An exchange of tokens with experts of other ranks is a collective, and so is gathering a layer, so
that all ranks of a group must compute the same turns. How many a replica has follows from its
groups' sizes and from packing, and is often not known before the last one. A rank without a
microbatch computes a filler in its place. While some rank has stems open, every rank has as many
open, fillers where it has none; a rank whose next stem comes then waits until these are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from pa_npu.attention.stems import PathRows
from pa_npu.samples.microbatch import Microbatch


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of a rank.

    kind: open: the forward pass of a stem, whose graph is kept; close: its backward, the stem
        opened last; train: both of a microbatch.
    is_last: whether no rank of the group has a backward after this turn's, as far as that is known.
    """

    kind: Literal["open", "train", "close"]
    microbatch: Microbatch
    is_last: bool = False

    @property
    def label(self) -> str:
        """Its groups, for people."""
        return f"group {', '.join(map(str, self.microbatch.group_indices))}"


def zero_for_fillers(
    loss: Callable[[Microbatch, Any], torch.Tensor],
) -> Callable[[Microbatch, Any], torch.Tensor]:
    """Wraps `loss` so that a filler contributes zero and stays connected to every parameter: its
    backward still joins the collectives.
    """

    def loss_or_zero(microbatch: Microbatch, output: Any) -> torch.Tensor:
        if not microbatch.is_filler:
            return loss(microbatch, output)
        logprobs: torch.Tensor = getattr(output, "logprobs", output)
        return logprobs.sum() * 0.0

    return loss_or_zero


class Turns:
    """Yields a rank's turns, in step with the other ranks of `group`. Each turn is collective.

    group: None for a rank that computes alone.
    is_last: returns whether the microbatch taken last is known to be this rank's last one; None if
    nobody asks Turn.is_last.
    """

    def __init__(
        self,
        microbatches: Iterable[Microbatch],
        group: dist.ProcessGroup | None,
        make_filler: Callable[[], Microbatch],
        is_last: Callable[[], bool] | None,
    ) -> None:
        self._microbatches = iter(microbatches)
        self._group = group
        self._filler = make_filler()
        self._source_is_last = is_last
        self._ahead: Microbatch | None = None  # taken, and not yet computed
        self._opened: list[Microbatch] = []  # on every rank as many, fillers among them
        self._has_pieces = False  # whether pieces of the stems that are open here are to come

    def __iter__(self) -> Iterator[Turn]:
        is_opening = True
        while True:
            ranks = self._agree(is_opening)
            if ranks.opens:
                yield self._open()
            elif self._opened and not ranks.has_pieces:
                yield from self._close(is_last=not (ranks.continues or ranks.waits))
                is_opening = True
            elif ranks.computes:
                is_opening = not self._opened
                yield self._train(is_last=not ranks.continues)
            elif ranks.has_one:
                self._ahead = None  # every rank has a place here whose group is trained by rule
            else:
                return

    def _agree(self, is_opening: bool) -> _Ranks:
        """Takes the next microbatch, if this rank has none at hand, and returns what any rank has."""
        # the stems here are closed before anyone waits for a further group
        is_done = self._holds_stems and not self._has_pieces
        if self._ahead is None and not is_done:
            self._ahead = next(self._microbatches, None)
        ahead = self._ahead
        is_stem = ahead is not None and ahead.is_stem
        computes = ahead is not None and not ahead.is_filler
        continues = is_stem or (
            (is_done or ahead is not None)
            and (self._source_is_last is None or not self._source_is_last())
        )
        here = [
            is_done or ahead is not None,
            computes,
            continues,
            is_stem and is_opening,
            self._has_pieces,
            ahead is not None,
        ]
        if self._group is None:
            return _Ranks(*here)
        state = torch.tensor(here, dtype=torch.int32, device=self._filler.tokens.device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
        return _Ranks(*map(bool, state.tolist()))

    @property
    def _holds_stems(self) -> bool:
        return any(stem.is_stem for stem in self._opened)

    def _open(self) -> Turn:
        stem = self._filler
        if self._ahead is not None and self._ahead.is_stem:
            stem, self._ahead = self._ahead, None
            self._has_pieces = True
        self._opened.append(stem)
        return Turn("open", stem)

    def _train(self, is_last: bool) -> Turn:
        microbatch = self._filler
        if self._ahead is not None and not self._ahead.is_stem:
            microbatch, self._ahead = self._ahead, None
        if microbatch.ends_stems:
            self._has_pieces = False
        return Turn("train", microbatch, is_last=is_last and not self._opened)

    def _close(self, is_last: bool) -> Iterator[Turn]:
        while self._opened:
            stem = self._opened.pop()
            yield Turn("close", stem, is_last=is_last and not self._opened)
            if isinstance(stem.layout, PathRows) and stem.layout.own is not None:
                stem.layout.own.release()


@dataclass(frozen=True)
class _Ranks:
    """What is true of any rank of the group.

    has_one: has a microbatch, or stems to close. computes: has one that belongs to responses.
    continues: may have others after it. opens: has a stem to open. has_pieces: has stems open whose
    pieces are to come. waits: has taken a microbatch that is not computed yet.
    """

    has_one: bool
    computes: bool
    continues: bool
    opens: bool
    has_pieces: bool
    waits: bool


def largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Returns the largest of the numbers that the ranks of a group have. Collective."""
    maximum = torch.tensor(number, device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return int(maximum)
