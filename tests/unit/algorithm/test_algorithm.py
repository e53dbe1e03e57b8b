"""Advantages, aggregation and losses against formulas written out by hand, in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.advantages import DEVIATION_EPSILON, batch_advantages, group_advantages
from pa_npu.algorithm.corrections import (
    age_weights,
    effective_sample_size,
    importance_weights,
    k1,
    k2,
    k3,
)
from pa_npu.algorithm.loss_sums import metric_names
from pa_npu.algorithm.normaliser import Counts, normaliser, token_weights
from pa_npu.algorithm.policy_losses import (
    PolicyTerms,
    TokenBatch,
    cispo,
    clip,
    find_policy_loss,
    gspo,
    reinforce,
)
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.errors import ConfigError
from tests.helpers.algorithms import loss_sums

CPU = torch.device("cpu")


def test_group_advantages_are_the_papers_formula() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0], np.float32)
    mean = 0.6
    std = math.sqrt((3 * 0.4**2 + 2 * 0.6**2) / 4)
    expected = [(r - mean) / (std + DEVIATION_EPSILON) for r in rewards]
    np.testing.assert_allclose(group_advantages(rewards, "group-std"), expected, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "centred"), rewards - mean, rtol=1e-6)
    others = [(3.0 - r) / 4 for r in rewards]
    np.testing.assert_allclose(
        group_advantages(rewards, "leave-one-out"), rewards - others, rtol=1e-6
    )


def test_equal_rewards_give_zero_advantages() -> None:
    assert (group_advantages(np.full(4, 0.1, np.float32), "group-std") == 0).all()
    for kind in ("group-std", "centred", "leave-one-out"):
        assert group_advantages(np.ones(1, np.float32), kind).tolist() == [0.0], (
            "one sample is compared with nobody"
        )


def test_batch_advantages_divide_by_the_deviation_of_all_centred_rewards() -> None:
    groups = [np.array([1.0, 0.0], np.float32), np.array([3.0, 0.0], np.float32)]
    std = math.sqrt((0.25 + 0.25 + 2.25 + 2.25) / 3)
    first, second = batch_advantages(groups)
    np.testing.assert_allclose(first, np.array([0.5, -0.5]) / (std + DEVIATION_EPSILON), rtol=1e-6)
    np.testing.assert_allclose(second, np.array([1.5, -1.5]) / (std + DEVIATION_EPSILON), rtol=1e-6)


def test_batch_advantages_are_bit_identical_whatever_the_order_of_the_groups() -> None:
    groups = list(np.random.default_rng(0).random((40, 5)).astype(np.float32))
    expected = batch_advantages(groups)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(groups))
        for place, advantages in zip(
            order, batch_advantages([groups[i] for i in order]), strict=True
        ):
            assert advantages.tobytes() == expected[place].tobytes()


def test_non_finite_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([1.0, np.nan], np.float32), "group-std")


def make_batch(
    lengths: list[int], seed: int = 0, reference: bool = True, ratio_spread: float = 0.5
) -> TokenBatch:
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
        num_responses=len(lengths),
        group_size=len(lengths),
    )


def test_clip_loss_and_gradient_equal_the_formula_token_by_token() -> None:
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3, kl_coef=0.05, entropy_coef=0.01)
    batch = make_batch([3, 5, 2])
    sums = loss_sums(batch, config, clip)
    sums.loss.backward()
    assert set(sums.metrics) == set(metric_names(config))

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
        gradient.append(
            (0.0 if is_clipped else -ratio * advantage) + 0.05 * (1 - math.exp(ref - logp))
        )
        clipped += is_clipped
    assert 0 < clipped < 10, "the case must contain clipped and unclipped tokens to show anything"
    assert sums.loss.item() == pytest.approx(total, rel=1e-12)
    assert sums.metrics["clipped"].item() == clipped
    torch.testing.assert_close(
        batch.logprobs.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def negative_side(bound: float, **options: Any) -> tuple[int, PolicyTerms, TokenBatch]:
    """Many tokens far from the old policy, under the clip with one of its bounds, and how many it
    must have changed.
    """
    batch = make_batch([40, 40], seed=3, reference=False, ratio_spread=1.5)
    ratios = (batch.logprobs - batch.old_logprobs).exp().tolist()
    advantages = batch.advantages.tolist()
    changed = sum(
        ratio > bound and advantage < 0 for ratio, advantage in zip(ratios, advantages, strict=True)
    )
    assert 5 < changed < 60, (
        "the case must contain tokens on both sides of the bound to show anything"
    )
    return changed, clip(batch, AlgorithmConfig(clip_low=0.2, clip_high=0.3, **options)), batch


def assert_is_formula(
    terms: Any, batch: Any, scalar: Callable[[float, float, float], float]
) -> None:
    """Each token's loss is scalar(log-prob, old log-prob, advantage), and its gradient that of
    finite differences.
    """
    tokens = list(
        zip(
            batch.logprobs.tolist(),
            batch.old_logprobs.tolist(),
            batch.advantages.tolist(),
            strict=True,
        )
    )
    np.testing.assert_allclose(
        terms.loss.tolist(), [scalar(*token) for token in tokens], rtol=1e-12
    )
    terms.loss.sum().backward()
    step = 1e-7
    slopes = [
        (scalar(logp + step, old, a) - scalar(logp - step, old, a)) / (2 * step)
        for logp, old, a in tokens
    ]
    np.testing.assert_allclose(batch.logprobs.grad.tolist(), slopes, rtol=1e-5, atol=1e-6)


def test_dual_clip_is_verls_formula_token_by_token() -> None:
    """verl, compute_policy_loss: min(-A c, max(-r A, -clip(r) A)) where A < 0; its gradient by
    finite differences.
    """

    def scalar(logp: float, old: float, advantage: float) -> float:
        ratio = math.exp(logp - old)
        once = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
        return min(-advantage * 3.0, once) if advantage < 0 else once

    changed, terms, batch = negative_side(3.0, dual_clip=3.0)
    assert_is_formula(terms, batch, scalar)
    plain = clip(batch, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    assert int((plain.loss != terms.loss).sum()) == changed
    assert int(terms.clipped.sum()) == int(plain.clipped.sum()) + changed


def test_delta_is_trls_formula_token_by_token() -> None:
    """TRL, GRPOTrainer: -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)."""

    def scalar(logp: float, old: float, advantage: float) -> float:
        ratio = math.exp(logp - old)
        return -min(min(ratio, 2.0) * advantage, min(max(ratio, 0.8), 1.3) * advantage)

    changed, terms, batch = negative_side(2.0, delta=2.0)
    assert_is_formula(terms, batch, scalar)
    plain = clip(batch, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    assert int(terms.clipped.sum()) == int(plain.clipped.sum()) + changed
    same = clip(batch, AlgorithmConfig(clip_low=0.2, clip_high=0.3, dual_clip=2.0))
    torch.testing.assert_close(terms.loss, same.loss, rtol=1e-12, atol=1e-12)


def test_on_policy_gradient_is_advantage_times_score() -> None:
    batch = make_batch([4, 4], ratio_spread=0.0, reference=False)
    loss_sums(batch, AlgorithmConfig(), clip).loss.backward()
    torch.testing.assert_close(batch.logprobs.grad, -batch.advantages)


def test_kl_estimators_against_the_exact_kl_of_a_categorical() -> None:
    """k1 and k3 are unbiased, k3 is never negative, and k2's expected gradient is the KL's."""
    generator = torch.Generator().manual_seed(1)
    logits, other = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    p = logits.requires_grad_().log_softmax(0)
    q = other.log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    samples = p.detach()
    assert (k3(samples, q) >= 0).all()
    for estimator in (k1, k3):
        assert (samples.exp() * estimator(samples, q)).sum().item() == pytest.approx(
            exact.item(), rel=1e-12
        )
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    expected = {
        estimator: torch.autograd.grad(
            (samples.exp() * estimator(p, q)).sum(), logits, retain_graph=True
        )[0]
        for estimator in (k1, k2, k3)
    }
    torch.testing.assert_close(expected[k2], gradient)
    torch.testing.assert_close(expected[k1], torch.zeros_like(gradient))
    (reverse,) = torch.autograd.grad((q.exp() * (q - p)).sum(), logits)
    torch.testing.assert_close(expected[k3], reverse)
    assert (reverse - gradient).abs().max() > 1e-2, (
        "the two directions of the KL must differ for this to show anything"
    )


def test_gspo_clips_the_geometric_mean_ratio_of_each_response() -> None:
    lengths = [3, 5, 2, 4]
    batch = make_batch(lengths, seed=4, ratio_spread=0.6)
    advantages = batch.per_token(torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64))
    batch = TokenBatch(**{**vars(batch), "advantages": advantages})
    terms = gspo(batch, AlgorithmConfig(clip_low=0.1, clip_high=0.1))
    terms.loss.sum().backward()

    logprobs = batch.logprobs.detach().clone().requires_grad_()
    total, clipped, start = torch.zeros((), dtype=torch.float64), [], 0
    for length in lengths:
        span = slice(start, start + length)
        ratio = ((logprobs[span] - batch.old_logprobs[span]).sum() / length).exp()
        advantage = advantages[start]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
        total = total - length * surrogate
        clipped.append(bool(surrogate != ratio * advantage))
        start += length
    total.backward()
    assert True in clipped and False in clipped, (
        "the case must contain clipped and unclipped responses"
    )
    assert terms.loss.sum().item() == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(batch.logprobs.grad, logprobs.grad)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    batch = make_batch([6, 6], seed=5)
    terms = cispo(batch, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    terms.loss.sum().backward()
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    expected = -ratio.clamp(0.8, 1.3) * batch.advantages
    assert terms.clipped.any() and not terms.clipped.all()
    torch.testing.assert_close(batch.logprobs.grad, expected)
    assert (batch.logprobs.grad[terms.clipped] != 0).all(), (
        "unlike PPO's clip, CISPO drops no token's gradient"
    )


def test_reinforce_and_clip_have_the_same_gradient_on_policy() -> None:
    batch = make_batch([4, 3], ratio_spread=0.0)
    gradients = []
    for loss in (reinforce, clip, cispo):
        (gradient,) = torch.autograd.grad(loss(batch, AlgorithmConfig()).loss.sum(), batch.logprobs)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


@pytest.mark.parametrize("floor", [None, 0.0, 0.6])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_tis_mis_and_icepop_by_their_formulas(
    level: str, floor: float | None
) -> None:
    """Token by token in plain Python: TIS min(w, C); MIS w 1[w <= C]; IcePop w 1[floor <= w <= C]."""
    batch = make_batch([4, 3, 5, 2], seed=6)
    batch = replace(batch, engine_logprobs=batch.engine_logprobs * 1.1)
    config = AlgorithmConfig(importance_sampling=level, importance_cap=1.4, importance_floor=floor)
    found = importance_weights(batch, config)
    difference = (batch.old_logprobs - batch.engine_logprobs).tolist()
    if level == "sequence":
        responses = [difference[:4], difference[4:7], difference[7:12], difference[12:]]
        difference = [sum(response) for response in responses for _ in response]
    expected, cut = [], []
    for d in difference:
        w = math.exp(d)
        cut.append(w > 1.4 or w < (floor or 0.0))
        expected.append(w if not cut[-1] else 1.4 if floor is None else 0.0)
    assert 0 < sum(cut) < len(cut), "the case must lie on both sides of the bounds"
    assert not floor or any(math.exp(d) < floor for d in difference)
    assert found.values.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.cut.tolist() == cut
    sums = loss_sums(batch, config, reinforce)
    assert sums.loss.item() == pytest.approx(
        sum(
            -w * a * p
            for w, a, p in zip(
                expected, batch.advantages.tolist(), batch.logprobs.tolist(), strict=True
            )
        ),
        rel=1e-12,
    )
    assert sums.metrics["importance_weight"].item() == pytest.approx(sum(expected))
    assert sums.metrics["importance_cut"].item() == sum(cut)
    assert sums.loss.item() != pytest.approx(
        loss_sums(batch, AlgorithmConfig(), reinforce).loss.item(), rel=1e-3
    )


def test_decoupled_ppo_is_areals_objective_token_by_token() -> None:
    """AReaL, arXiv 2505.24298: (pi_prox / pi_behaviour) min(u A, clip(u) A) with u = pi / pi_prox;
    gradient by differences.
    """
    batch = make_batch([6, 6], seed=11, reference=False, ratio_spread=0.4)
    config = AlgorithmConfig(importance_sampling="token", importance_cap=5.0)
    sums = loss_sums(batch, config, clip)
    sums.loss.backward()

    def objective(logprob: float, proximal: float, behaviour: float, advantage: float) -> float:
        u = math.exp(logprob - proximal)
        return min(math.exp(proximal - behaviour), 5.0) * min(
            u * advantage, min(max(u, 0.8), 1.2) * advantage
        )

    columns = (batch.logprobs, batch.old_logprobs, batch.engine_logprobs, batch.advantages)
    tokens = list(zip(*(column.tolist() for column in columns), strict=True))
    assert sums.loss.item() == pytest.approx(-sum(objective(*token) for token in tokens), rel=1e-12)
    step = 1e-6
    slopes = [
        -(objective(p + step, *others) - objective(p - step, *others)) / (2 * step)
        for p, *others in tokens
    ]
    np.testing.assert_allclose(batch.logprobs.grad.tolist(), slopes, rtol=1e-5, atol=1e-7)


def test_age_weights_and_what_is_said_of_ages() -> None:
    ages = [0.0, 1.0, 3.0, 0.0, 2.0]
    batch = replace(
        make_batch([3, 2], seed=2, reference=False), ages=torch.tensor(ages, dtype=torch.float64)
    )
    weights = [1.0, 0.5**0.5, 0.25**0.5, 1.0, (1 / 3) ** 0.5]
    assert age_weights(batch.ages, 0.5).tolist() == pytest.approx(weights)
    config = AlgorithmConfig(age_exponent=0.5)
    sums = loss_sums(batch, config, clip)
    assert set(sums.metrics) == set(metric_names(config, stale=True))
    terms = clip(batch, config).loss.tolist()
    assert sums.loss.item() == pytest.approx(
        sum(w * t for w, t in zip(weights, terms, strict=True)), rel=1e-12
    )
    ratios = (batch.logprobs - batch.engine_logprobs).exp().tolist()
    assert sums.metrics["age"].item() == sum(ages)
    assert sums.metrics["weight"].item() == pytest.approx(
        sum(r * w for r, w in zip(ratios, weights, strict=True))
    )


def test_effective_sample_size_is_what_equal_weights_would_be_worth() -> None:
    def share(weights: list[float]) -> float:
        return effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))

    assert share([0.3] * 7) == pytest.approx(1.0)
    assert share([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25), "one of four counts"
    weights = [0.5, 2.0, 1.0]
    variance = sum((w - 3.5 / 3) ** 2 for w in weights) / 3
    assert share(weights) == pytest.approx(1 / (1 + variance / (3.5 / 3) ** 2)), (
        "1 / (1 + CV^2), Kong 1992"
    )
    assert share([0.0, 0.0]) == 0.0


def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss: 'nope' is none of clip, gspo"):
        find_policy_loss("nope")
    with pytest.raises(ConfigError, match="cannot be imported"):
        find_policy_loss("pa_npu.algorithm.policy_losses:missing")
    assert find_policy_loss("pa_npu.algorithm.policy_losses:clip") is clip


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"])
def test_replicas_have_their_parts_of_the_normaliser(aggregation: str) -> None:
    """I3: N of what replicas trained together is the sum of what each one's counts give, so that
    any division is the same.
    """
    whole = Counts(tokens=57, responses=12)
    parts = (Counts(tokens=30, responses=5), Counts(tokens=27, responses=7))
    assert sum(normaliser(aggregation, part, 8) for part in parts) == normaliser(
        aggregation, whole, 8
    )


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"])
def test_loss_does_not_depend_on_the_cut_into_microbatches(aggregation: str) -> None:
    """I3: the weighted sum over N is the same for one microbatch, for two, and for the direct
    formula.
    """
    lengths = [3, 1, 6, 2]
    losses = [
        torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for n in lengths
    ]
    direct = {
        "token-mean": sum(x.sum() for x in losses) / sum(lengths),
        "sequence-mean": sum(x.mean() for x in losses) / len(lengths),
        "sequence-sum": sum(x.sum() for x in losses) / len(lengths),
        "dr-grpo": sum(x.sum() for x in losses) / (len(lengths) * 8),
    }[aggregation]
    n = normaliser(aggregation, Counts(tokens=sum(lengths), responses=len(lengths)), 8)
    for cut in ([0, 4], [0, 1, 4], [0, 2, 3, 4]):
        total = sum(
            (torch.cat(losses[a:b]) * token_weights(lengths[a:b], aggregation, CPU)).sum()
            for a, b in itertools.pairwise(cut)
        )
        assert float(total / n) == pytest.approx(float(direct), rel=1e-6)
