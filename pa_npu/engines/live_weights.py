"""What an engine's worker really computes with after a load, compared with what it was given (invariant I5).

    received tensors ──engine's loader: fuses, stacks, transposes, packs──> the memory of live modules
    contents of each                                                        contents of each

The two must be equal, tensor by tensor, in whatever layout the engine keeps them
(weight_transfer.contents). A digest on arrival does not show what the loader made of the tensors: a
layer that it skipped, weights that it scaled, a packed copy that stayed old.

Runs inside engines; imports torch, msgspec and pa_npu.weight_transfer only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import Contents, summed

# A fused projection has three tensors at most, whose parts are named one by one. Experts, of which
# there are many, are one sum.
_NAMED_SOURCES = 3


@dataclass(frozen=True)
class LiveTensor:
    """Memory that a module of the engine computes with: its name, and the HF names of the tensors
    that it is made of.
    """

    name: str
    sources: tuple[str, ...]
    memory: torch.Tensor


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of a LiveTensor.

    contents: of its memory. dtype: of its memory, without "torch.". given: contents of the tensors
    that it is made of, as one sum where there are more than three. given_dtype: theirs, of the
    first.
    """

    contents: str
    dtype: str
    given: list[str]
    given_dtype: str


class LiveReport(msgspec.Struct, frozen=True):
    """What a worker says of a load.

    memory: by name. unplaced: received tensors of which no memory is known to be made. computation:
    what its modules compute with beside the weights. arrived: contents of each tensor that came
    from the trainers, by its name there.
    """

    memory: dict[str, HeldTensor]
    unplaced: list[str]
    computation: Computation = Computation()
    arrived: dict[str, str] = {}


class LiveWeights:
    """Follows one load of a worker: `arrived` and `received` on the way in, `report` once the
    engine has loaded.
    """

    def __init__(self) -> None:
        self._arrived = Contents()
        self._given = Contents()
        self._dtypes: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """HF names of what was received so far."""
        return list(self._dtypes)

    def arrived(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) unchanged, as the trainers sent them: called where weights are made
        of these (adapters).
        """
        for name, tensor in tensors:
            self._arrived.add(name, tensor)
            yield name, tensor

    def received(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, tensor) unchanged, and notes its contents before a loader can write into
        it.
        """
        for name, tensor in weights:
            self._given.add(name, tensor)
            self._dtypes[name] = _name_of(tensor.dtype)
            yield name, tensor

    def report(self, live: Iterable[LiveTensor], computation: Computation) -> dict[str, Any]:
        """Returns a LiveReport as JSON can hold it."""
        held = Contents()
        sources: dict[str, tuple[str, ...]] = {}
        dtypes: dict[str, str] = {}
        for tensor in live:
            held.add(tensor.name, tensor.memory)
            sources[tensor.name] = tensor.sources
            dtypes[tensor.name] = _name_of(tensor.memory.dtype)
        given, contents = self._given.read(), held.read()
        memory: dict[str, HeldTensor] = {}
        placed: set[str] = set()
        for name, names in sources.items():
            placed.update(names)
            parts = [given[source] for source in names]
            if len(parts) > _NAMED_SOURCES:
                parts = [summed(parts)]
            memory[name] = HeldTensor(contents[name], dtypes[name], parts, self._dtypes[names[0]])
        unplaced = [name for name in self._dtypes if name not in placed]
        report = LiveReport(memory, unplaced, computation, arrived=self._arrived.read() or given)
        answer: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
        return answer


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
