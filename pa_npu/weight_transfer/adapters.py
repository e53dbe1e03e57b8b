"""Adapters (LoRA) that are sent alone: an engine merges them into the weights of its directory.

    sent      A and B of each layer that has an adapter, fp32, under peft's names
    loaded    every weight of the model: the directory's plus factor * B A (merge)

Files are mapped and read weight by weight, so that no second copy of the model exists.
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
    """A weight of a model directory: bytes [start, stop) of `file`.

    dtype: torch's name of the stored type. loaded: that of the type to load it as.
    layer: the layer, in peft's names, whose product B A is added; empty if there is none.
    first_row: the row of B A that belongs to this weight's first row.
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
    """The weights that adapters are merged into, in the order of loading.

    factor: of the product B A. digest: of the weights' bytes (stored_digest).
    """

    factor: float
    digest: str
    weights: tuple[StoredWeight, ...]


class BaseDirectory:
    """An engine's own copy of a base.

    Raises WeightSyncError unless it is, bit for bit, the trainers'.
    """

    def __init__(self, base: Base, directory: str, device: torch.device) -> None:
        self._base = base
        self._directory = directory
        self._device = device
        try:
            digest = stored_digest(directory, base.weights, device)
        # A file is missing, too short, or of another type.
        except (OSError, RuntimeError, ValueError) as error:
            digest = str(error)
        if digest != base.digest:
            raise WeightSyncError(
                f"publish.lora=adapter: {directory} has other weights than the trainers' "
                f"model.path ({digest:.200}, not {base.digest}), and adapters are merged into "
                "these; give engines the same directory, or set publish.lora=merged"
            )

    @torch.no_grad()
    def merged(
        self, adapters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (HF name, tensor) of all weights, each made when it is asked for.

        `adapters`: all of them, as they are sent.
        """
        # In memory of their own, as trainers have them: a kernel's last bits may depend on the
        # place where its operands begin.
        parts = {name: tensor.to(self._device, copy=True) for name, tensor in adapters}
        for stored in self._base.weights:
            weight = _read(self._directory, stored, self._device).to(getattr(torch, stored.loaded))
            if stored.layer:
                down = parts[f"{stored.layer}.lora_A.weight"]
                up = parts[f"{stored.layer}.lora_B.weight"]
                merge(weight, up[stored.first_row :][: len(weight)], down, self._base.factor)
            yield stored.name, weight


def merge(
    weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor, factor: float, first: int = 0
) -> None:
    """Adds factor * B A to rows of a weight in place, in fp32, and rounds once to its type.

    The bits are the same however a weight is cut into rows. Kernels sum few rows in another order
    than many, so a row is always computed at the same place of a product of the same size, with
    zeros for rows that are not asked for.

    Args:
        weight: rows from `first` on, of any type.
        up: these rows of B, fp32 [rows, rank].
        down: A, fp32 [rank, inputs].
        factor: of the product.
        first: number of the weight's first row.
    """
    last = first + len(weight)
    for block in range(first // _BLOCK_ROWS * _BLOCK_ROWS, last, _BLOCK_ROWS):
        start = max(block, first)
        stop = min(block + _BLOCK_ROWS, last)
        rows = slice(start - first, stop - first)
        rows_of_block = slice(start - block, stop - block)
        padded = up.new_zeros(_BLOCK_ROWS, up.shape[1])
        padded[rows_of_block] = up[rows]
        product = (padded @ down)[rows_of_block]
        weight[rows] = product.mul_(factor).add_(weight[rows])


@cache
def stored_digest(directory: str, weights: tuple[StoredWeight, ...], device: torch.device) -> str:
    """Returns the digest of the weights' bytes, which a process reads once.

    Raises OSError, RuntimeError or ValueError if they cannot be read.
    """
    return digest_of(_read(directory, weight, device) for weight in weights)


def _read(directory: str, weight: StoredWeight, device: torch.device) -> torch.Tensor:
    """Returns the weight in new memory, of the type that is stored."""
    if Path(weight.file).name != weight.file:
        raise ValueError(f"{weight.file} is not in the directory")
    stored = _mapped(str(Path(directory) / weight.file))[weight.start : weight.stop]
    return stored.to(device, copy=True).view(getattr(torch, weight.dtype)).view(weight.shape)


@cache
def _mapped(file: str) -> torch.Tensor:
    """Returns the file's bytes, uint8; the system reads only those that are used."""
    return torch.from_file(file, size=Path(file).stat().st_size, dtype=torch.uint8)
