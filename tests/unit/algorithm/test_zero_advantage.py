"""An algorithm says when a group with advantages of 0 has no gradient, and the rule follows from what the loss is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.algorithm.algorithm import Algorithm, ScoredSamples
from pa_npu.algorithm.policy_gradient import PolicyGradient
from pa_npu.algorithm.policy_losses import POLICY_LOSSES, PolicyTerms, TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig


def config_of(**sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"train": "t"}}
    return Config.model_validate({**tree, **sections})


def algorithm_of(**keys: Any) -> Algorithm:
    return build_algorithm(config_of(algorithm=keys))


def silent(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """A user's loss that promises nothing."""
    return PolicyTerms(batch.logprobs * 0.1, torch.zeros_like(batch.logprobs, dtype=torch.bool))


def promising(batch: TokenBatch, config: AlgorithmConfig) -> PolicyTerms:
    """A user's loss that has the advantage as a factor, and says so."""
    loss = -batch.advantages * batch.logprobs
    return PolicyTerms(loss, torch.zeros_like(batch.logprobs, dtype=torch.bool))


promising.zero_without_advantage = True  # type: ignore[attr-defined]


class Own(PolicyGradient):
    """A user's class, which may add to the loss."""


class OwnThatPromises(PolicyGradient):
    needs_every_gradient = None


def samples(rewards: list[float], component: int = 1) -> ScoredSamples:
    count = len(rewards)
    return ScoredSamples(
        rewards=np.array(rewards, np.float32),
        lengths=np.full(count, 3, np.int32),
        tokens=np.arange(3 * count, dtype=np.int32),
        component=np.tile(np.array([0, 1, component], np.uint8), count),
    )


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_of_ours_has_no_gradient_where_advantages_are_0(loss: str) -> None:
    algorithm = algorithm_of(loss=loss)
    assert algorithm.needs_every_gradient is None
    logprobs = torch.tensor([-0.5, -3.0, -1.0, -0.1], requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        entropy=torch.ones(4),
        old_logprobs=torch.tensor([-2.0, -0.2, -1.0, -4.0]),
        reference_logprobs=None,
        engine_logprobs=torch.tensor([-2.0, -0.3, -1.0, -0.1]),
        advantages=torch.zeros(4),
        weights=torch.ones(4),
        response_index=torch.tensor([0, 0, 1, 1]),
        num_responses=2,
        group_size=2,
    )
    algorithm.loss_sums(batch).loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("key", ["kl_coef", "entropy_coef", "router_aux_coef"])
def test_a_term_without_the_advantage_keeps_every_group(key: str) -> None:
    algorithm = algorithm_of(**{key: 0.01})
    reason = algorithm.needs_every_gradient
    assert reason is not None
    assert f"algorithm.{key} = 0.01" in reason
    equal = samples([1.0, 1.0])
    assert not algorithm.is_without_gradient(equal, algorithm.credit(equal))


def test_rows_and_preferences_are_left_out() -> None:
    for loss in ("dpo", "cross-entropy"):
        assert algorithm_of(loss=loss).needs_every_gradient is not None


def test_a_users_loss_is_left_out_unless_it_promises() -> None:
    assert algorithm_of(loss=f"{__name__}:promising").needs_every_gradient is None
    reason = algorithm_of(loss=f"{__name__}:silent").needs_every_gradient
    assert reason is not None
    assert "zero_without_advantage" in reason


def test_a_users_class_is_left_out_unless_it_promises() -> None:
    assert algorithm_of(name=f"{__name__}:OwnThatPromises").needs_every_gradient is None
    reason = algorithm_of(name=f"{__name__}:Own").needs_every_gradient
    assert reason is not None
    assert "needs_every_gradient" in reason


@pytest.mark.parametrize("advantage", ["group-std", "centred", "leave-one-out"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_have_no_gradient_and_others_have_one(advantage: str, reward: float) -> None:
    algorithm = algorithm_of(advantage=advantage)
    equal, other = samples([reward] * 7), samples([reward] * 6 + [reward + 0.5])
    assert algorithm.is_without_gradient(equal, algorithm.credit(equal))
    assert algorithm.broken_rule(equal.rewards) is None
    assert not algorithm.is_without_gradient(other, algorithm.credit(other))
    assert algorithm.broken_rule(other.rewards) is not None


def test_a_token_of_another_component_keeps_its_group() -> None:
    algorithm = algorithm_of()
    group = samples([1.0, 1.0], component=2)
    assert not algorithm.is_without_gradient(group, np.zeros(6, np.float32))


def test_the_key_is_refused_in_one_line_where_the_rule_does_not_hold() -> None:
    schedule = {"skip_zero_advantage": True}
    broken = list(broken_rules(config_of(schedule=schedule, algorithm={"entropy_coef": 0.01})))
    assert len(broken) == 1
    assert broken[0].startswith("schedule.skip_zero_advantage: true")
    assert "algorithm.entropy_coef = 0.01" in broken[0]
    assert broken[0].endswith("set skip_zero_advantage to false")
    assert list(broken_rules(config_of(schedule=schedule))) == []


def test_by_default_the_rule_is_on_for_losses_of_ours_that_allow_it_and_off_for_users_own() -> None:
    assert algorithm_of().trains_by_rule
    assert not algorithm_of(kl_coef=0.01).trains_by_rule
    assert not algorithm_of(loss="dpo").trains_by_rule
    assert not algorithm_of(loss=f"{__name__}:promising").trains_by_rule
    assert not algorithm_of(name=f"{__name__}:OwnThatPromises").trains_by_rule
    stages = {"devices": 2, "pipeline_parallel": 2}
    compared = config_of(trainer=stages, schedule={"finite_difference_every": 4})
    assert not build_algorithm(compared).trains_by_rule
    assert list(broken_rules(compared)) == [], "what nobody asked for is not refused"


def test_the_key_says_otherwise_either_way() -> None:
    for chosen in (True, False):
        schedule = {"skip_zero_advantage": chosen}
        algorithm = {"loss": f"{__name__}:promising"}
        config = config_of(schedule=schedule, algorithm=algorithm)
        assert build_algorithm(config).trains_by_rule is chosen
