"""Invariant I7 at the log-probs: their gradient is the formula's, and goes on as it came.

Every token of every microbatch is compared with a second calculation (algorithm/loss_gradient.py)
when the update is over, so that no device waits for the host in between. Advantages are taken from
the groups' rewards, weights and denominators from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.algorithm.algorithm import Algorithm
from pa_npu.algorithm.choices import Choices
from pa_npu.algorithm.component_sums import all_gradients
from pa_npu.algorithm.loss_gradient import (
    ExpectedGradient,
    GivenChoices,
    GivenLoss,
    Values,
    joined,
    on_host,
    slope_of,
)
from pa_npu.algorithm.objective import PolicyState
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.config.schema import Config
from pa_npu.trainer.invariants import GradientSum

_UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-9}
# A gradient that is left out, doubled or turned around is off by 1 or more. In bf16 the rounding of
# a sharp policy's logits, which equal responses share, moves the factor by itself; in fp32 nothing
# does.
_LARGEST_SLOPE_ERRORS = {"fp32": 0.02, "bf16": 0.5}
_DEVIATIONS = 8.0
_MARGIN = 8.0  # of a token's value over its rounding, in units of the largest error above
# Two passes over the same weights, one of them with a gradient, as a mean over tokens in nats.
_SAME_WEIGHTS = {"fp32": 1e-3, "bf16": 0.05}


class LossGradient:
    """Checks one update's on one rank. policy: the weights that were trained; None: nobody knows."""

    def __init__(
        self, update: GradientSum, config: Config, algorithm: Algorithm, policy: PolicyState | None
    ) -> None:
        self._update = update
        self._config = config
        self._algorithm = algorithm
        self._policy = policy

    def check(
        self,
        given: Sequence[GivenLoss],
        advantages: Mapping[int, Sequence[np.ndarray]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Raises InvariantViolation. Empty where no loss is computed. Collective over `group`,
        where gradients are partial in it.

        advantages: of the groups whose credit is known, those of each sample's trained tokens, by
        dispatch index.
        """
        if not given:
            return
        device = given[0].batch.logprobs.device
        batch = on_host(joined([microbatch.batch for microbatch in given]))
        none = [torch.zeros(len(one.batch.logprobs), device=device) for one in given]
        gradients = [
            blank if one.gradient is None else one.gradient
            for one, blank in zip(given, none, strict=True)
        ]
        arrived = torch.cat(gradients).cpu().double().numpy()
        sources = [source for one in given for source in one.sources]
        lengths = np.array([length for one in given for length in one.lengths])
        batch = with_advantages(batch, sources, lengths, advantages)
        self._compare(sources, lengths, arrived, all_gradients(self._algorithm, batch))
        self._compare_choices([one.choices for one in given if one.choices is not None])
        self._check_same(float((batch.logprobs - batch.old_logprobs).abs().sum()), len(arrived))
        self._check_head(given, arrived, (batch.logprobs + batch.entropy).double().numpy(), group)

    def _compare(
        self,
        sources: Sequence[tuple[int, int]],
        lengths: np.ndarray,
        arrived: np.ndarray,
        expected: ExpectedGradient,
    ) -> None:
        wrong = expected.is_sure & ~(np.abs(arrived - expected.values) <= expected.limit)
        if not wrong.any():
            return
        error = np.where(
            wrong, np.abs(arrived - expected.values) / np.maximum(expected.limit, 1e-300), 0.0
        )
        token = int(error.argmax())
        ends = np.cumsum(lengths)
        response = int(np.searchsorted(ends, token, side="right"))
        group, number = sources[response]
        place = token - int(ends[response]) + int(lengths[response])
        raise self._update.broken(
            f"the gradient of the log-prob of token {place} of response {number} of group {group} "
            f"is {arrived[token]:.6g}, where algorithm.loss = {self._config.algorithm.loss}, "
            f"aggregation = {self._config.algorithm.aggregation} and the group's credit make "
            f"{expected.values[token]:.6g}; {int(wrong.sum())} of {len(wrong)} tokens of the "
            "update differ"
        )

    def _compare_choices(self, given: Sequence[GivenChoices]) -> None:
        """Of a teacher's most likely tokens, in a sample of the targets."""
        if not given:
            return
        arrived = np.concatenate([arrived_at(one) for one in given])
        expected = expected_choice_gradient(self._algorithm, given)
        wrong = expected.is_sure & ~(np.abs(arrived - expected.values) <= expected.limit)
        if not wrong.any():
            return
        excess = np.abs(arrived - expected.values) / np.maximum(expected.limit, 1e-300)
        target, choice = np.unravel_index(int(np.where(wrong, excess, 0.0).argmax()), wrong.shape)
        raise self._update.broken(
            f"the gradient of the policy's log-prob of choice {choice} of {wrong.shape[1]} of the "
            f"teacher, of target {target} of those looked at, is {arrived[target, choice]:.6g}, "
            f"where algorithm.distill_divergence = {self._config.algorithm.distill_divergence} "
            f"makes {expected.values[target, choice]:.6g}; {int(wrong.any(axis=1).sum())} of "
            f"{len(wrong)} targets differ"
        )

    def _check_same(self, apart: float, tokens: int) -> None:
        """Before an iteration's first update the old policy is the policy, so that ratios are 1."""
        begins = self._policy is not None and self._policy.updates == 0
        if (
            not begins
            or self._algorithm.ratio == "sampling"
            or self._config.schedule.max_staleness
            or not tokens
        ):
            return
        if not apart / tokens <= _SAME_WEIGHTS[self._config.model.dtype]:
            raise self._update.broken(
                f"the old policy's log-probs differ from the policy's by {apart / tokens:.3g} in "
                "the mean, although both are the weights of version "
                f"{self._policy.version if self._policy else 0}"
            )

    def _check_head(
        self,
        given: Sequence[GivenLoss],
        arrived: np.ndarray,
        surprise: np.ndarray,
        group: dist.ProcessGroup | None,
    ) -> None:
        """surprise: log p + H of every token."""
        sums, rows, start, is_partial = [], [], 0, False
        for microbatch in given:
            head, tokens = microbatch.head, len(microbatch.batch.logprobs)
            if head is not None and head.is_watched:
                is_partial = is_partial or head.is_partial
                own = np.arange(start, start + tokens, head.every)
                rows.append(own)
                if head.products is None or head.sizes is None:  # no gradient went on
                    sums.append(torch.zeros(2, len(own), device=microbatch.batch.logprobs.device))
                else:
                    sums.append(torch.stack([head.products, head.sizes]))
            start += tokens
        if not sums:
            return
        both = torch.cat(sums, dim=1)
        if group is not None and is_partial:
            dist.all_reduce(both, group=group)
        products, sizes = both.cpu().double().numpy()
        expected = (arrived * surprise)[np.concatenate(rows)]
        dtype = self._config.model.dtype
        slope = slope_of(
            products, expected, sizes, _MARGIN * _UNITS[dtype] / _LARGEST_SLOPE_ERRORS[dtype]
        )
        if slope is None:
            return
        if abs(slope.value - 1.0) > max(_LARGEST_SLOPE_ERRORS[dtype], _DEVIATIONS * slope.error):
            raise self._update.broken(
                f"the gradient that went on behind the log-probs is {slope.value:.4g} times the "
                f"one that came to them, over {len(products)} tokens"
            )


def arrived_at(given: GivenChoices) -> Values:
    """Returns the gradient that came to the policy's log-probs of the choices, fp64 [M, k + 1]."""
    if given.gradient is None:
        return np.zeros(tuple(given.choices.policy.shape))
    gradient: Values = given.gradient.cpu().double().numpy()
    return gradient


def expected_choice_gradient(
    algorithm: Algorithm, given: Sequence[GivenChoices]
) -> ExpectedGradient:
    """Returns the same as the algorithm's formula makes it."""
    policy = torch.cat([one.choices.policy for one in given]).cpu().double()
    teacher = torch.cat([one.choices.teacher for one in given]).cpu().double()
    weights = torch.cat([one.weights for one in given]).cpu().double()
    return algorithm.expected_choice_gradient(Choices(policy, teacher), weights)


def with_advantages(
    batch: TokenBatch,
    sources: Sequence[tuple[int, int]],
    lengths: np.ndarray,
    advantages: Mapping[int, Sequence[np.ndarray]],
) -> TokenBatch:
    """The batch with the advantages that the groups' credit gives, where it is known."""
    if not any(group in advantages for group, _ in sources):
        return batch
    values: list[np.ndarray] = []
    for (group, number), length in zip(sources, lengths.tolist(), strict=True):
        is_known = group in advantages
        values.append(
            advantages[group][number] if is_known else np.full(length, np.nan, np.float32)
        )
    of_tokens = torch.from_numpy(np.concatenate(values))
    return replace(batch, advantages=torch.where(of_tokens.isnan(), batch.advantages, of_tokens))
