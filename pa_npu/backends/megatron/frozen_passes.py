"""Passes of the frozen models alone over all of an update's microbatches, before the policy's (trainer.frozen_pass=separate)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from pa_npu.backends.logprob import RowScores
from pa_npu.samples.microbatch import Microbatch

Pass = Callable[[str, Iterable[Microbatch], Callable[[Microbatch, RowScores], torch.Tensor]], None]


class HeldMicrobatches:
    """An update's microbatches that have all arrived, and the frozen models' scores of each."""

    def __init__(
        self, microbatches: Iterable[Microbatch], frozen: Iterable[str], run: Pass
    ) -> None:
        """run(name, microbatches, keep): frozen model `name` over all of them, `keep` called with
        what comes out on the last stage.

        Microbatches arrive during the first model's pass; those after it, and the policy's, go over
        what is held.
        """
        self._held: list[Microbatch] = []
        self._handed_out = 0
        self._scores: dict[int, dict[str, RowScores]] = {}
        source: Iterable[Microbatch] = self._holding(microbatches)
        for name in frozen:
            run(name, source, partial(self._keep, name))
            source = self._held

    @property
    def is_last(self) -> bool:
        """Returns whether the microbatch handed out last is the last one."""
        return self._handed_out == len(self._held)

    def __iter__(self) -> Iterator[Microbatch]:
        for microbatch in self._held:
            self._handed_out += 1
            yield microbatch

    def scores(self, microbatch: Microbatch) -> dict[str, RowScores]:
        """Returns scores by model; none on stages before the last, and none for a filler."""
        return self._scores.get(id(microbatch), {})

    def _holding(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        for microbatch in microbatches:
            self._held.append(microbatch)
            yield microbatch

    def _keep(self, name: str, microbatch: Microbatch, scores: RowScores) -> torch.Tensor:
        self._scores.setdefault(id(microbatch), {})[name] = scores
        return scores.logprobs.new_zeros(())
