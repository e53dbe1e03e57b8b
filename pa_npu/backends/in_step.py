"""Ranks that compute one microbatch at a time together: whoever has fewer computes fillers beside the others' last ones.

An exchange of tokens with experts of other ranks is a collective, and so is gathering a layer, so
that all of a group must compute as many microbatches. How many a replica has follows from its
groups' sizes and from packing, and is often not known before the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.samples.microbatch import Microbatch


def or_nothing(
    loss: Callable[[Microbatch, Any], torch.Tensor],
) -> Callable[[Microbatch, Any], torch.Tensor]:
    """Return a loss that of a filler is zero, through which every gradient is: its backward is as
    collective as its forward.
    """

    def of_either(microbatch: Microbatch, output: Any) -> torch.Tensor:
        if not microbatch.is_filler:
            return loss(microbatch, output)
        logprobs: torch.Tensor = getattr(output, "logprobs", output)
        return logprobs.sum() * 0.0

    return of_either


class InStep:
    """A rank's microbatches, then fillers as long as another rank of `group` has some. Each step is
    a collective.

    is_last: whether the microbatch taken last is this rank's last one, as far as that is known;
    None: nobody asks.
    """

    def __init__(
        self,
        microbatches: Iterable[Microbatch],
        group: dist.ProcessGroup | None,
        make_filler: Callable[[], Microbatch],
        is_last: Callable[[], bool] | None,
    ) -> None:
        self._own = iter(microbatches)
        self._group, self._filler, self._is_last = group, make_filler(), is_last
        self._others_go_on = False

    def __iter__(self) -> Iterator[Microbatch]:
        while True:
            own = next(self._own, None)
            goes_on = own is not None and (self._is_last is None or not self._is_last())
            computes = own is not None and not own.is_filler
            said = torch.tensor(
                [own is not None, computes, goes_on],
                dtype=torch.int32,
                device=self._filler.tokens.device,
            )
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
            anyone, anyone_computes, self._others_go_on = (bool(value) for value in said.tolist())
            if not anyone:
                return
            if not anyone_computes:
                continue  # all have a place here whose group is trained by rule
            yield own if own is not None else self._filler

    def is_last(self) -> bool:
        """Whether no rank goes on after the microbatch taken last."""
        return not self._others_go_on


def most(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest number of a rank of the group."""
    said = torch.tensor(number, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
    return int(said)
