"""From whom each engine of a publish gets its weights: the tree of rollout.engine_settings, over the engines that are there.

    planned: 1, 2 and 3 via 0        all are there     trainers ── 0 ─┬─ 1        0 is gone     trainers ── 1 ─┬─ 2
                                                                      ├─ 2                                     └─ 3
                                                                      └─ 3

The first of those behind an engine that is gone takes its place, so that the link on which they are still carries each weight once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pa_npu.engines.protocol import LoadedWeights


@dataclass(frozen=True)
class Route:
    """How one engine of a publish gets its weights.

    sender: the number of the engine that passes them on to it; None: trainers send. place: among the engines that get them from
    there in the same groups, of which there are `count`.
    """

    sender: int | None
    place: int
    count: int


@dataclass(frozen=True)
class MovedBytes:
    """Bytes of weights over the links of a publish, counted by those who receive, once for each engine worker. trainers: what
    came from the trainers; relayed: what engines passed on to each other. None where an engine does not say."""

    trainers: int | None = None
    relayed: int | None = None

    @classmethod
    def of(cls, loaded: Sequence[tuple[Route, LoadedWeights]]) -> MovedBytes:
        """Add up the bytes of all engines that took part."""
        direct = [weights.received_bytes for route, weights in loaded if route.sender is None]
        relayed = [weights.received_bytes for route, weights in loaded if route.sender is not None]
        return cls(_sum(direct), _sum(relayed))


NOT_COUNTED = MovedBytes()


def senders(present: Sequence[int], via: Mapping[int, int]) -> dict[int, int | None]:
    """By the number of each engine that is present: the present engine that passes weights on to it; None: trainers send.

    via: by number, the planned one, without circles.
    """
    behind: dict[int, list[int]] = {}
    for index, before in sorted(via.items()):
        behind.setdefault(before, []).append(index)

    def holder(seat: int) -> int | None:
        """Who is at this place of the planned tree."""
        if seat in present:
            return seat
        found = (holder(index) for index in behind.get(seat, ()))
        return next((index for index in found if index is not None), None)

    def sender(index: int) -> int | None:
        seat = via.get(index)
        while seat is not None and holder(seat) in (None, index):
            seat = via.get(seat)
        return None if seat is None else holder(seat)

    return {index: sender(index) for index in present}


def routes(present: Sequence[int], via: Mapping[int, int], ways: Mapping[int, str]) -> dict[int, Route]:
    """By the number of each engine that is present. ways: of those that trainers send to, whose groups differ by it."""
    by_sender = senders(present, via)
    together: dict[tuple[int | None, str], list[int]] = {}
    for index in present:
        sender = by_sender[index]
        together.setdefault((sender, ways[index] if sender is None else ""), []).append(index)
    return {
        index: Route(sender, place, len(engines))
        for (sender, _), engines in together.items()
        for place, index in enumerate(engines)
    }


def _sum(counts: Sequence[int | None]) -> int | None:
    said = [count for count in counts if count is not None]
    return sum(said) if len(said) == len(counts) else None
