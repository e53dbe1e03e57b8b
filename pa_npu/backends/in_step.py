"""Ranks that compute one microbatch at a time together: a rank that has fewer computes fillers too.

An exchange of tokens with experts of other ranks is a collective, and so is gathering a layer, so
that all ranks of a group must compute the same number of microbatches. How many a replica has
follows from its groups' sizes and from packing, and is often not known before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.samples.microbatch import Microbatch


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


class InStep:
    """Yields a rank's microbatches, then fillers as long as another rank of `group` has some. Each
    step is collective.

    is_last: returns whether the microbatch taken last is known to be this rank's last one; None if
    nobody asks InStep.is_last.
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
        self._is_last = is_last
        self._any_rank_continues = False

    def __iter__(self) -> Iterator[Microbatch]:
        while True:
            microbatch = next(self._microbatches, None)
            has_one = microbatch is not None
            computes = microbatch is not None and not microbatch.is_filler
            continues = has_one and (self._is_last is None or not self._is_last())
            state = torch.tensor(
                [has_one, computes, continues],
                dtype=torch.int32,
                device=self._filler.tokens.device,
            )
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
            any_has_one, any_computes, any_continues = state.tolist()
            self._any_rank_continues = bool(any_continues)
            if not any_has_one:
                return
            if not any_computes:
                continue  # every rank has a place here whose group is trained by rule
            yield self._filler if microbatch is None else microbatch

    def is_last(self) -> bool:
        """Returns True once every rank has had its last microbatch."""
        return not self._any_rank_continues


def largest(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Returns the largest of the numbers that the ranks of a group have. Collective."""
    maximum = torch.tensor(number, device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    return int(maximum)
