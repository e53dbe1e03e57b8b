"""Invariant I7: the step's gradient is the sum it claims, of what was dispatched, each response once with its factor.

    what went in      responses whose gradient came back = responses given to the objective; each factor is 1
    over replicas     for every bucket, what replicas brought = what was left after its reduction
    divided           gradient before the division = normaliser x gradient after it
    by what           the update's normalisers = those of the tokens and responses that the coordinator dispatched
    advantages        those of the rewards that a group carries: where it is read, and in the loss
    ratios            against the policy that algorithm.ratio names: the log-probs carry whose they are (algorithm/objective.py)

Every check is on numbers that training has anyway, or on a sample of the gradient: a few small kernels per bucket and update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.algorithm.policy_losses import normaliser
from pa_npu.algorithm.update_sums import ReducedGradient, Reductions
from pa_npu.config.schema import Config
from pa_npu.control.messages import Dispatched
from pa_npu.errors import InvariantViolation

# fp32 sums in another order, as shares of the gradient's norm and of a response's advantages. A part that is missing, or is there
# twice, is as large as the norm.
_SUM_ROUNDING = 1e-3


class GradientSum:
    """Checks the gradient of one update on one rank. where: which update, for messages."""

    def __init__(self, where: str) -> None:
        self._where = where

    def check_passed(self, entered: Sequence[TrainedResponse], trained: Sequence[TrainedResponse]) -> None:
        """Raises InvariantViolation where a response's gradient came back another number of times than it went in."""
        once, found = Counter(entered), Counter(trained)
        for response in [*entered, *trained]:
            if once[response] != found[response]:
                raise self._broken(
                    f"response {response.number} of group {response.group} ({response.tokens} tokens) was given to the objective "
                    f"{once[response]} times and its gradient passed backward {found[response]} times"
                )

    def check_factor(self, error: float) -> None:
        """error: by how much the gradient that a loss got was not 1."""
        if not error <= 0:
            raise self._broken(f"a loss got a gradient that differs from 1 by {error:.3g}")

    def check_reduced(self, gradient: ReducedGradient | None, replicas: int, reductions: Reductions) -> None:
        """Collective over replicas; a backend may sum gradients over other ranks too, and tells of it then."""
        if gradient is None:
            if replicas == 1:
                return
            raise self._broken(f"{replicas} replicas have summed no gradients")
        parts = torch.stack([gradient.own, gradient.squares, gradient.reduced])
        own, squares, reduced = reductions.gradients(parts).cpu()
        wrong = ~((own - reduced).abs() <= _SUM_ROUNDING * squares.sqrt())
        if wrong.any():
            bucket = int(wrong.nonzero()[0])
            raise self._broken(
                f"the {replicas} replicas brought {own[bucket]:.6g} to gradient bucket {bucket} of {len(own)}, of which its "
                f"reduction left {reduced[bucket]:.6g}; {int(wrong.sum())} buckets are wrong"
            )

    def check_divided(self, before: float, after: float, normaliser: float) -> None:
        """before, after: the gradient's size around its division."""
        if not abs(after * normaliser - before) <= _SUM_ROUNDING * before:
            divisor = before / after if after else float("inf")
            raise self._broken(
                f"a gradient of {before:.6g} was divided by {divisor:.6g} instead of by the normaliser, {normaliser:.6g}"
            )

    def check_advantages(
        self, responses: Sequence[TrainedResponse], found: Sequence[float], expected: Mapping[int, Sequence[float]]
    ) -> None:
        """found: the sum over each response's tokens. expected: of each group known by its rewards, each sample's."""
        for response, value in zip(responses, found, strict=True):
            if response.group not in expected:
                continue
            wanted = float(expected[response.group][response.number]) * response.tokens
            if not abs(value - wanted) <= _SUM_ROUNDING * abs(wanted):
                raise self._broken(
                    f"response {response.number} of group {response.group} has the advantage {value / response.tokens:.6g} in the "
                    f"loss, where its group's rewards give {wanted / response.tokens:.6g}"
                )

    def check_moved(self, moved: bool, policy: str, old: str) -> None:
        """moved: whether any log-prob of the policy differs from the old policy's. policy, old: digests of their weights."""
        if not moved and policy != old:
            raise self._broken(
                "all ratios to the old policy are 1 although its weights are not the policy's; give the log-probs of the old one"
            )

    def _broken(self, what: str) -> InvariantViolation:
        return InvariantViolation(f"I7 gradient: {self._where}: {what}")


def check_normalisers(dispatched: Dispatched, normalisers: Sequence[float], config: Config) -> None:
    """Raises InvariantViolation where the updates were divided by something else than what was dispatched makes."""
    algorithm = config.algorithm
    tokens = sum(sum(group.response_tokens) for group in dispatched.groups)
    responses = sum(len(group.response_tokens) for group in dispatched.groups)
    what = f"I7 gradient: iteration {dispatched.iteration}: its updates were divided by {', '.join(f'{n:g}' for n in normalisers)}"
    if algorithm.loss == "dpo":
        if not all(n >= 1 and n.is_integer() for n in normalisers) or sum(normalisers) > len(dispatched.groups):
            raise InvariantViolation(
                f"{what}, which are no numbers of pairs of {len(dispatched.groups)} dispatched groups"
            )
        return
    expected = normaliser(algorithm.aggregation, tokens, responses, config.rollout.max_response_tokens)
    if sum(normalisers) != expected:
        raise InvariantViolation(
            f"{what}, which should add up to {expected:g}: dispatched were {responses} responses with {tokens} tokens, and "
            f"algorithm.aggregation = {algorithm.aggregation}"
        )
