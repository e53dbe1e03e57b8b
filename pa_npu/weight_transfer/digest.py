"""Digests of weights, exact on every device; each end computes them per bucket, and compares (I5).

A bucket's bytes are read as whole numbers b of 0 to 255, in rows of 256, in blocks of 1 MiB; a
short end counts as zeros.

    row    r_c = sum over j of w_jc * b_j    eight columns c of fixed numbers w of 1 to 255, as one
                                             fp32 matrix product
    block  s_i = sum over rows and columns of v_i * r_c
                                             two sums i, fixed numbers v of less than 2^24, int64
    bucket BLAKE2b, 8 bytes, over its blocks' sums, on the host

Every term of a row's sum is a whole number and the sum is at most 256 * 255 * 255 < 2^24, so that
fp32 is exact in any order of addition. w and b also fit into bf16, TF32 and HF32, in which devices
may multiply. A block's sums stay below 2^63. Hence no tolerance is needed, and nothing depends on
the device.

A change that does not know w and v is missed with a probability of 255^-8 per row that changes (all
rows must be missed), 2^-48 per block and 2^-64 per bucket: less than 1e-14 together. A digest costs
about nine bytes of memory traffic per byte of weights (the bytes, and their fp32 copy once written
and once read) and 10 MiB of memory. A core of a CPU does about 1 GB/s.

Imports torch only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

_ROW_BYTES = 256
_BLOCK_BYTES = 2**20
_COLUMNS = 8
_SUMS = 2
_SEPARATOR = " "


class Digests:
    """One digest per tensor, in the order of adding; only `read` fetches values from the device."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> None:
        """Adds a contiguous tensor of any dtype; its device may overwrite it afterwards."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        sums = [_block_sums(block) for block in data.split(_BLOCK_BYTES)]
        self._sums.append(torch.stack(sums))

    def read(self) -> str:
        """Returns the digests so far, 16 hexadecimal digits each, separated by spaces."""
        if not self._sums:
            return ""
        # One copy from the device for all.
        values = torch.cat(self._sums).cpu().split([len(sums) for sums in self._sums])
        return _SEPARATOR.join(_hashed(sums) for sums in values)


class KeptDigests:
    """Digests of all buckets of a stage, of which some are sent once.

    once: for each bucket, whether it is.
    """

    def __init__(self, once: Sequence[bool]) -> None:
        self._once = once
        self._kept: list[str] = []

    def whole(self, sent: str) -> str:
        """Returns the digests of all buckets, those that were not sent as they were sent before.

        sent: of all buckets, or of those that are sent each time.
        """
        digests = sent.split()
        if len(digests) == len(self._once):
            self._kept = digests
            return sent
        later = iter(digests)
        return _SEPARATOR.join(
            kept if is_once else next(later, "missing")
            for kept, is_once in zip(self._kept, self._once, strict=False)
        )


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Returns one digest of all tensors, in this order."""
    digests = Digests()
    for tensor in tensors:
        digests.add(tensor)
    return hashlib.blake2b(digests.read().encode(), digest_size=8).hexdigest()


def first_difference(first: str, second: str) -> int | None:
    """Returns the index of the first tensor whose digest differs, or that only one side has.

    Returns None if all are equal.
    """
    if first == second:
        return None
    left = first.split()
    right = second.split()
    for index, (digest, other_digest) in enumerate(zip(left, right, strict=False)):
        if digest != other_digest:
            return index
    return min(len(left), len(right))


def _block_sums(block: torch.Tensor) -> torch.Tensor:
    """Returns the sums of a block of bytes, int64 [2]."""
    if missing := -block.numel() % _ROW_BYTES:
        block = torch.nn.functional.pad(block, (0, missing))
    columns, rows = _numbers(block.device)
    products = block.view(-1, _ROW_BYTES).to(torch.float32) @ columns
    return (products.to(torch.int64) * rows[:, : len(products)]).sum((1, 2))


@cache
def _numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns w as fp32 [256, 8] and v as int64 [2, rows of a block, 8]."""
    numbers = _mixed()
    w = [1 + next(numbers) % 255 for _ in range(_ROW_BYTES * _COLUMNS)]
    v = [next(numbers) % 2**24 for _ in range(_SUMS * _BLOCK_BYTES // _ROW_BYTES * _COLUMNS)]
    columns = torch.tensor(w, dtype=torch.float32, device=device).view(_ROW_BYTES, _COLUMNS)
    return columns, torch.tensor(v, dtype=torch.int64, device=device).view(_SUMS, -1, _COLUMNS)


def _mixed() -> Iterator[int]:
    """Yields numbers of 40 bits, the same in every version of every library.

    They are the upper bits of a linear congruential generator with multiplier and increment of
    Knuth (MMIX).
    """
    state = 0x70615F6E7075
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 24


def _hashed(sums: torch.Tensor) -> str:
    return hashlib.blake2b(sums.numpy().astype("<i8").tobytes(), digest_size=8).hexdigest()
