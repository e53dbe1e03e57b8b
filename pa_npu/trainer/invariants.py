"""Invariants I2 and I7 on a trainer rank: each response is trained once; the gradient is their sum.

I2, after an iteration. When the last group is in the buffer, the coordinator announces which groups
the iteration consists of, which replicas have them, and how many tokens each response has. The
backend counts which responses went through forward and backward. Every rank checks its replica's
share, and that the shares make a whole; together the ranks check everything, without a collective.

I7, in every update:

    responses         responses whose gradient came back = responses given to the objective; each
                      factor is 1
    over replicas     for every bucket, sum of the replicas' gradients = gradient after its reduction
    division          gradient before the division = normaliser x gradient after it
    normaliser        the update's normalisers = those of the tokens and responses that the
                      coordinator dispatched
    advantages        those of the rewards that a group carries: where it is read, and in the loss
    ratios            against the policy that algorithm.ratio names: the log-probs carry the name of
                      the weights that computed them (algorithm/objective.py)

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
# Elements of a reduction are rounded once for each replica, at random, by half of 2^-23 at most.
# The limit is so many standard deviations of that.
_REDUCTION_DEVIATIONS = 32.0


class GradientSum:
    """Checks the gradient of one update on one rank. where: which update, for messages."""

    def __init__(self, where: str) -> None:
        self._where = where

    def check_passed(
        self, entered: Sequence[TrainedResponse], trained: Sequence[TrainedResponse]
    ) -> None:
        """Raises InvariantViolation if a response's gradient did not come back as often as the
        response was given to the objective.
        """
        if entered == trained:
            return
        times_entered = Counter(entered)
        times_trained = Counter(trained)
        for response in [*entered, *trained]:
            if times_entered[response] != times_trained[response]:
                raise self.broken(
                    f"response {response.number} of group {response.group} ({response.tokens} "
                    f"tokens) was given to the objective {times_entered[response]} times and its gradient "
                    f"passed backward {times_trained[response]} times"
                )

    def check_zero(self, size: float) -> None:
        """Raises InvariantViolation unless the gradient's size before the first backward is 0."""
        if size != 0:
            raise self.broken(
                f"a gradient of {size:.6g} was there before the first backward, left by the update "
                "before"
            )

    def check_factor(self, error: float) -> None:
        """Raises InvariantViolation unless a loss got the gradient 1. error: its distance from 1."""
        if not error <= 0:
            raise self.broken(f"a loss got a gradient that differs from 1 by {error:.3g}")

    def check_reduced(
        self, gradient: ReducedGradient | None, replicas: int, reductions: Reductions
    ) -> None:
        """Raises InvariantViolation if a bucket's reduction left anything but the replicas' sum.

        gradient: sizes of the buckets before and after their reduction; None if the backend reduced
        nothing. Collective over replicas; a backend that sums gradients over other ranks too counts
        these in `gradient`. replicas: the ranks that bring a part of one gradient; those of a
        context group count each.
        """
        if gradient is None:
            if replicas == 1:
                return
            raise self.broken(f"{replicas} replicas have summed no gradients")
        parts = torch.stack([gradient.sums, gradient.squares, gradient.reduced])
        unit = torch.finfo(parts.dtype).eps
        # the sums themselves are rounded, unless they are fp64
        rounded = 64 * unit * gradient.sums.abs()
        brought, squares, reduced, rounding = reductions.gradients(
            torch.cat([parts, rounded[None]])
        ).cpu()
        limit = _REDUCTION_DEVIATIONS * replicas * 2.0**-24 * squares.sqrt() + rounding
        wrong = ~((brought - reduced).abs() <= limit)
        if wrong.any():
            bucket = int(wrong.nonzero()[0])
            raise self.broken(
                f"the {replicas} replicas brought {brought[bucket]:.6g} to gradient bucket {bucket} of "
                f"{len(brought)}, of which its reduction left {reduced[bucket]:.6g}; "
                f"{int(wrong.sum())} buckets are wrong"
            )

    def check_divided(self, before: float, after: float, normaliser: float) -> None:
        """Raises InvariantViolation unless the gradient was divided by the normaliser. before,
        after: its size around the division.
        """
        if not abs(after * normaliser - before) <= _DIVISION_ROUNDING * before:
            divisor = before / after if after else float("inf")
            raise self.broken(
                f"a gradient of {before:.6g} was divided by {divisor:.6g} instead of by the "
                f"normaliser, {normaliser:.6g}"
            )

    def check_advantages(
        self,
        responses: Sequence[TrainedResponse],
        advantages: Sequence[float],
        expected: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """Raises InvariantViolation if the loss used other advantages than the groups' credit.

        advantages: summed over each response's tokens. expected: by group whose credit is known,
        those of each sample's trained tokens.
        """
        for response, value in zip(responses, advantages, strict=True):
            if response.group not in expected:
                continue
            credit = float(expected[response.group][response.number].sum(dtype=np.float64))
            if not abs(value - credit) <= _SUM_ROUNDING * abs(credit):
                raise self.broken(
                    f"response {response.number} of group {response.group} has the advantage "
                    f"{value / response.tokens:.6g} in the loss, where its group's rewards give "
                    f"{credit / response.tokens:.6g}"
                )

    def check_unmoved(self, policy: str, old: str) -> None:
        """Raises InvariantViolation unless the old policy has the policy's weights. Called if no
        log-prob of the two differs. policy, old: digests of their weights.
        """
        if policy != old:
            raise self.broken(
                "all ratios to the old policy are 1 although its weights are not the policy's; "
                "give the log-probs of the old one"
            )

    def check_apart(self, policy: str, reference: str, original: str) -> None:
        """Raises InvariantViolation unless the reference has the weights that it was made with, and
        these are the policy's. Called if no log-prob of the two differs although the policy is
        another version.

        policy, reference: digests of their weights. original: digest of the reference when it was
        made.
        """
        if reference != original:
            raise self.broken(
                "the reference's weights have changed since it was made, and its KL to the policy "
                "is exactly 0"
            )
        if policy != reference:
            raise self.broken(
                "the KL to the reference is exactly 0 although its weights are not the policy's; "
                "give the reference's log-probs"
            )

    def broken(self, reason: str) -> InvariantViolation:
        """Returns the error of this update."""
        return InvariantViolation(f"I7 gradient: {self._where}: {reason}")


def check_normalisers(
    dispatched: Dispatched, normalisers: Sequence[float], algorithm: Algorithm
) -> None:
    """Raises InvariantViolation if the updates were divided by other normalisers than those of the
    dispatched tokens and responses.
    """
    lengths: list[int] = []
    for group in dispatched.groups:
        lengths += group.leading
    counts = Counts(sum(lengths), sum(length > 0 for length in lengths))
    problem = algorithm.broken_normalisers(normalisers, counts, len(dispatched.groups))
    if problem is not None:
        divisors = ", ".join(f"{normaliser:g}" for normaliser in normalisers)
        raise InvariantViolation(
            f"I7 gradient: iteration {dispatched.iteration}: its updates were divided by "
            f"{divisors}, {problem}"
        )


def check_dispatched(
    dispatched: Dispatched,
    iteration: int,
    replicas: int,
    groups_per_replica: int,
    *,
    unequal: bool = False,
) -> None:
    """Raises InvariantViolation if the iteration is incomplete: a group came twice or from nowhere,
    or a replica has too few groups.

    unequal: replicas may have different numbers of groups, and several may have a part each of one
    group. All groups must still be there.
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


def check_contents(dispatched: Dispatched, replica: int, contents: Mapping[int, str]) -> None:
    """Raises InvariantViolation if this replica read another group than the coordinator put.

    contents: digests of the groups that were read, by dispatch index; empty if only a notice was.
    """
    for group in dispatched.groups:
        content = contents.get(group.index, "")
        if group.replica != replica or not group.content or not content:
            continue
        if content != group.content:
            raise InvariantViolation(
                f"I2 exactly once: iteration {dispatched.iteration}, replica {replica}: group "
                f"{group.index} was read with other tokens, log-probs or rewards than the "
                f"coordinator put into the buffer (digest {content}, not {group.content}); it was "
                "changed on its way"
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
    counted: list[TrainedResponse] = []
    for notice in by_rule:
        counted += _responses(notice)
    groups_by_rule = []
    computed_groups = []
    for group in dispatched.groups:
        if group.replica != replica:
            continue
        if group.by_rule:
            groups_by_rule.append(group)
        else:
            computed_groups.append(group)
    _check_responses(dispatched, replica, counted, groups_by_rule, " by rule")
    _check_responses(dispatched, replica, trained, computed_groups)


def _responses(group: DispatchedGroup | Notice) -> list[TrainedResponse]:
    return [
        TrainedResponse(group.index, number, tokens)
        for number, tokens in enumerate(group.response_tokens, start=group.first)
    ]


def _check_responses(
    dispatched: Dispatched,
    replica: int,
    trained: Sequence[TrainedResponse],
    groups: Sequence[DispatchedGroup],
    manner: str = "",
) -> None:
    """Raises InvariantViolation unless `trained` is each response of `groups` once.

    manner: how they are trained, for messages.
    """
    expected: Counter[TrainedResponse] = Counter()
    for group in groups:
        expected.update(_responses(group))
    trained_counts = Counter(trained)
    if trained_counts == expected:
        return
    owner = {}
    for group in dispatched.groups:
        for response in _responses(group):
            owner[response.group, response.number] = group.replica
    excess = [
        _described(response, owner, replica) for response in (trained_counts - expected).elements()
    ]
    missing = [
        f"response {response.number} of group {response.group} ({response.tokens} tokens)"
        for response in (expected - trained_counts).elements()
    ]
    problems = []
    if excess:
        problems.append(f"trained too much{manner}: {_some(excess)}")
    if missing:
        problems.append(f"left out{manner}: {_some(missing)}")
    raise InvariantViolation(
        f"I2 exactly once: iteration {dispatched.iteration}, replica {replica}: "
        f"{'; '.join(problems)}; dispatched were {expected.total()} responses with "
        f"{_tokens(expected)} tokens, trained {trained_counts.total()} with {_tokens(trained_counts)}"
    )


def _described(response: TrainedResponse, owner: dict[tuple[int, int], int], replica: int) -> str:
    owning_replica = owner.get((response.group, response.number))
    whose = ""
    if owning_replica is None:
        whose = ", of no replica"
    elif owning_replica != replica:
        whose = f", of replica {owning_replica}"
    return f"response {response.number} of group {response.group} ({response.tokens} tokens{whose})"


def _some(items: list[str]) -> str:
    """Lists the first items, and the number of the others."""
    listed = ", ".join(items[:_NAMED])
    if len(items) > _NAMED:
        listed += f" and {len(items) - _NAMED} more"
    return listed


def _tokens(responses: Counter[TrainedResponse]) -> int:
    return sum(response.tokens * count for response, count in responses.items())
