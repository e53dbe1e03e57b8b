"""Invariant I7 at the log-probs: their gradient is the formula's, and is passed on unchanged.

Every token of every microbatch is compared with a second calculation (algorithm/loss_gradient.py)
when the update is over, so that no device waits for the host in between. Advantages come from the
groups' rewards, weights and denominators from the configuration.
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
from pa_npu.algorithm.model_outputs import PolicyState
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.config.schema import Config
from pa_npu.trainer.invariants import GradientSum

_UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-9}
# A gradient that is left out, doubled or turned around is off by 1 or more. In bf16 the rounding of
# a sharp policy's logits, which equal responses share, moves the factor by itself; in fp32 nothing
# does.
_MAX_SLOPE_ERRORS = {"fp32": 0.02, "bf16": 0.5}
_DEVIATIONS = 8.0
_MARGIN = 8.0  # of a token's value over its rounding, in units of the largest error above
# Two passes over the same weights, one of them with a gradient, as a mean over tokens in nats.
_SAME_WEIGHTS = {"fp32": 1e-3, "bf16": 0.05}


class LossGradient:
    """Checks one update's gradient on one rank. policy: the weights that were trained; None if they
    have no version yet.
    """

    def __init__(
        self, update: GradientSum, config: Config, algorithm: Algorithm, policy: PolicyState | None
    ) -> None:
        self._update = update
        self._config = config
        self._algorithm = algorithm
        self._policy = policy

    def check(
        self,
        losses: Sequence[GivenLoss],
        advantages: Mapping[int, Sequence[np.ndarray]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Raises InvariantViolation if the gradient of the losses is not the formula's.

        losses: what the objective was given; empty on ranks that compute no loss.
        advantages: by dispatch index of the groups whose credit is known, those of each sample's
        trained tokens.
        group: ranks over which gradients are partial; None if they are not. Collective over it.
        """
        if not losses:
            return
        arrived = arrived_gradients(losses)
        batch, sources, lengths = batch_with_credit(losses, advantages)
        self._compare(sources, lengths, arrived, all_gradients(self._algorithm, batch))
        self._compare_choices([loss.choices for loss in losses if loss.choices is not None])
        self._check_same(float((batch.logprobs - batch.old_logprobs).abs().sum()), len(arrived))
        self._check_head(losses, arrived, (batch.logprobs + batch.entropy).double().numpy(), group)

    def _compare(
        self,
        sources: Sequence[tuple[int, int]],
        lengths: np.ndarray,
        arrived: np.ndarray,
        expected: ExpectedGradient,
    ) -> None:
        difference = np.abs(arrived - expected.values)
        wrong = expected.is_sure & ~(difference <= expected.limit)
        if not wrong.any():
            return
        error = np.where(wrong, difference / np.maximum(expected.limit, 1e-300), 0.0)
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

    def _compare_choices(self, samples: Sequence[GivenChoices]) -> None:
        """Compares the gradients of a teacher's most likely tokens, in a sample of the targets."""
        if not samples:
            return
        arrived = np.concatenate([arrived_at(choices) for choices in samples])
        expected = expected_choice_gradient(self._algorithm, samples)
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
        """Checks that ratios are 1 in an iteration's first update, when the old policy is the
        policy. apart: summed difference of the log-probs of both, over `tokens` tokens.
        """
        is_first = self._policy is not None and self._policy.updates == 0
        if not is_first or not tokens:
            return
        if self._algorithm.ratio == "sampling" or self._config.schedule.max_staleness:
            return
        if not apart / tokens <= _SAME_WEIGHTS[self._config.model.dtype]:
            raise self._update.broken(
                f"the old policy's log-probs differ from the policy's by {apart / tokens:.3g} in "
                "the mean, although both are the weights of version "
                f"{self._policy.version if self._policy else 0}"
            )

    def _check_head(
        self,
        losses: Sequence[GivenLoss],
        arrived: np.ndarray,
        surprise: np.ndarray,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Checks the gradient behind the log-probs, at the LM head. surprise: log p + H of every
        token.
        """
        all_products: list[torch.Tensor] = []
        all_sizes: list[torch.Tensor] = []
        rows: list[np.ndarray] = []
        start = 0
        is_partial = False
        for microbatch in losses:
            head, logprobs = microbatch.head, microbatch.batch.logprobs
            if head is not None and head.is_watched:
                is_partial = is_partial or head.is_partial
                targets = np.arange(len(logprobs))
                if head.own is not None:
                    targets = head.own.cpu().numpy()
                loss_rows = start + targets[:: head.every]
                rows.append(loss_rows)
                if head.products is None or head.sizes is None:  # no gradient went on
                    nothing = torch.zeros(len(loss_rows), device=logprobs.device)
                    all_products.append(nothing)
                    all_sizes.append(nothing)
                else:
                    all_products.append(head.products)
                    all_sizes.append(head.sizes)
            start += len(logprobs)
        if not rows:
            return
        all_sums = torch.cat([*all_products, *all_sizes])
        if group is not None and is_partial:
            dist.all_reduce(all_sums, group=group)
        products, sizes = all_sums.cpu().double().numpy().reshape(2, -1)
        expected = (arrived * surprise)[np.concatenate(rows)]
        dtype = self._config.model.dtype
        slope = slope_of(
            products, expected, sizes, _MARGIN * _UNITS[dtype] / _MAX_SLOPE_ERRORS[dtype]
        )
        if slope is None:
            return
        if abs(slope.value - 1.0) > max(_MAX_SLOPE_ERRORS[dtype], _DEVIATIONS * slope.error):
            raise self._update.broken(
                f"the gradient that went on behind the log-probs is {slope.value:.4g} times the "
                f"one that came to them, over {len(products)} tokens"
            )


def arrived_gradients(losses: Sequence[GivenLoss]) -> Values:
    """Returns fp64 [N]: the gradient that came back to each token's log-prob; 0 if none came."""
    gradients = []
    for loss in losses:
        gradient = loss.gradient
        gradients.append(torch.zeros_like(loss.batch.logprobs) if gradient is None else gradient)
    return torch.cat(gradients).cpu().double().numpy()


def batch_with_credit(
    losses: Sequence[GivenLoss], advantages: Mapping[int, Sequence[np.ndarray]]
) -> tuple[TokenBatch, list[tuple[int, int]], np.ndarray]:
    """Returns all tokens of the losses on the host, with the advantages that their groups' credit
    gives; (group, response) of each response; and int64 [responses], the responses' lengths.

    advantages: as in LossGradient.check.
    """
    batch = on_host(joined([loss.batch for loss in losses]))
    sources: list[tuple[int, int]] = []
    lengths: list[int] = []
    for loss in losses:
        sources += loss.sources
        lengths += loss.lengths
    lengths_array = np.array(lengths)
    return with_advantages(batch, sources, lengths_array, advantages), sources, lengths_array


def arrived_at(choices: GivenChoices) -> Values:
    """Returns the gradient that came to the policy's log-probs of the choices, fp64 [M, k + 1]."""
    if choices.gradient is None:
        return np.zeros(tuple(choices.choices.policy.shape))
    gradient: Values = choices.gradient.cpu().double().numpy()
    return gradient


def expected_choice_gradient(
    algorithm: Algorithm, samples: Sequence[GivenChoices]
) -> ExpectedGradient:
    """Returns the same as the algorithm's formula makes it."""
    policy = torch.cat([sample.choices.policy for sample in samples]).cpu().double()
    teacher = torch.cat([sample.choices.teacher for sample in samples]).cpu().double()
    weights = torch.cat([sample.weights for sample in samples]).cpu().double()
    return algorithm.expected_choice_gradient(Choices(policy, teacher), weights)


def with_advantages(
    batch: TokenBatch,
    sources: Sequence[tuple[int, int]],
    lengths: np.ndarray,
    advantages: Mapping[int, Sequence[np.ndarray]],
) -> TokenBatch:
    """Returns the batch with the advantages that the groups' credit gives, if it is known."""
    if not any(group in advantages for group, _ in sources):
        return batch
    values: list[np.ndarray] = []
    for (group, number), length in zip(sources, lengths.tolist(), strict=True):
        if group in advantages:
            values.append(advantages[group][number])
        else:
            values.append(np.full(length, np.nan, np.float32))  # keeps the batch's own
    token_advantages = torch.from_numpy(np.concatenate(values))
    return replace(
        batch, advantages=torch.where(token_advantages.isnan(), batch.advantages, token_advantages)
    )
