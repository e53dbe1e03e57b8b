"""Advantages, aggregation and losses against formulas written out by hand, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pa_npu.algorithm.advantages import STD_EPSILON, batch_advantages, group_advantages
from pa_npu.algorithm.aggregation import normaliser, token_weights
from pa_npu.algorithm.losses import TokenBatch, k3, loss_sums
from pa_npu.config.schema import AlgorithmConfig

CPU = torch.device("cpu")


def test_group_advantages_are_the_papers_formula() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0], np.float32)
    mean = 0.6
    std = math.sqrt((3 * 0.4**2 + 2 * 0.6**2) / 4)
    expected = [(r - mean) / (std + STD_EPSILON) for r in rewards]
    np.testing.assert_allclose(group_advantages(rewards, "group-std"), expected, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "none"), rewards - mean, rtol=1e-6)


def test_equal_rewards_give_zero_advantages() -> None:
    assert (group_advantages(np.full(4, 0.1, np.float32), "group-std") == 0).all()


def test_batch_advantages_divide_by_the_deviation_of_all_centred_rewards() -> None:
    groups = [np.array([1.0, 0.0], np.float32), np.array([3.0, 0.0], np.float32)]
    std = math.sqrt((0.25 + 0.25 + 2.25 + 2.25) / 3)
    first, second = batch_advantages(groups)
    np.testing.assert_allclose(first, np.array([0.5, -0.5]) / (std + STD_EPSILON), rtol=1e-6)
    np.testing.assert_allclose(second, np.array([1.5, -1.5]) / (std + STD_EPSILON), rtol=1e-6)


def test_non_finite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([1.0, np.nan], np.float32), "group-std")


def make_batch(lengths: list[int], seed: int = 0, reference: bool = True, ratio_spread: float = 0.5) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    logprobs = (-draw().abs()).requires_grad_()
    return TokenBatch(
        logprobs=logprobs,
        entropy=draw().abs(),
        old_logprobs=logprobs.detach() + ratio_spread * draw(),
        reference_logprobs=logprobs.detach() + draw() if reference else None,
        engine_logprobs=logprobs.detach() + 0.1 * draw(),
        advantages=draw(),
        weights=torch.ones(sum(lengths), dtype=torch.float64),
        response_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
    )


def test_grpo_loss_and_gradient_equal_the_formula_token_by_token() -> None:
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.05, entropy_coef=0.01)
    batch = make_batch([3, 5, 2])
    sums = loss_sums(batch, config)
    sums.loss.backward()

    total, clipped = 0.0, 0
    gradient = []
    for logp, old, ref, advantage, entropy in zip(
        batch.logprobs.tolist(),
        batch.old_logprobs.tolist(),
        batch.reference_logprobs.tolist(),
        batch.advantages.tolist(),
        batch.entropy.tolist(),
        strict=True,
    ):
        ratio = math.exp(logp - old)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        is_clipped = surrogate != ratio * advantage
        kl = math.exp(ref - logp) - 1 - (ref - logp)
        total += -surrogate + 0.05 * kl - 0.01 * entropy
        gradient.append((0.0 if is_clipped else -ratio * advantage) + 0.05 * (1 - math.exp(ref - logp)))
        clipped += is_clipped
    assert 0 < clipped < 10, "the case must contain clipped and unclipped tokens to show anything"
    assert sums.loss.item() == pytest.approx(total, rel=1e-12)
    assert sums.metrics["clipped"].item() == clipped
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_on_policy_gradient_is_advantage_times_score() -> None:
    batch = make_batch([4, 4], ratio_spread=0.0, reference=False)
    loss_sums(batch, AlgorithmConfig()).loss.backward()
    torch.testing.assert_close(batch.logprobs.grad, -batch.advantages)


def test_k3_is_nonnegative_and_estimates_kl() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    assert (k3(p, q) >= 0).all()
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "dr-grpo"])
def test_loss_does_not_depend_on_the_cut_into_microbatches(aggregation: str) -> None:
    """I3: the weighted sum over N is the same for one microbatch, for two, and for the direct formula."""
    lengths = [3, 1, 6, 2]
    losses = [torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in lengths]
    direct = {
        "token-mean": sum(x.sum() for x in losses) / sum(lengths),
        "sequence-mean": sum(x.mean() for x in losses) / len(lengths),
        "dr-grpo": sum(x.sum() for x in losses) / (len(lengths) * 8),
    }[aggregation]
    n = normaliser(aggregation, sum(lengths), len(lengths), 8)
    for cut in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
        total = sum(
            (torch.cat(losses[a:b]) * token_weights(lengths[a:b], aggregation, CPU)).sum() for a, b in zip(cut, cut[1:], strict=False)
        )
        assert (total / n).item() == pytest.approx(direct.item(), rel=1e-6)
