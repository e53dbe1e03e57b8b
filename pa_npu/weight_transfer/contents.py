"""The contents of weights as numbers: of values in any layout, and of values in their places.

They compare memory with what was sent, and what was sent with what trains. An engine fuses, stacks,
transposes, pads and packs the tensors that it gets, which does not change their values. So a
tensor's contents are the sum, modulo 2^64, over its elements of a mixed number of the element's
bits, widened to fp32:

    contents(x)          = sum over elements of mix(bits of fp32(element))          mix(0) = 0

The sum is the same in every order, and with zeros added. Trainers and engines know the same tensor
under the same name and in the same order, so that their tensors have ordered contents as well:

    ordered contents(x)  = sum over elements of mix(bits) * (2 * index of the element + 1)

Both are those of the parts added up, a part's elements with their indices in the whole. If a value
is old, scaled or lost, the number differs, except with a chance of 2^-64 for unrelated values. Of
values that changed places only ordered contents differ; where an engine's memory has them in other
places is known to its kernels alone, and shows in log-probs.

Imports torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

_MODULUS = 2**64
# Odd numbers with well-mixed bits: the golden ratio's fraction, and a multiplier of the SplitMix64
# generator (Steele, Lea, Flood, 2014), as signed integers of 64 bits, which is what torch has.
_FIRST = 0x9E3779B97F4A7C15 - _MODULUS
_SECOND = 0xBF58476D1CE4E5B9 - _MODULUS
# Elements that are mixed at the same time. On a device they take 8 MiB as int64; on a CPU half a
# MiB, so that they stay in a core's own cache from one operation to the next.
_CHUNK = 2**20
_CPU_CHUNK = 2**16


@dataclass(frozen=True)
class Position:
    """Where a piece's elements are in the whole tensor, flattened: the first one at `start`, then
    rows of `width` elements, each `stride` behind the one before.
    """

    start: int = 0
    width: int = 1
    stride: int = 1

    def weighted(self, first: int, mixed: torch.Tensor) -> torch.Tensor:
        """Returns the part of ordered contents of the piece's elements from `first` on, int64 [].

        mixed: their mixed numbers, int64 [up to _CHUNK].
        """
        count = len(mixed)
        if self.width == self.stride:
            # of neighbours: sum of (2 (start + k) + 1) m(k), where k counts from 0
            start = self.start + first
            return mixed.sum() * (2 * start + 1) + 2 * _dot(mixed, _counted(mixed.device)[:count])
        elements = _counted(mixed.device)[:count] + first
        gaps = (elements // self.width).mul_(self.stride - self.width)
        indices = elements.add_(gaps).add_(self.start)
        return _dot(mixed, indices.mul_(2).add_(1))


_IN_ORDER = Position()


class Contents:
    """Contents by name; only `read` fetches the numbers from the device.

    Several tensors of one name are added up.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, of any shape and type.

        Floating-point elements of fewer than 32 bits are widened, so that a tensor and its exact
        copy in a wider type have the same contents. Whole numbers are not changed.
        """
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for _, mixed in _mixed(tensor, None):
            total += mixed.sum()
        _add(self._sums, name, total)

    def read(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each name."""
        return _digits(self._sums)


class OrderedContents:
    """Ordered contents by name, and contents where they are asked for. Several pieces of one name
    are added up.

    in_any_order: whether contents are computed too.
    """

    def __init__(self, *, in_any_order: bool = False) -> None:
        self._ordered: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] | None = {} if in_any_order else None

    @torch.no_grad()
    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        sent_as: torch.dtype | None = None,
        position: Position = _IN_ORDER,
    ) -> None:
        """Adds a tensor or a piece of it, as Contents.add does.

        sent_as: the type that elements are rounded to first. position: where the piece's elements
        are in the whole; without it the tensor is the whole, or its beginning.
        """
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        ordered = total.clone()
        for first, mixed in _mixed(tensor, sent_as):
            if self._sums is not None:
                total += mixed.sum()
            ordered += position.weighted(first, mixed)
        _add(self._ordered, name, ordered)
        if self._sums is not None:
            _add(self._sums, name, total)

    def read(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each name, of ordered contents."""
        return _digits(self._ordered)

    def read_in_any_order(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each name, of contents."""
        assert self._sums is not None
        return _digits(self._sums)


def _mixed(tensor: torch.Tensor, sent_as: torch.dtype | None) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the mixed numbers of a tensor's elements in order, int64 [up to _CHUNK], each time with
    the index of the first one.
    """
    first = 0
    chunk_size = _CPU_CHUNK if tensor.device.type == "cpu" else _CHUNK
    for chunk in tensor.detach().reshape(-1).split(chunk_size):
        if sent_as is not None:
            chunk = chunk.to(sent_as)
        bits = chunk.float().view(torch.int32) if chunk.is_floating_point() else chunk
        mixed = bits.to(torch.int64, copy=True)
        mixed.mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 32)
        mixed.mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 29)
        yield first, mixed
        first += len(mixed)


@functools.cache
def _counted(device: torch.device) -> torch.Tensor:
    """Returns 0, 1, 2, ... int64 [_CHUNK], made once for a device."""
    return torch.arange(_CHUNK, dtype=torch.int64, device=device)


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the sum of products modulo 2^64, int64 []. Only CPUs have it of whole numbers as one
    operation.
    """
    return torch.dot(left, right) if left.device.type == "cpu" else (left * right).sum()


def _add(sums: dict[str, torch.Tensor], name: str, number: torch.Tensor) -> None:
    if name in sums:
        number = number + sums[name].to(number.device)
    sums[name] = number


def _digits(sums: Mapping[str, torch.Tensor]) -> dict[str, str]:
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    # One copy from the device for all.
    numbers = torch.stack([number.to(device) for number in sums.values()]).cpu().tolist()
    return {name: f"{number % _MODULUS:016x}" for name, number in zip(sums, numbers, strict=True)}


def summed(contents: Iterable[str]) -> str:
    """Returns the contents of tensors put together."""
    return f"{sum(int(digits, 16) for digits in contents) % _MODULUS:016x}"


def added(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Returns the contents, by name, of tensors of which several ranks have parts.

    `parts`: contents by name, of each rank.
    """
    by_name: dict[str, list[str]] = {}
    for of_rank in parts:
        for name, contents in of_rank.items():
            by_name.setdefault(name, []).append(contents)
    return {name: summed(contents) for name, contents in by_name.items()}


def follows(memory: str, parts: Sequence[str], workers: int) -> bool:
    """Returns whether the memory of tensor-parallel workers together holds the tensors `parts`.

    Each worker has a part of a tensor, or all of it. If there are fewer heads of keys and values
    than workers, several workers have the same ones, while the queries that they are fused with are
    divided. So every tensor counts once, or up to `workers` times; or the first of several counts
    once and the others up to `workers` times.

    Args:
        memory: contents of the workers' memory, summed.
        parts: contents of each tensor that was put into it, in order.
        workers: of the engine.
    """
    for copies in range(1, workers + 1):
        if memory == summed(list(parts) * copies):
            return True
        if memory == summed([*parts[:1], *list(parts[1:]) * copies]):
            return True
    return False
