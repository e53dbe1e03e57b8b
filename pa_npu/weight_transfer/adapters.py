"""Adapters (LoRA) sent alone: an engine merges them into the weights of its model directory, and loads the whole as ever.

    sent      A and B of each layer that has an adapter, fp32, under peft's names
    loaded    every weight of the model, as the directory has it plus factor * B A (merge)

Files are mapped and read weight by weight, so that no second copy of the model is anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.transport import WeightSyncError

_BLOCK_ROWS = 256


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class StoredWeight(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A weight of a model directory: bytes [start, stop) of `file`, of torch's `dtype`, loaded as
    `loaded`.

    layer: in peft's names, whose product B A is added, this weight's rows from `first_row` on;
    empty where nothing is.
    """

    name: str
    file: str
    start: Count
    stop: Count
    first_row: Count
    dtype: str
    loaded: str
    shape: tuple[Count, ...]
    layer: str


class Base(msgspec.Struct, frozen=True):
    """The weights that adapters are merged into, in the order of loading. factor: of the product B
    A; digest: of the weights' bytes (stored_digest)."""

    factor: float
    digest: str
    weights: tuple[StoredWeight, ...]


class BaseDirectory:
    """An engine's own copy of a base.

    Raises WeightSyncError where it is not, bit for bit, the trainers'.
    """

    def __init__(self, base: Base, directory: str, device: torch.device) -> None:
        self._base, self._directory, self._device = base, directory, device
        try:
            found = stored_digest(directory, base.weights, device)
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # of a file that is missing, too short, or another type's
            found = str(error)
        if found != base.digest:
            raise WeightSyncError(
                f"publish.lora=adapter: {directory} has other weights than the trainers' "
                f"model.path ({found:.200}, not {base.digest}), and adapters are merged into "
                "these; give engines the same directory, or set publish.lora=merged"
            )

    @torch.no_grad()
    def merged(
        self, adapters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) of all weights, each made when it is asked for. adapters: as they are
        sent, all of them.
        """
        # memory of their own, as trainers have them: a kernel's last bits may depend on where its
        # operands begin
        own = {name: tensor.to(self._device, copy=True) for name, tensor in adapters}
        for stored in self._base.weights:
            weight = _read(self._directory, stored, self._device).to(getattr(torch, stored.loaded))
            if stored.layer:
                down, up = (own[f"{stored.layer}.lora_{part}.weight"] for part in "AB")
                merge(weight, up[stored.first_row :][: len(weight)], down, self._base.factor)
            yield stored.name, weight


def merge(
    weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, factor: float, first: int = 0
) -> None:
    """Add factor * B A to rows of a weight in place, in fp32, and round once to its type.

    weight: rows from `first` on, of any type; up: B's, fp32 [rows, rank]; down: A, fp32 [rank,
    inputs].

    The bits are the same however a weight is cut into rows. Kernels sum few rows otherwise than
    many, so a row is always computed at the same place of a product of the same size, with zeros
    for rows that are not asked for.
    """
    last = first + len(weight)
    for block in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        start, stop = max(block, first), min(block + _BLOCK_ROWS, last)
        rows, own = slice(start - first, stop - first), slice(start - block, stop - block)
        padded = up.new_zeros(_BLOCK_ROWS, up.shape[1])
        padded[own] = up[rows]
        weight[rows] = (padded @ down)[own].mul_(factor).add_(weight[rows])


@cache
def stored_digest(directory: str, weights: tuple[StoredWeight, ...], device: torch.device) -> str:
    """Digest of the weights' bytes, read once in a process.

    Raises OSError, RuntimeError or ValueError where they cannot be.
    """
    return digest_of(_read(directory, weight, device) for weight in weights)


def _read(directory: str, weight: StoredWeight, device: torch.device) -> torch.Tensor:
    """The weight in new memory, of the type that is stored."""
    if Path(weight.file).name != weight.file:
        raise ValueError(f"{weight.file} is not in the directory")
    stored = _mapped(str(Path(directory) / weight.file))[weight.start : weight.stop]
    return stored.to(device, copy=True).view(getattr(torch, weight.dtype)).view(weight.shape)


@cache
def _mapped(file: str) -> torch.Tensor:
    """The file's bytes, uint8, of which the system reads those that are used."""
    return torch.from_file(file, size=Path(file).stat().st_size, dtype=torch.uint8)
