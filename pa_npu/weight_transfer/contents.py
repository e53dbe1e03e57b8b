"""The contents of weights as numbers that do not depend on their layout.

They compare memory with what was sent. An engine fuses, stacks, transposes, pads and packs the
tensors that it gets, which does not change their values. A tensor's contents are the sum, modulo
2^64, over its elements of a mixed number of the element's bits, widened to fp32:

    contents(x) = sum over elements of mix(bits of fp32(element))          mix(0) = 0

The sum is the same in every order, and with zeros added. The contents of tensors that were put
together are the sum of theirs. If a value is old, scaled or lost, the number differs, except with a
chance of 2^-64 for unrelated values. It does not show values that changed places; these are far
beyond the limits on log-probs.

Imports torch only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

_MODULUS = 2**64
# Odd numbers with well-mixed bits: the golden ratio's fraction, and a multiplier of the SplitMix64
# generator (Steele, Lea, Flood, 2014), as signed integers of 64 bits, which is what torch has.
_FIRST = 0x9E3779B97F4A7C15 - _MODULUS
_SECOND = 0xBF58476D1CE4E5B9 - _MODULUS
# Elements that are mixed at the same time. As int64 they take 8 MiB, which caches of CPUs and
# devices hold.
_CHUNK = 2**20


@torch.no_grad()
def contents_of(tensor: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
    """Returns the contents of a tensor, int64 [] on its device.

    Floating-point elements of fewer than 32 bits are widened, so that a tensor and its exact copy
    in a wider type have the same contents. Whole numbers are not changed. `sent_as`: the type that
    elements are rounded to first.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        if sent_as is not None:
            chunk = chunk.to(sent_as)
        bits = chunk.float().view(torch.int32) if chunk.is_floating_point() else chunk
        mixed = bits.to(torch.int64)
        mixed.mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 32)
        mixed.mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


class Contents:
    """Contents by name; only `read` fetches the numbers from the device.

    Several tensors of one name are added up.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        """Adds a tensor. `sent_as`: as for contents_of."""
        contents = contents_of(tensor, sent_as)
        if name in self._sums:
            contents = contents + self._sums[name].to(contents.device)
        self._sums[name] = contents

    def read(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each name."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        # One copy from the device for all.
        sums = torch.stack([contents.to(device) for contents in self._sums.values()])
        contents_by_name = zip(self._sums, sums.cpu().tolist(), strict=True)
        return {name: f"{number % _MODULUS:016x}" for name, number in contents_by_name}


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
