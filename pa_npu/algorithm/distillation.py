"""On-policy distillation: the policy writes responses, a teacher's log-probs of their tokens say what to change.

    d_t = clip(log p_teacher(t) - log p_policy(t), -c, c)      no gradient; c: algorithm.distill_clip
    A_t = R_t + coef (d_t + g d_{t+1} + g^2 d_{t+2} + ...)     R_t: the reward's advantage
                                                               g: algorithm.distill_discount

The expectation of -d over the policy's tokens is KL(policy || teacher), so that A is the advantage
of a policy gradient that lowers it: MiniLLM, arXiv 2306.08543, eq. 2. With g = 0 each token answers
for its own distribution, with g = 1 for the rest of its response. The sum runs over the trained
tokens of a response. A teacher with the policy's own weights gives d = 0 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pa_npu.algorithm.algorithm import NeededModel
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.config.rules.learning import of_preset

if TYPE_CHECKING:
    import torch

    from pa_npu.algorithm.loss_gradient import ExpectedGradient, Values
    from pa_npu.algorithm.loss_sums import LossSums
    from pa_npu.algorithm.policy_losses import TokenBatch

TEACHER_KL = "teacher_kl"
# As a share of the terms of a sum over later tokens: fp32 against fp64.
_ROUNDING_OF_SUMS = 1e-5


def teacher_name(name: str) -> str:
    """Returns the name of a teacher among the models, which is its key."""
    return f"teacher.{name}"


class Distillation(PolicyGradient):
    """A policy gradient whose advantages are a teacher's, alone or beside those of a reward."""

    @property
    def models(self) -> tuple[NeededModel, ...]:
        teachers = [
            NeededModel(teacher_name(name), "a directory", directory=teacher.model)
            for name, teacher in self.config.teacher.items()
        ]
        return (*super().models, *teachers)

    # The loss

    def loss_sums(self, batch: TokenBatch) -> LossSums:
        advantages = batch.advantages + self._teacher_advantages(batch)
        sums = super().loss_sums(replace(batch, advantages=advantages))
        kl = (batch.logprobs.detach() - self._teacher_logprobs(batch)).sum()
        return replace(sums, metrics=sums.metrics | {TEACHER_KL: kl})

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*super().metric_names, TEACHER_KL)

    def expected_gradient(self, batch: TokenBatch) -> ExpectedGradient:
        import torch

        added, terms = self._expected_advantages(batch)
        advantages = batch.advantages.double() + torch.from_numpy(added)
        expected = super().expected_gradient(replace(batch, advantages=advantages))
        ratio = np.exp((batch.logprobs - batch.old_logprobs).double().numpy())
        weights = batch.weights.double().numpy()
        rounding = _ROUNDING_OF_SUMS * np.abs(weights) * np.maximum(ratio, 1.0) * terms
        return replace(expected, limit=expected.limit + rounding)

    def _teacher_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        (name,) = self.config.teacher
        return batch.columns[teacher_name(name)]

    def _teacher_advantages(self, batch: TokenBatch) -> torch.Tensor:
        """Returns what the teacher adds to the advantages, [tokens], without gradient."""
        keys = self.keys
        log_ratios = self._teacher_logprobs(batch) - batch.logprobs.detach()
        if keys.distill_clip is not None:
            log_ratios = log_ratios.clamp(-keys.distill_clip, keys.distill_clip)
        return keys.distill_coef * discounted_sums(
            log_ratios, batch.response_index, keys.distill_discount
        )

    def _expected_advantages(self, batch: TokenBatch) -> tuple[Values, Values]:
        """Returns the same by a second calculation in fp64, token by token from the end, and the
        size of its terms.
        """
        keys = self.keys
        log_ratios = (self._teacher_logprobs(batch).double() - batch.logprobs.double()).numpy()
        if keys.distill_clip is not None:
            log_ratios = np.clip(log_ratios, -keys.distill_clip, keys.distill_clip)
        response = batch.response_index.numpy()
        added, terms = np.zeros_like(log_ratios), np.zeros_like(log_ratios)
        later, later_terms, last = 0.0, 0.0, -1
        for token in range(len(log_ratios) - 1, -1, -1):
            if response[token] != last:
                later, later_terms, last = 0.0, 0.0, response[token]
            later = log_ratios[token] + keys.distill_discount * later
            later_terms = abs(log_ratios[token]) + keys.distill_discount * later_terms
            added[token], terms[token] = later, later_terms
        return keys.distill_coef * added, keys.distill_coef * terms

    # Its keys

    def broken_rules(self) -> Iterator[str]:
        yield from super().broken_rules()
        config, keys = self.config, self.keys
        coef = f"algorithm.distill_coef: {keys.distill_coef:g}{of_preset(config, 'distill_coef')}"
        if not config.teacher:
            yield f"{coef} needs a teacher; set teacher.NAME.model to its directory"
        if len(config.teacher) > 1:
            names = ", ".join(config.teacher)
            yield f"teacher: {names}, but a run learns from one teacher; leave one of them"
        if config.algorithm.router_replay != "none" and config.teacher:
            yield (
                f"algorithm.router_replay: {keys.router_replay} beside {coef}: a teacher's experts "
                "are not the policy's; set it to none"
            )


def discounted_sums(
    values: torch.Tensor, response_index: torch.Tensor, discount: float
) -> torch.Tensor:
    """Returns of each token the sum of its value and the later ones of its response, each times
    `discount` to the power of its distance: [tokens].

    In log2(tokens of the longest response) steps: a sum over n tokens and the sum over the n
    behind them make one over 2 n.

    Args:
        values: [tokens], ordered by response.
        response_index: int64 [tokens], consecutive for each response.
        discount: from 0 to 1.
    """
    if not discount or not len(values):
        return values
    longest = int(response_index.bincount().max())
    sums, reach, factor = values, 1, discount
    while reach < longest:
        behind = sums[reach:] * (response_index[reach:] == response_index[:-reach])
        sums = sums.clone()
        sums[:-reach] += factor * behind
        reach, factor = 2 * reach, factor * factor
    return sums
