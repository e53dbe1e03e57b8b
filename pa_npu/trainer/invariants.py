"""Invariants I2 and I7 on a trainer rank: what was dispatched is trained once, and the step's gradient is the sum it claims.

I2, after an iteration. The coordinator says when the last group is in the buffer which groups the
iteration consists of, whose they are, and how many tokens each response has. The backend says which
responses went through forward and backward. Every rank compares its replica's own share, and that
the shares make a whole; together the ranks compare everything, without a collective.

I7, in every update:

    what went in      responses whose gradient came back = responses given to the objective; each
                      factor is 1
    over replicas     for every bucket, what replicas brought = what was left after its reduction
    divided           gradient before the division = normaliser x gradient after it
    by what           the update's normalisers = those of the tokens and responses that the
                      coordinator dispatched
    advantages        those of the rewards that a group carries: where it is read, and in the loss
    ratios            against the policy that algorithm.ratio names: the log-probs carry whose they
                      are (algorithm/objective.py)

Every check is on numbers that training has anyway, or on a sample of the gradient: a few small
kernels per bucket and update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.normaliser import Counts
from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.algorithm.update_sums import ReducedGradient, Reductions
from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.errors import InvariantViolation
from pa_npu.samples.notice import Notice

_NAMED = 4
# fp32 sums in another order, as a share of a response's advantages.
_SUM_ROUNDING = 1e-3
# fp32 products of the same numbers, as a share of their norm.
_DIVISION_ROUNDING = 1e-5
# Elements of a reduction are rounded once for each replica, by half of 2^-23 at most and at random:
# so
# many deviations of that.
_REDUCTION_DEVIATIONS = 32.0


class GradientSum:
    """Checks the gradient of one update on one rank. where: which update, for messages."""

    def __init__(self, where: str) -> None:
        self._where = where

    def check_passed(
        self, entered: Sequence[TrainedResponse], trained: Sequence[TrainedResponse]
    ) -> None:
        """Raises InvariantViolation where a response's gradient came back another number of times
        than it went in.
        """
        once, found = Counter(entered), Counter(trained)
        for response in [*entered, *trained]:
            if once[response] != found[response]:
                raise self.broken(
                    f"response {response.number} of group {response.group} ({response.tokens} "
                    f"tokens) was given to the objective {once[response]} times and its gradient "
                    f"passed backward {found[response]} times"
                )

    def check_zero(self, size: float) -> None:
        """size: of the gradient before the update's first backward."""
        if size != 0:
            raise self.broken(
                f"a gradient of {size:.6g} was there before the first backward, left by the update "
                "before"
            )

    def check_factor(self, error: float) -> None:
        """error: by how much the gradient that a loss got was not 1."""
        if not error <= 0:
            raise self.broken(f"a loss got a gradient that differs from 1 by {error:.3g}")

    def check_reduced(
        self, gradient: ReducedGradient | None, replicas: int, reductions: Reductions
    ) -> None:
        """Collective over replicas; a backend may sum gradients over other ranks too, and tells of
        it then.
        """
        if gradient is None:
            if replicas == 1:
                return
            raise self.broken(f"{replicas} replicas have summed no gradients")
        parts = torch.stack([gradient.own, gradient.squares, gradient.reduced])
        unit = torch.finfo(parts.dtype).eps
        # the sums themselves are rounded where they are no fp64
        rounded = 64 * unit * gradient.own.abs()
        own, squares, reduced, rounding = reductions.gradients(
            torch.cat([parts, rounded[None]])
        ).cpu()
        limit = _REDUCTION_DEVIATIONS * replicas * 2.0**-24 * squares.sqrt() + rounding
        wrong = ~((own - reduced).abs() <= limit)
        if wrong.any():
            bucket = int(wrong.nonzero()[0])
            raise self.broken(
                f"the {replicas} replicas brought {own[bucket]:.6g} to gradient bucket {bucket} of "
                f"{len(own)}, of which its reduction left {reduced[bucket]:.6g}; "
                f"{int(wrong.sum())} buckets are wrong"
            )

    def check_divided(self, before: float, after: float, normaliser: float) -> None:
        """before, after: the gradient's size around its division."""
        if not abs(after * normaliser - before) <= _DIVISION_ROUNDING * before:
            divisor = before / after if after else float("inf")
            raise self.broken(
                f"a gradient of {before:.6g} was divided by {divisor:.6g} instead of by the "
                f"normaliser, {normaliser:.6g}"
            )

    def check_advantages(
        self,
        responses: Sequence[TrainedResponse],
        found: Sequence[float],
        expected: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """found: the sum over each response's tokens. expected: of each group whose credit is
        known, those of each sample's trained tokens."""
        for response, value in zip(responses, found, strict=True):
            if response.group not in expected:
                continue
            wanted = float(expected[response.group][response.number].sum(dtype=np.float64))
            if not abs(value - wanted) <= _SUM_ROUNDING * abs(wanted):
                raise self.broken(
                    f"response {response.number} of group {response.group} has the advantage "
                    f"{value / response.tokens:.6g} in the loss, where its group's rewards give "
                    f"{wanted / response.tokens:.6g}"
                )

    def check_unmoved(self, policy: str, old: str) -> None:
        """Called where no log-prob of the policy differs from the old policy's. policy, old:
        digests of their weights.
        """
        if policy != old:
            raise self.broken(
                "all ratios to the old policy are 1 although its weights are not the policy's; "
                "give the log-probs of the old one"
            )

    def check_apart(self, policy: str, reference: str, known: str) -> None:
        """Called where no log-prob of the reference differs from the policy's, which is another
        version.

        policy, reference: digests of their weights. known: the reference's when it was made.
        """
        if reference != known:
            raise self.broken(
                "the reference's weights have changed since it was made, and its KL to the policy "
                "is exactly 0"
            )
        if policy != reference:
            raise self.broken(
                "the KL to the reference is exactly 0 although its weights are not the policy's; "
                "give the reference's log-probs"
            )

    def broken(self, what: str) -> InvariantViolation:
        return InvariantViolation(f"I7 gradient: {self._where}: {what}")


def check_normalisers(
    dispatched: Dispatched, normalisers: Sequence[float], algorithm: Algorithm
) -> None:
    """Raises InvariantViolation where the updates were divided by something else than what was
    dispatched makes.
    """
    lengths = [length for group in dispatched.groups for length in group.leading]
    tokens, responses = sum(lengths), sum(length > 0 for length in lengths)
    wrong = algorithm.broken_normalisers(
        normalisers, Counts(tokens, responses), len(dispatched.groups)
    )
    if wrong is not None:
        divisors = ", ".join(f"{normaliser:g}" for normaliser in normalisers)
        raise InvariantViolation(
            f"I7 gradient: iteration {dispatched.iteration}: its updates were divided by "
            f"{divisors}, {wrong}"
        )


def check_dispatched(
    dispatched: Dispatched,
    iteration: int,
    replicas: int,
    groups_per_replica: int,
    *,
    unequal: bool = False,
) -> None:
    """Raises InvariantViolation where the iteration is no whole: a group twice, one from nowhere, a
    replica with too few.

    unequal: replicas may have any numbers, which are those of all groups together, and several a
    part each of one.
    """
    where = f"I2 exactly once: iteration {iteration}"
    if dispatched.iteration != iteration:
        raise InvariantViolation(
            f"{where}: the coordinator speaks of iteration {dispatched.iteration}"
        )
    places: dict[int, list[DispatchedGroup]] = {}
    for group in dispatched.groups:
        places.setdefault(group.index, []).append(group)
    for index, parts in sorted(places.items()):
        parts.sort(key=lambda part: part.first)
        ends = [0, *(part.first + len(part.response_tokens) for part in parts)]
        owners = [part.replica for part in parts]
        if len(parts) > 1 and (not unequal or [part.first for part in parts] != ends[:-1]):
            raise InvariantViolation(
                f"{where}: group {index} was dispatched {len(parts)} times, to replicas {owners}"
            )
        if parts[0].first:
            raise InvariantViolation(
                f"{where}: responses before number {parts[0].first} of group {index} were not "
                "dispatched"
            )
        if not 0 <= index < replicas * groups_per_replica:
            raise InvariantViolation(
                f"{where}: group {index} was dispatched, but groups go from 0 to "
                f"{replicas * groups_per_replica - 1}"
            )
    counts = Counter(group.replica for group in dispatched.groups)
    if unequal and len(places) == replicas * groups_per_replica:
        return
    if counts != {replica: groups_per_replica for replica in range(replicas)}:
        raise InvariantViolation(
            f"{where}: the replicas got {dict(sorted(counts.items()))} groups instead of "
            f"{groups_per_replica} each"
        )


def check_trained(
    dispatched: Dispatched,
    replica: int,
    trained: Sequence[TrainedResponse],
    by_rule: Sequence[Notice] = (),
) -> None:
    """Raises InvariantViolation unless `trained` and `by_rule` together are each response of this
    replica's groups once, with all its tokens.

    by_rule: the groups that the replica has counted and not computed, which must be those that the
    coordinator dispatched so.
    """
    counted = [
        TrainedResponse(notice.index, number, tokens)
        for notice in by_rule
        for number, tokens in enumerate(notice.response_tokens, start=notice.first)
    ]
    own = [group for group in dispatched.groups if group.replica == replica]
    _check_responses(dispatched, replica, counted, [one for one in own if one.by_rule], " by rule")
    _check_responses(dispatched, replica, trained, [one for one in own if not one.by_rule])


def _check_responses(
    dispatched: Dispatched,
    replica: int,
    trained: Sequence[TrainedResponse],
    groups: Sequence[DispatchedGroup],
    how: str = "",
) -> None:
    """Raises InvariantViolation unless `trained` is each response of `groups` once."""
    expected = Counter(
        TrainedResponse(group.index, number, tokens)
        for group in groups
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
    missing = [
        f"response {r.number} of group {r.group} ({r.tokens} tokens)"
        for r in (expected - found).elements()
    ]
    parts = [
        f"{what} {_some(items)}"
        for what, items in ((f"trained too much{how}:", excess), (f"left out{how}:", missing))
        if items
    ]
    raise InvariantViolation(
        f"I2 exactly once: iteration {dispatched.iteration}, replica {replica}: "
        f"{'; '.join(parts)}; dispatched were {expected.total()} responses with "
        f"{_tokens(expected)} tokens, trained {found.total()} with {_tokens(found)}"
    )


def _described(response: TrainedResponse, owner: dict[tuple[int, int], int], replica: int) -> str:
    other = owner.get((response.group, response.number))
    whose = (
        "" if other == replica else ", of no replica" if other is None else f", of replica {other}"
    )
    return f"response {response.number} of group {response.group} ({response.tokens} tokens{whose})"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_NAMED]) + (
        f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    )


def _tokens(responses: Counter[TrainedResponse]) -> int:
    return sum(response.tokens * count for response, count in responses.items())
