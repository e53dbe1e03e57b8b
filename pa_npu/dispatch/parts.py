"""Division of an iteration's last groups: parts of one group's samples that several replicas train, so that all end together.

A group that is trained whole keeps one replica busy while the others wait for it. Its advantages are made before it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# Halvings of the interval in which the end lies: a thousandth of a group's seconds.
_HALVINGS = 10


def common_end_s(free_s: Sequence[float], work_s: float) -> float:
    """When replicas that are free at these times have all done work that can be divided at will."""
    total, ends = work_s, sorted(free_s)
    for count, at_s in enumerate(ends, start=1):
        total += at_s
        if count == len(ends) or total / count <= ends[count]:
            return total / count
    raise ValueError("free_s: at least one replica must train")


def parts_of(
    size: int, seconds: Callable[[int, int], float], free_s: Mapping[int, float], earliest_s: float
) -> dict[int, tuple[int, int]]:
    """By replica, the samples of a group that it trains: from one number to before another.

    size: samples of the group. seconds: what training samples from one number to before another takes. free_s: when each replica
    is, of equal ones the preferred first. earliest_s: an end before which nothing is gained, since other groups keep replicas busy.
    """
    order = sorted(free_s, key=free_s.__getitem__)

    def ending(end_s: float) -> dict[int, tuple[int, int]] | None:
        parts, first = {}, 0
        for replica in order:
            last = first
            while last < size and free_s[replica] + seconds(first, last + 1) <= end_s:
                last += 1
            if last > first:
                parts[replica], first = (first, last), last
        return parts if first == size else None

    whole = {order[0]: (0, size)}
    low, high = earliest_s, free_s[order[0]] + seconds(0, size)
    best = ending(low)
    for _ in range(_HALVINGS if best is None else 0):
        middle = (low + high) / 2
        found = ending(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best or whole
