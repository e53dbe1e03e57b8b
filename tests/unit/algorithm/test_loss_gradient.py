"""The second calculation of the gradient at the log-probs is that of autograd through the loss, for every algorithm and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.loss_gradient import (
    GivenLoss,
    HeadGradient,
    WatchedHeads,
    on_host,
    slope_of,
)
from pa_npu.algorithm.normaliser import token_weights
from pa_npu.algorithm.policy_losses import PolicyTerms, TokenBatch
from pa_npu.backends.logprob import score_rows
from pa_npu.config.sections.learning import AlgorithmConfig
from tests.helpers.algorithms import algorithm_of

SIZE = 4
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"loss": "clip"},
    "clip, dual and delta": {"loss": "clip", "dual_clip": 1.5, "delta": 1.4},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "gspo by tokens": {"loss": "gspo", "aggregation": "token-mean"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.1},
    "reinforce": {"loss": "reinforce"},
    "dpo": {"loss": "dpo", "kl_coef": 0.3},
    "of a user": {"loss": "tests.unit.algorithm.test_loss_gradient:soft_clip"},
}
TERMS: dict[str, dict[str, Any]] = {
    "alone": {},
    "k1": {"kl_coef": 0.2, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.2, "kl_estimator": "k3"},
    "KL in the reward": {
        "kl_coef": 0.2,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "advantage": "centred",
    },
    "KL in the reward, leave one out": {
        "kl_coef": 0.2,
        "kl_in": "reward",
        "advantage": "leave-one-out",
    },
    "importance of tokens": {"importance_sampling": "token", "importance_cap": 1.1},
    "importance of responses": {
        "importance_sampling": "sequence",
        "importance_cap": 1.2,
        "importance_floor": 0.8,
    },
    "ages": {"age_exponent": 0.7},
}


def soft_clip(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    weight = torch.sigmoid(4.0 * (ratio - 1.0)) * 2.0
    return PolicyTerms(-weight * batch.advantages, torch.zeros_like(ratio, dtype=torch.bool))


def batch_of(config: AlgorithmConfig, seed: int, groups: int = 3) -> TokenBatch:
    random = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in random.integers(1, 40, SIZE * groups))
    index = np.repeat(np.arange(len(lengths)), lengths)
    tokens = len(index)

    def near(values: np.ndarray, by: float) -> torch.Tensor:
        return torch.from_numpy((values + by * random.standard_normal(tokens)).astype(np.float32))

    logprobs = -random.exponential(1.0, tokens)
    advantages = torch.from_numpy(random.standard_normal(len(lengths)).astype(np.float32))
    advantages[:SIZE] = 0  # a group of equal rewards
    return TokenBatch(
        logprobs=near(logprobs, 0.0).requires_grad_(),
        entropy=torch.ones(tokens),
        old_logprobs=near(logprobs, 0.2),
        reference_logprobs=near(logprobs, 0.3),
        engine_logprobs=near(logprobs, 0.2),
        advantages=advantages[torch.from_numpy(index)],
        weights=token_weights(lengths, config.aggregation, torch.device("cpu")),
        response_index=torch.from_numpy(index),
        num_responses=len(lengths),
        group_size=SIZE,
        ages=torch.from_numpy(random.integers(0, 3, tokens).astype(np.float32))
        if config.age_exponent
        else None,
    )


def by_autograd(batch: TokenBatch, config: AlgorithmConfig) -> np.ndarray:
    loss = algorithm_of(config).loss_sums(batch).loss
    (gradient,) = torch.autograd.grad(loss, batch.logprobs, allow_unused=True)
    return np.zeros(len(batch.logprobs)) if gradient is None else gradient.double().numpy()


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_the_gradient_of_autograd(loss: str, terms: str, aggregation: str) -> None:
    config = AlgorithmConfig(**{"aggregation": aggregation, **TERMS[terms], **LOSSES[loss]})
    looked_at = 0
    for seed in range(5):
        batch = batch_of(config, seed)
        expected, found = (
            algorithm_of(config).expected_gradient(on_host(batch)),
            by_autograd(batch, config),
        )
        wrong = expected.is_sure & ~(np.abs(found - expected.values) <= expected.limit)
        assert not wrong.any(), (found[wrong], expected.values[wrong])
        assert expected.is_sure.mean() > 0.8
        if not expected.values.any():
            continue  # all importance weights are below the floor
        looked_at += 1
        turned = replace(batch, advantages=-batch.advantages)
        wrong = expected.is_sure & ~(
            np.abs(by_autograd(turned, config) - expected.values) <= expected.limit
        )
        assert wrong.any(), "advantages turned round are seen"
    assert looked_at >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
def test_the_gradient_behind_the_log_probs_is_told_from_one_that_is_doubled_turned_or_left_out(
    dtype: torch.dtype, sharpness: float
) -> None:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(600, 64, generator=random).to(dtype).requires_grad_()
    weight = (sharpness * torch.randn(500, 64, generator=random) / 8).to(dtype)
    targets = torch.randint(0, 500, (600,), generator=random)
    arrived = torch.randn(600, generator=random)
    unit, largest = (2.0**-24, 0.02) if dtype == torch.float32 else (2.0**-9, 0.5)
    for factor in (1.0, 0.0, -1.0, 2.0):
        head = HeadGradient()
        states = hidden * 1.0
        head.offer(states)
        head.watch()
        logprobs, entropy, *_ = score_rows(states, weight, targets, vocab_size=500, temperature=0.7)
        logprobs.backward(factor * arrived)
        assert head.products is not None and head.sizes is not None
        expected = (arrived * (logprobs + entropy)).detach().double().numpy()[:: head.every]
        slope = slope_of(
            head.products.double().numpy(),
            expected,
            head.sizes.double().numpy(),
            8 * unit / largest,
        )
        assert slope is not None and abs(slope.value - factor) < largest / 4


@pytest.mark.parametrize("first", [0, 5, 60])
@pytest.mark.parametrize("num_microbatches", [1, 7, 16, 17, 96, 1000])
def test_heads_are_watched_at_equal_distances_however_many_microbatches_come(
    num_microbatches: int, first: int
) -> None:
    losses, _ = given_to_heads(WatchedHeads(first), num_microbatches)
    kept = [number for number, loss in enumerate(losses) if loss.head is not None]
    assert all(losses[number].head.is_watched for number in kept)  # type: ignore[union-attr]
    assert min(8, num_microbatches) <= len(kept) < 16
    assert len(set(np.diff(kept).tolist())) <= 1
    if num_microbatches < 16:
        assert len(kept) == num_microbatches


@pytest.mark.parametrize("first", [0, 5, 60])
@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("expected", [16, 31, 32, 96, 1000])
def test_heads_are_chosen_ahead_where_an_updates_number_of_microbatches_is_known(
    expected: int, share: float, first: int
) -> None:
    num_microbatches = int(share * expected)
    losses, heads = given_to_heads(WatchedHeads(first, expected), num_microbatches)
    kept = [number for number, loss in enumerate(losses) if loss.head is not None]
    assert min(8, expected) * min(share, 1.0) <= len(kept) < 16
    assert len(set(np.diff(kept).tolist())) <= 1
    if share <= 1.0:
        num_watched = sum(head.is_watched for head in heads)
        assert num_watched <= 16, "each costs as much as all else that is kept of a microbatch"


def given_to_heads(
    watched: WatchedHeads, num_microbatches: int
) -> tuple[list[GivenLoss], list[HeadGradient]]:
    """Returns the losses, and their heads, whether or not these are still watched."""
    batch = batch_of(AlgorithmConfig(), 0)
    losses = []
    heads = []
    for number in range(num_microbatches):
        head = HeadGradient()
        head.offer(torch.ones(3, 2, requires_grad=True) * 1.0)
        loss = GivenLoss(
            batch, ((number, 0),), (3,), head, denominators=batch.logprobs, advantages=batch.weights
        )
        watched.add(loss)
        losses.append(loss)
        heads.append(head)
    return losses, heads
