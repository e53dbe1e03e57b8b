"""The trainer ranks of a service: datums are dealt to them, each has a part of every tensor, and they refuse together.

    call      d0 d1 d2 d3 d4 d5         rank 0: d0 d1 d2   rank 1: d3 d4 d5
    tensor    rows of rank 0 | rows of rank 1              joined: the whole, as files have it

Every method that is marked as collective is called on all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from pa_npu.service.wire import Refused

T = TypeVar("T")


class Ranks:
    """This rank among those of the default process group, and its part of the tensors that are
    trained: flat ones, of which the ranks' parts follow each other.
    """

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        """parts: this rank's part of each tensor, by name. Collective."""
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._names = list(parts)
        self._sizes = self.all_of([part.numel() for part in parts.values()], list[int])
        """By rank: elements of its part of each tensor."""

    def all_of(self, value: T, kind: type[T]) -> list[T]:
        """Returns every rank's value, in rank order. Collective.

        kind: of the value. Values travel as msgpack, which can only be read as values.
        """
        if self.num_ranks == 1:
            return [value]
        data = bytearray(msgspec.msgpack.encode(value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        of_ranks = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(of_ranks, padded)
        return [
            msgspec.msgpack.decode(gathered[: int(size)].numpy().tobytes(), type=kind)
            for gathered, size in zip(of_ranks, sizes, strict=True)
        ]

    def agree(self, refusal: str | None) -> None:
        """Raises Refused on all ranks if any has a reason to refuse. Collective."""
        for reason in self.all_of(refusal, str | None):  # type: ignore[arg-type]  # a union is a kind
            if reason is not None:
                raise Refused(reason)

    def size(self, name: str) -> int:
        """Returns the number of elements of a whole tensor."""
        number = self._names.index(name)
        return sum(sizes[number] for sizes in self._sizes)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a whole tensor, as a view. whole: [n], flat."""
        number = self._names.index(name)
        start = sum(sizes[number] for sizes in self._sizes[: self.rank])
        return whole[start : start + self._sizes[self.rank][number]]

    def joined(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns whole tensors, flat, from every rank's parts of all of them. Collective."""
        if self.num_ranks == 1:
            return dict(parts)
        mine = torch.cat([parts[name] for name in self._names])
        longest = max(map(sum, self._sizes))
        padded = mine.new_zeros(longest)
        padded[: len(mine)] = mine
        of_ranks = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(of_ranks, padded)
        split = [
            flat[: sum(sizes)].split(sizes)
            for flat, sizes in zip(of_ranks, self._sizes, strict=True)
        ]
        return {
            name: torch.cat([tensors[number] for tensors in split])
            for number, name in enumerate(self._names)
        }

    def share(self, lengths: Iterable[int]) -> list[int]:
        """Returns which of the things of these lengths are this rank's: neighbours, and of all
        ranks about equally much.
        """
        lengths = list(lengths)
        total = sum(lengths)
        mine = []
        begun = 0
        for number, length in enumerate(lengths):
            middle = begun + length / 2
            if int(self.num_ranks * middle / total) == self.rank:
                mine.append(number)
            begun += length
        return mine
