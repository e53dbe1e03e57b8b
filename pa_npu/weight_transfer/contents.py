"""The contents of weights as numbers that do not depend on their layout, so that memory can be compared with what was sent.

An engine fuses, stacks, transposes, pads and packs the tensors that it is given. None of this
changes which values there are. So a tensor's contents are the sum, modulo 2^64, over its elements
of a mixed number of the element's bits, widened to fp32:

    contents(x) = sum over elements of mix(bits of fp32(element))          mix(0) = 0

It is the same in every order and with zeros added. The contents of tensors that were put together
are the sum of theirs. It is another number, except with a chance of 2^-64 for unrelated values,
where one value is old, scaled or lost. What it does not see, values that changed places, is far
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
# Elements that are mixed at once: as int64 they take 8 MiB, which a CPU's and a device's caches
# hold.
_CHUNK = 2**20


@torch.no_grad()
def contents_of(tensor: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
    """Returns the contents of a tensor, int64 [] on its device.

    Floating-point elements of fewer than 32 bits are widened, so that a tensor and its exact copy
    in a wider type have the same contents. Whole numbers are taken as they are. sent_as: the type
    that elements are rounded to first.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        chunk = chunk if sent_as is None else chunk.to(sent_as)
        bits = chunk.float().view(torch.int32) if chunk.is_floating_point() else chunk
        mixed = bits.to(torch.int64)
        mixed.mul_(_FIRST)
        mixed.bitwise_xor_(mixed >> 32)
        mixed.mul_(_SECOND)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return total


class Contents:
    """Contents by name; the device is asked for the numbers only by `read`.

    Several tensors of one name are added up.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        """sent_as: as of contents_of."""
        contents = contents_of(tensor, sent_as)
        if name in self._sums:
            contents = contents + self._sums[name].to(contents.device)
        self._sums[name] = contents

    def read(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each name."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        # one copy from the device for all
        numbers = (
            torch.stack([contents.to(device) for contents in self._sums.values()]).cpu().tolist()
        )
        return {
            name: f"{number % _MODULUS:016x}"
            for name, number in zip(self._sums, numbers, strict=True)
        }


def summed(contents: Iterable[str]) -> str:
    """Returns the contents of tensors put together."""
    return f"{sum(int(digits, 16) for digits in contents) % _MODULUS:016x}"


def added(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Returns the contents by name of tensors that several ranks have parts of. parts: of each
    rank.
    """
    by_name: dict[str, list[str]] = {}
    for of_rank in parts:
        for name, contents in of_rank.items():
            by_name.setdefault(name, []).append(contents)
    return {name: summed(contents) for name, contents in by_name.items()}


def follows(memory: str, given: Sequence[str], workers: int) -> bool:
    """Whether the memory of `workers` tensor-parallel workers together holds the tensors that were
    given.

    Each worker has a part of a tensor, or all of it. Where there are fewer heads of keys and values
    than workers, several workers have the same ones, while the queries that they are fused with are
    divided. So every tensor counts once, or up to `workers` times, and the first of several once
    beside that.

    Args:
        memory: contents of the workers' memory, summed.
        given: contents of each tensor that was put into it, in order.
        workers: of the engine.
    """
    for copies in range(1, workers + 1):
        if memory == summed([*given] * copies):
            return True
        if memory == summed([*given[:1], *[*given[1:]] * copies]):
            return True
    return False
