"""In which order an iteration's prompts go to the engines: named orders by the length that is expected of them.

A group holds its room on an engine until its longest response ends, so orders go by that length.

  longest-first   Engines end early: Graham 1969 (SIAM J. Appl. Math. 17), no list of jobs on m equal machines ends later than
                  4/3 - 1/(3m) of the best one when the jobs come by falling length. Trainers begin late.
  shortest-first  Trainers begin early and the longest groups are the last: where trainers are the slower side.
  in-order        As the prompts come: where trainers take groups by their index (schedule.order=prompt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

OrderName = Literal["longest-first", "shortest-first", "in-order"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)


def dispatch_order(name: OrderName, expected: Sequence[float], shares: int = 1) -> list[int]:
    """A permutation of the indices of `expected` (lengths in tokens), within each of `shares` equal parts of the sequence.

    Groups that share an optimizer step should not be those of one length, so each step's share is ordered by itself. Equal
    lengths keep their order.
    """
    order = _ORDERS[name]
    size = len(expected) // shares
    return [
        start + index
        for start in range(0, size * shares, size)
        for index in order(list(expected[start : start + size]))
    ]


def _longest_first(expected: list[float]) -> list[int]:
    return sorted(range(len(expected)), key=lambda index: -expected[index])


def _shortest_first(expected: list[float]) -> list[int]:
    return sorted(range(len(expected)), key=expected.__getitem__)


def _in_order(expected: list[float]) -> list[int]:
    return list(range(len(expected)))


_ORDERS: dict[str, Callable[[list[float]], list[int]]] = {
    "longest-first": _longest_first,
    "shortest-first": _shortest_first,
    "in-order": _in_order,
}
