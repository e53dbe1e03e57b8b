"""The gradient of each loss at the log-probs, from its formula in numpy and fp64: what autograd must have made of it (I7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.algorithm.advantages import LINEAR_ADVANTAGES
from pa_npu.algorithm.loss_gradient import ExpectedGradient, Values
from pa_npu.algorithm.policy_losses import TokenBatch, find_policy_loss
from pa_npu.config.sections.learning import AlgorithmConfig

# As shares of a token's terms. Inputs are the same numbers, so that what differs is a few
# operations in fp32, and where ratios are of whole responses sums over them.
_ROUNDING, _ROUNDING_OF_SUMS = 1e-4, 2e-3
# A ratio so near to a bound may be on either side of it.
_NEAR = 1e-4


def expected_policy_gradient(batch: TokenBatch, config: AlgorithmConfig) -> ExpectedGradient:
    """Returns dL/d log p of every token of a batch on the host, L being the sum of a policy
    gradient (loss_sums.py).
    """
    tokens = _Tokens(batch, config, kl_in_reward=config.kl_coef > 0 and config.kl_in == "reward")
    policy, is_sure = _policy_gradient(tokens)
    factor, factor_is_sure = _factors(tokens)
    values = tokens.weights * factor * policy
    size = (
        tokens.weights
        * factor
        * tokens.size_of_advantage
        * np.maximum(np.abs(_ratio_of(policy, tokens)), 1.0)
    )
    if config.kl_coef and config.kl_in == "loss":
        slope, slope_size = _kl_slope(tokens, config.kl_estimator)
        values = values + tokens.weights * config.kl_coef * slope
        size = size + tokens.weights * config.kl_coef * slope_size
    sums = (
        config.loss == "gspo"
        or config.importance_sampling == "sequence"
        or config.kl_in == "reward"
    )
    limit = (_ROUNDING_OF_SUMS if sums else _ROUNDING) * size + 1e-12
    return ExpectedGradient(values, limit, is_sure & factor_is_sure)


def expected_preference_gradient(batch: TokenBatch, config: AlgorithmConfig) -> ExpectedGradient:
    """Returns dL/d log p of every token of a batch on the host, L being the sum over preference
    pairs.
    """
    tokens = _Tokens(batch, config)
    factor, is_sure = _factors(tokens)
    values, size = _preference_gradient(tokens, factor)
    return ExpectedGradient(values, _ROUNDING_OF_SUMS * size + 1e-12, is_sure)


class _Tokens:
    """A batch as fp64, with the advantages that the policy term sees."""

    def __init__(
        self, batch: TokenBatch, config: AlgorithmConfig, *, kl_in_reward: bool = False
    ) -> None:
        self.batch, self.config = batch, config
        self.logprobs, self.old, self.engine = (
            _fp64(values) for values in (batch.logprobs, batch.old_logprobs, batch.engine_logprobs)
        )
        self.reference = (
            None if batch.reference_logprobs is None else _fp64(batch.reference_logprobs)
        )
        self.response = batch.response_index.numpy()
        self.lengths = np.bincount(self.response, minlength=batch.num_responses)
        of_sequences = config.aggregation == "sequence-mean"
        self.weights = (
            1.0 / self.lengths[self.response] if of_sequences else np.ones(len(self.logprobs))
        )
        if (weight := batch.columns.get("weight")) is not None:
            self.weights = self.weights * _fp64(weight)
        self.advantages = _fp64(batch.advantages)
        self.size_of_advantage = np.abs(self.advantages)
        if kl_in_reward:
            extra, size = self._kl_advantages()
            self.advantages = self.advantages + extra
            self.size_of_advantage = self.size_of_advantage + size

    def of_response(self, values: Values) -> Values:
        """[N] -> [responses], summed."""
        sums = np.bincount(self.response, weights=values, minlength=self.batch.num_responses)
        return sums.astype(np.float64)

    def _kl_advantages(self) -> tuple[Values, Values]:
        """[N]: what a KL in the reward adds to advantages, and the size of its terms."""
        assert self.reference is not None, "a KL has a reference"
        difference = self.reference - self.old
        kl = {"k1": -difference, "k2": difference**2 / 2, "k3": np.expm1(difference) - difference}
        size = self.batch.group_size
        rewards = -self.config.kl_coef * self.of_response(kl[self.config.kl_estimator]).reshape(
            -1, size
        )
        centred = rewards - rewards.mean(axis=1, keepdims=True)
        centred = centred * LINEAR_ADVANTAGES[self.config.advantage](size)
        terms = np.abs(rewards).max(axis=1, keepdims=True).repeat(size, axis=1)
        return centred.ravel()[self.response], 2 * terms.ravel()[self.response]


def _policy_gradient(tokens: _Tokens) -> tuple[Values, npt.NDArray[np.bool_]]:
    """d l_t / d log p_t of the policy's term, before weights; what a response's ratio shares is
    summed in there.
    """
    config, advantages = tokens.config, tokens.advantages
    every = np.ones(len(advantages), np.bool_)
    if config.loss == "reinforce":
        return -advantages, every
    if config.loss == "cispo":
        ratio = np.exp(tokens.logprobs - tokens.old)
        return -np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * advantages, every
    if config.loss == "clip":
        ratio = np.exp(tokens.logprobs - tokens.old)
        return _clip_slope(ratio, advantages, config) * ratio, ~_is_near_bound(ratio, config)
    if config.loss == "gspo":
        mean = tokens.of_response(tokens.logprobs - tokens.old) / tokens.lengths
        ratio = np.exp(mean)[tokens.response]
        factor, _ = _factors(tokens)
        slopes = _clip_slope(ratio, advantages, config) * ratio * tokens.weights * factor
        shared = (tokens.of_response(slopes) / tokens.lengths)[tokens.response]
        scale = tokens.weights * factor
        return np.divide(
            shared, scale, out=np.zeros_like(shared), where=scale != 0
        ), ~_is_near_bound(ratio, config)
    return _users_gradient(tokens), every


def _clip_slope(ratio: Values, advantages: Values, config: AlgorithmConfig) -> Values:
    """d loss / d ratio of max(-r A, -clip(r) A), with the bounds of the unclipped side."""
    within = (ratio >= 1.0 - config.clip_low) & (ratio <= 1.0 + config.clip_high)
    reach = np.ones_like(within) if config.delta is None else ratio <= config.delta
    free = -np.minimum(ratio, np.inf if config.delta is None else config.delta) * advantages
    bounded = -np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    slope = np.where(
        free > bounded, reach, np.where(bounded > free, within, 0.5 * (reach + 1.0 * within))
    )
    if config.dual_clip is not None:
        slope = np.where(
            (advantages < 0) & (np.maximum(free, bounded) > -config.dual_clip * advantages),
            0.0,
            slope,
        )
    return -slope * advantages


def _is_near_bound(ratio: Values, config: AlgorithmConfig) -> npt.NDArray[np.bool_]:
    bounds = [1.0 - config.clip_low, 1.0 + config.clip_high]
    bounds += [bound for bound in (config.delta, config.dual_clip) if bound is not None]
    return np.any([np.abs(ratio - bound) <= _NEAR * max(bound, 1.0) for bound in bounds], axis=0)


def _factors(tokens: _Tokens) -> tuple[Values, npt.NDArray[np.bool_]]:
    """Importance and age weights of the policy's term, without gradient, and where they can be
    told.
    """
    config = tokens.config
    factor, is_sure = np.ones(len(tokens.logprobs)), np.ones(len(tokens.logprobs), np.bool_)
    if config.importance_sampling != "none":
        log_ratio = tokens.old - tokens.engine
        if config.importance_sampling == "sequence":
            log_ratio = tokens.of_response(log_ratio)[tokens.response]
        ratio = np.exp(np.minimum(log_ratio, 80.0))
        bounds = [config.importance_cap]
        if config.importance_floor is None:
            factor = np.minimum(ratio, config.importance_cap)
        else:
            bounds.append(config.importance_floor)
            factor = np.where(
                (ratio > config.importance_cap) | (ratio < config.importance_floor), 0.0, ratio
            )
        near = 10 * _NEAR if config.importance_sampling == "sequence" else _NEAR
        is_sure = ~np.any(
            [np.abs(ratio - bound) <= near * max(bound, 1.0) for bound in bounds], axis=0
        )
    if config.age_exponent and tokens.batch.ages is not None:
        factor = factor * (1.0 + _fp64(tokens.batch.ages)) ** -config.age_exponent
    return factor, is_sure


def _kl_slope(tokens: _Tokens, estimator: str) -> tuple[Values, Values]:
    """d KL / d log p of an estimator, and the size of its terms."""
    assert tokens.reference is not None, "a KL has a reference"
    difference = tokens.reference - tokens.logprobs
    if estimator == "k1":
        return np.ones_like(difference), np.ones_like(difference)
    if estimator == "k2":
        return -difference, np.abs(difference) + 1e-3
    ratio = np.exp(difference)
    return 1.0 - ratio, 1.0 + ratio


def _preference_gradient(tokens: _Tokens, factor: Values) -> tuple[Values, Values]:
    """Returns -+ beta sigmoid(-margin) for each group's best and worst response, spread as the loss
    is.
    """
    assert tokens.reference is not None, "a preference has a reference"
    size, beta = tokens.batch.group_size, tokens.config.kl_coef
    starts = np.cumsum(tokens.lengths) - tokens.lengths
    gained = tokens.of_response(tokens.logprobs - tokens.reference)
    weight = tokens.of_response(tokens.weights * factor)
    gradient = np.zeros(tokens.batch.num_responses)
    for first in range(0, tokens.batch.num_responses, size):
        scores = tokens.advantages[starts[first : first + size]]
        best, worst = first + int(scores.argmax()), first + int(scores.argmin())
        if tokens.advantages[starts[best]] <= tokens.advantages[starts[worst]]:
            continue
        margin = beta * (gained[best] - gained[worst])
        spread = (weight[best] + weight[worst]) / (tokens.lengths[best] + tokens.lengths[worst])
        slope = beta * spread / (1.0 + np.exp(margin))
        gradient[best], gradient[worst] = -slope, slope
    of_tokens = gradient[tokens.response]
    return of_tokens, np.abs(of_tokens) * (1.0 + np.abs(tokens.logprobs).max(initial=0.0)) + 1e-9


def _users_gradient(tokens: _Tokens) -> Values:
    """Returns the gradient of a user's own loss: calls the function again, on the host, before
    weights and factors.
    """
    batch = tokens.batch
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    again = replace(
        batch, logprobs=logprobs, advantages=torch.from_numpy(tokens.advantages).float()
    )
    factor, _ = _factors(tokens)
    scale = torch.from_numpy(tokens.weights * factor).float()
    with torch.enable_grad():
        terms = find_policy_loss(tokens.config.loss)(again, tokens.config)
        (gradient,) = torch.autograd.grad((terms.loss * scale).sum(), logprobs)
    wide = _fp64(gradient)
    return np.divide(
        wide, scale.double().numpy(), out=np.zeros_like(wide), where=scale.numpy() != 0
    )


def _ratio_of(policy: Values, tokens: _Tokens) -> Values:
    """Returns the factor by which a term's gradient is larger than its advantage."""
    return np.divide(
        policy, tokens.advantages, out=np.zeros_like(policy), where=tokens.advantages != 0
    )


def _fp64(values: torch.Tensor) -> Values:
    array: Values = values.detach().double().numpy()
    return array
