"""Compares what an engine's worker computes with after a load with what it received (invariant I5).

    received tensors ──engine's loader: fuses, stacks, transposes, packs──> memory of live modules
    contents of each                                                        contents of each

The two must be equal, tensor by tensor, in whatever layout the engine keeps them
(weight_transfer.contents). Of what was received ordered contents are reported too, which the
trainers compare with what they train. A digest on arrival does not show the loader's work: a layer that it
skipped, weights that it scaled, a packed copy that stayed old.

Runs inside engines; imports torch, msgspec and pa_npu.weight_transfer only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch

from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import Contents, OrderedContents, summed

# A fused projection is made of at most three tensors, which are reported one by one. Experts, of
# which there are many, are reported as one sum.
_NAMED_SOURCES = 3


@dataclass(frozen=True)
class LiveTensor:
    """Memory that a module of the engine computes with.

    name: of the memory. sources: HF names of the tensors that it is made of.
    """

    name: str
    sources: tuple[str, ...]
    memory: torch.Tensor


class ReportedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A worker's report of a LiveTensor.

    contents: of its memory.
    dtype: of its memory, without "torch.".
    received: contents of the tensors that it is made of; one sum if there are more than three.
    received_dtype: dtype of the first of these.
    """

    contents: str
    dtype: str
    received: list[str]
    received_dtype: str


class LiveReport(msgspec.Struct, frozen=True):
    """A worker's report of a load.

    memory: by name.
    unplaced: received tensors that no known memory is made of.
    computation: what its modules compute with beside the weights.
    arrived: ordered contents of each tensor that came from the trainers, by its name there.
    """

    memory: dict[str, ReportedTensor]
    unplaced: list[str]
    computation: Computation = Computation()
    arrived: dict[str, str] = {}


class Received(NamedTuple):
    """Contents and ordered contents of a tensor that was received, and its dtype."""

    contents: str
    ordered: str
    dtype: str


Known = dict[str, Received]
"""Tensors that were received, by HF name."""


class LiveWeights:
    """Follows one load of a worker.

    before: tensors that came with an earlier load and stay.

    Tensors pass through `arrived` and `received` on the way in; `report` is called once the engine
    has loaded them.
    """

    def __init__(self, before: Known | None = None) -> None:
        self._before = before or {}
        self._arrived = OrderedContents()
        self._received = OrderedContents(in_any_order=True)
        self._dtypes: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """HF names of the tensors received so far."""
        return list(dict.fromkeys([*self._dtypes, *self._before]))

    def known(self) -> Known:
        """Returns the tensors that were received, those before included."""
        known = dict(self._before)
        ordered = self._received.read()
        for name, contents in self._received.read_in_any_order().items():
            known[name] = Received(contents, ordered[name], self._dtypes[name])
        return known

    def arrived(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) unchanged, as the trainers sent them.

        Called if weights are made of these (adapters).
        """
        for name, tensor in tensors:
            self._arrived.add(name, tensor)
            yield name, tensor

    def received(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, tensor) unchanged, after recording its contents.

        A loader may write into the tensor afterwards.
        """
        for name, tensor in weights:
            self._received.add(name, tensor)
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
        known = self.known()
        contents = held.read()
        memory: dict[str, ReportedTensor] = {}
        placed: set[str] = set()
        for name, names in sources.items():
            placed.update(names)
            parts = [known[source].contents for source in names]
            if len(parts) > _NAMED_SOURCES:
                parts = [summed(parts)]
            memory[name] = ReportedTensor(
                contents=contents[name],
                dtype=dtypes[name],
                received=parts,
                received_dtype=known[names[0]].dtype,
            )
        unplaced = [name for name in known if name not in placed]
        report = LiveReport(
            memory=memory,
            unplaced=unplaced,
            computation=computation,
            arrived=self._arrived.read() or {name: known[name].ordered for name in known},
        )
        answer: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
        return answer


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
