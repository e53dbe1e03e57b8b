"""The elements by which a step is judged: some of each tensor, others in every update, read with one copy from each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.algorithm.adamw import Values
from pa_npu.backends.protocol import SteppedTensor

Integers = npt.NDArray[np.int64]

_ELEMENTS = 512  # a rank, in all
_OF_EACH = 2  # tensor, at least


@dataclass(frozen=True, eq=False)
class ChosenElements:
    """Elements of each tensor, at equal distances from a random one on, in one order.

    slices: (start, stop, distance) of each tensor. counts: int64 [tensors], of its elements; owner:
    int64 [n], each element's tensor.
    """

    slices: list[tuple[int, int, int]]
    counts: Integers
    owner: Integers

    @classmethod
    def of(
        cls, tensors: Sequence[SteppedTensor], seed: int, update: int, rank: int
    ) -> ChosenElements:
        """The elements by which step `update` is judged on this rank."""
        sizes = np.array([tensor.weights.numel() for tensor in tensors], np.int64)
        each = max(_OF_EACH, _ELEMENTS // max(1, int(np.count_nonzero(sizes))))
        counts = np.minimum(each, sizes)
        random = np.random.default_rng((seed, update, rank)).random((2, len(sizes)))
        # up to the largest distance at which there are as many, so that no pattern of elements is
        # at it every time
        largest = np.maximum(1, sizes // np.maximum(1, counts))
        distances = np.maximum(1, largest - (random[0] * largest / 4).astype(np.int64))
        room = sizes - np.maximum(0, counts - 1) * distances
        starts = (random[1] * room).astype(np.int64)
        stops = np.minimum(starts + counts * distances, sizes)
        slices = list(zip(starts.tolist(), stops.tolist(), distances.tolist(), strict=True))
        return cls(slices, counts, np.repeat(np.arange(len(sizes)), counts))

    def __len__(self) -> int:
        return len(self.owner)

    def of_elements(self, values: Sequence[float]) -> Values:
        """Spreads a value of each tensor over its elements."""
        return np.repeat(np.asarray(values, np.float64), self.counts)

    def any_of_tensors(self, values: Values) -> npt.NDArray[np.bool_]:
        """Says of each tensor whether any of its elements here is not 0."""
        return np.bincount(self.owner, weights=values != 0, minlength=len(self.counts)) > 0


Memory = list[torch.Tensor | Values | None]
"""An attribute of each tensor, in numpy where that is the host's memory in fp32; None where there
is none. The same type holds views of the chosen elements of each.
"""


def memory_of(tensors: Sequence[SteppedTensor], name: str) -> Memory:
    memory: Memory = []
    for tensor in tensors:
        values: torch.Tensor | None = getattr(tensor, name)
        is_of_host = values is not None and values.is_cpu and values.dtype == torch.float32
        memory.append(values.numpy() if values is not None and is_of_host else values)
    return memory


def views_of(memory: Memory, chosen: ChosenElements) -> Memory:
    """There are many tensors: one call for each."""
    return [
        values[start:stop:distance] if values is not None and count else None
        for values, (start, stop, distance), count in zip(
            memory, chosen.slices, chosen.counts.tolist(), strict=True
        )
    ]


@torch.no_grad()
def read_elements(columns: Sequence[tuple[ChosenElements, Memory]]) -> list[Values]:
    """Reads columns of elements, fp64 [n] each; NaN where a tensor has none.

    One copy from each device for all of them.
    """
    parts: list[npt.NDArray[Any] | None] = []
    waiting: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for chosen, elements in columns:
        for view, count in zip(elements, chosen.counts.tolist(), strict=True):
            if isinstance(view, torch.Tensor):
                waiting.setdefault((view.device, view.dtype), []).append((len(parts), view))
                parts.append(None)  # read below
            elif view is None:
                parts.append(np.full(count, np.nan))
            else:
                parts.append(view)
    for numbered in waiting.values():
        values = torch.cat([view for _, view in numbered]).float().cpu().numpy()
        begin = 0
        for number, view in numbered:
            parts[number] = values[begin : begin + len(view)]
            begin += len(view)
    whole = np.concatenate([np.zeros(0), *(part for part in parts if part is not None)])
    return np.split(whole, np.cumsum([len(chosen) for chosen, _ in columns])[:-1])
