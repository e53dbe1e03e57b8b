"""Invariant I2 after an iteration: what this replica trained is what the coordinator dispatched to it, response by response.

The coordinator says when the last group is in the buffer which groups the iteration consists of, whose they are, and how many
tokens each response has. The backend says which responses went through forward and backward. Every rank compares its replica's own
share, and that the shares make a whole; together the ranks compare everything, without a collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.errors import InvariantViolation

_NAMED = 4


def check_dispatched(
    dispatched: Dispatched, iteration: int, replicas: int, groups_per_replica: int, *, unequal: bool = False
) -> None:
    """Raises InvariantViolation where the iteration is no whole: a group twice, one from nowhere, a replica with too few.

    unequal: replicas may have any numbers, which are those of all groups together, and several a part each of one.
    """
    where = f"I2 exactly once: iteration {iteration}"
    if dispatched.iteration != iteration:
        raise InvariantViolation(f"{where}: the coordinator speaks of iteration {dispatched.iteration}")
    places: dict[int, list[DispatchedGroup]] = {}
    for group in dispatched.groups:
        places.setdefault(group.index, []).append(group)
    for index, parts in sorted(places.items()):
        parts.sort(key=lambda part: part.first)
        ends = [0, *(part.first + len(part.response_tokens) for part in parts)]
        owners = [part.replica for part in parts]
        if len(parts) > 1 and (not unequal or [part.first for part in parts] != ends[:-1]):
            raise InvariantViolation(f"{where}: group {index} was dispatched {len(parts)} times, to replicas {owners}")
        if parts[0].first:
            raise InvariantViolation(
                f"{where}: responses before number {parts[0].first} of group {index} were not dispatched"
            )
        if not 0 <= index < replicas * groups_per_replica:
            raise InvariantViolation(
                f"{where}: group {index} was dispatched, but groups go from 0 to {replicas * groups_per_replica - 1}"
            )
    counts = Counter(group.replica for group in dispatched.groups)
    if unequal and len(places) == replicas * groups_per_replica:
        return
    if counts != {replica: groups_per_replica for replica in range(replicas)}:
        raise InvariantViolation(
            f"{where}: the replicas got {dict(sorted(counts.items()))} groups instead of {groups_per_replica} each"
        )


def check_trained(dispatched: Dispatched, replica: int, trained: Sequence[TrainedResponse]) -> None:
    """Raises InvariantViolation unless `trained` is each response of this replica's groups once, with all its tokens."""
    expected = Counter(
        TrainedResponse(group.index, number, tokens)
        for group in dispatched.groups
        if group.replica == replica
        for number, tokens in enumerate(group.response_tokens, start=group.first)
    )
    found = Counter(trained)
    if found == expected:
        return
    owner = {
        (group.index, group.first + number): group.replica
        for group in dispatched.groups
        for number in range(len(group.response_tokens))
    }
    excess = [_described(response, owner, replica) for response in (found - expected).elements()]
    missing = [f"response {r.number} of group {r.group} ({r.tokens} tokens)" for r in (expected - found).elements()]
    parts = [
        f"{what} {_some(items)}" for what, items in (("trained too much:", excess), ("left out:", missing)) if items
    ]
    raise InvariantViolation(
        f"I2 exactly once: iteration {dispatched.iteration}, replica {replica}: {'; '.join(parts)}; dispatched were "
        f"{expected.total()} responses with {_tokens(expected)} tokens, trained {found.total()} with {_tokens(found)}"
    )


def _described(response: TrainedResponse, owner: dict[tuple[int, int], int], replica: int) -> str:
    other = owner.get((response.group, response.number))
    whose = "" if other == replica else ", of no replica" if other is None else f", of replica {other}"
    return f"response {response.number} of group {response.group} ({response.tokens} tokens{whose})"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_NAMED]) + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")


def _tokens(responses: Counter[TrainedResponse]) -> int:
    return sum(response.tokens * count for response, count in responses.items())
