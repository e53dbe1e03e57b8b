"""The elements by which a step is judged: some of each tensor, and other ones in every update.

They are read with one copy from each device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.algorithm.adamw import Values

Integers = npt.NDArray[np.int64]


class HasWeights(Protocol):
    """A tensor of a rank: a SteppedTensor, or a HeldTensor."""

    @property
    def weights(self) -> torch.Tensor: ...


_ELEMENTS_OF_A_RANK = 512
_MIN_ELEMENTS_OF_A_TENSOR = 2


@dataclass(frozen=True, eq=False)
class ChosenElements:
    """The n chosen elements of a rank's tensors: of each tensor some, at equal distances from a
    random one on. They are ordered by tensor.

    slices: (start, stop, distance) of each tensor.
    counts: int64 [tensors], number of elements of each tensor.
    owner: int64 [n], the number of each element's tensor.
    """

    slices: list[tuple[int, int, int]]
    counts: Integers
    owner: Integers

    @classmethod
    def choose(
        cls, tensors: Sequence[HasWeights], seed: int, update: int, rank: int
    ) -> ChosenElements:
        """Chooses the elements by which step `update` is judged on this rank."""
        sizes = np.array([tensor.weights.numel() for tensor in tensors], np.int64)
        num_tensors = max(1, int(np.count_nonzero(sizes)))
        counts = np.minimum(
            max(_MIN_ELEMENTS_OF_A_TENSOR, _ELEMENTS_OF_A_RANK // num_tensors), sizes
        )
        random = np.random.default_rng((seed, update, rank)).random((2, len(sizes)))
        # distances are random, up to the largest one that leaves room for as many elements, so that
        # no pattern of elements is met, or missed, every time
        largest = np.maximum(1, sizes // np.maximum(1, counts))
        distances = np.maximum(1, largest - (random[0] * largest / 4).astype(np.int64))
        room = sizes - np.maximum(0, counts - 1) * distances
        starts = (random[1] * room).astype(np.int64)
        stops = np.minimum(starts + counts * distances, sizes)
        slices = list(zip(starts.tolist(), stops.tolist(), distances.tolist(), strict=True))
        return cls(slices, counts, np.repeat(np.arange(len(sizes)), counts))

    def __len__(self) -> int:
        return len(self.owner)

    def spread(self, values: Sequence[float]) -> Values:
        """Returns, for each element, the value of its tensor. values: one of each tensor."""
        return np.repeat(np.asarray(values, np.float64), self.counts)

    def tensors_with_any(self, values: Values) -> npt.NDArray[np.bool_]:
        """Returns bool [tensors]: whether any element of the tensor has a value that is not 0."""
        return np.bincount(self.owner, weights=values != 0, minlength=len(self.counts)) > 0


Memory = list[torch.Tensor | Values | None]
"""An attribute of each tensor: as numpy if it is fp32 in host memory, None if the tensor has none.
The same type holds views of each tensor's chosen elements.
"""


def memory_of(tensors: Sequence[HasWeights], name: str) -> Memory:
    """Returns the attribute `name` of each tensor."""
    memory: Memory = []
    for tensor in tensors:
        values: torch.Tensor | None = getattr(tensor, name)
        is_of_host = values is not None and values.is_cpu and values.dtype == torch.float32
        memory.append(values.numpy() if values is not None and is_of_host else values)
    return memory


def views_of(memory: Memory, chosen: ChosenElements) -> Memory:
    """Returns views of each tensor's chosen elements; None for a tensor without any."""
    views: Memory = []
    for values, span, count in zip(memory, chosen.slices, chosen.counts.tolist(), strict=True):
        views.append(None if values is None or not count else values[slice(*span)])
    return views


@torch.no_grad()
def read_elements(columns: Sequence[tuple[ChosenElements, Memory]]) -> list[Values]:
    """Reads columns of elements with one copy from each device; returns fp64 [n] for each column,
    NaN for elements of tensors that have no such attribute.
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
    joined = np.concatenate([np.zeros(0), *(part for part in parts if part is not None)])
    return np.split(joined, np.cumsum([len(chosen) for chosen, _ in columns])[:-1])
