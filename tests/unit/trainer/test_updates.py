"""Several updates per iteration against the same updates by hand: plain autograd, torch's AdamW, the clip written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.schema import Config
from pa_npu.control.messages import merge_updates
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.microbatch import build_microbatches
from tests.helpers.backend import make_learner
from tests.helpers.groups import sample_advantages, with_trained
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.reports import numbers, update_report
from tests.helpers.shelf import shelf_iterator
from tests.helpers.trainer_rank import make_groups

# these import megatron, which the helper above has prepared
from pa_npu.backends.megatron.factory import load_stage  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip

GROUPS, RESPONSES, LEARNING_RATE = 4, 4, 3e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def source(
    groups: list[Group], iteration: int = 0, max_tokens: int | None = None
) -> MicrobatchIterator:
    return shelf_iterator(groups, iteration, responses=RESPONSES, max_tokens=max_tokens)


def make_config(model: Path, /, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        "schedule": {"prompts_per_iteration": GROUPS, "order": "prompt"},
        "optimizer": {"learning_rate": LEARNING_RATE, "clip_grad": 0.0, "epsilon": 1e-3},
    }
    return model_config(
        model,
        **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}},
    )


def by_hand(
    config: Config, iterations: list[list[Group]], updates: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and the loss of every update."""
    stage = load_stage(
        make_config(Path(config.model.path)), ModelSpec.read(config.model.path), PLATFORM
    )
    optimizer = torch.optim.AdamW(
        stage.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )

    def logprobs(group: Group) -> torch.Tensor:
        (m,) = build_microbatches(group, RESPONSES, True, 1)
        return stage(
            m.tokens[None], m.layout, m.rows, m.targets, temperature=1.0, chunk=64
        ).logprobs

    losses = []
    for groups in iterations:
        with torch.no_grad():
            old = [logprobs(group) for group in groups]
        share = len(groups) // updates
        for start in range(0, len(groups), share):
            terms = []
            for group, before in list(zip(groups, old, strict=True))[start : start + share]:
                ratio = (logprobs(group) - before).exp()
                lengths = torch.from_numpy(group.trained_lengths).long()
                advantages = torch.from_numpy(sample_advantages(group)).repeat_interleave(lengths)
                terms.append(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
            loss = -torch.cat(terms).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in stage.policy.named_parameters()}, losses


@pytest.mark.parametrize("max_tokens", [None, 60], ids=["", "packed"])
@pytest.mark.parametrize("updates", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_weights_are_those_of_the_updates_by_hand(
    updates: int, max_tokens: int | None, model: Path
) -> None:
    iterations = [make_groups(iteration, GROUPS, RESPONSES, seed=5) for iteration in range(2)]
    config = make_config(
        model, schedule={"updates_per_iteration": updates}, microbatch={"max_tokens": max_tokens}
    )
    learner, stage = make_learner(config)
    assert set(stage.frozen) == ({"old"} if updates > 1 else set()), (
        "the old policy is built only when needed"
    )
    reports = []
    for iteration, groups in enumerate(iterations):
        learner.publish(iteration)
        reports.append(
            numbers(consume(learner, source(groups, iteration, max_tokens), updates).report)
        )
    weights, losses = by_hand(config, iterations, updates)
    for name, parameter in stage.policy.named_parameters():
        torch.testing.assert_close(
            parameter.detach(),
            weights[name],
            rtol=1e-4,
            atol=2e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for iteration, report in enumerate(reports):
        own = losses[iteration * updates : (iteration + 1) * updates]
        assert report["loss"] == pytest.approx(sum(own) / updates, rel=1e-4, abs=1e-6)
        tokens = sum(int(group.trained_lengths.sum()) for group in iterations[iteration])
        assert report["tokens_response"] == tokens
        assert (report["clip_ratio"] > 0) == (updates > 1), (
            "the ratio is 1 with one update, and moves with several"
        )
    if updates > 1:
        other, _ = by_hand(config, iterations, 1)
        difference = max((other[name] - weights[name]).abs().max().item() for name in weights)
        assert difference > 100 * 2e-6, "another number of updates must show"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_and_their_statistics_are_those_by_hand(level: str, model: Path) -> None:
    """Truncated at 1.3 between engine log-probs that are off by about 0.2 per token and the
    trainer's own.
    """
    config = make_config(model, algorithm={"importance_sampling": level, "importance_cap": 1.3})
    stage = load_stage(make_config(model), ModelSpec.read(config.model.path), PLATFORM)
    generator = torch.Generator().manual_seed(1)
    groups, terms, weights, truncated = [], [], [], 0
    for group in make_groups(0, GROUPS, RESPONSES, seed=5):
        (m,) = build_microbatches(group, RESPONSES, True, 1)
        logprobs = stage(
            m.tokens[None], m.layout, m.rows, m.targets, temperature=1.0, chunk=64
        ).logprobs
        engine = (logprobs.detach() + 0.2 * torch.randn(logprobs.shape, generator=generator)).clamp(
            max=0
        )
        groups.append(with_trained(group, logprobs=engine.numpy()))
        lengths, advantages = group.trained_lengths.tolist(), sample_advantages(group).tolist()
        for ours, theirs, advantage in zip(
            logprobs.split(lengths), engine.split(lengths), advantages, strict=True
        ):
            log_ratio = (ours - theirs).detach().double()
            ratio = log_ratio.exp() if level == "token" else log_ratio.sum().exp().expand(len(ours))
            terms.append(-advantage * ratio.clamp(max=1.3) * ours)
            weights += ratio.clamp(max=1.3).tolist()
            truncated += int((ratio > 1.3).sum())
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in stage.policy.parameters()]).norm()

    learner, _ = make_learner(config)
    learner.publish(0)
    report = numbers(consume(learner, source(groups), 1).report)
    assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert report["importance_weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert report["importance_truncated_ratio"] == pytest.approx(truncated / len(weights), rel=1e-6)
    assert 0.02 < truncated / len(weights) < 0.9, "the case must lie on both sides of the cap"
    plain, _ = make_learner(make_config(model))
    plain.publish(0)
    assert consume(plain, source(groups), 1).report.grad_norm != pytest.approx(
        norm.item(), rel=1e-3
    ), "weights must show"


def test_learning_rate_schedule_counts_updates(model: Path) -> None:
    config = make_config(
        model,
        schedule={"updates_per_iteration": 2, "iterations": 3},
        optimizer={"warmup_iterations": 1, "decay": "linear"},
    )
    learner, _ = make_learner(config)
    rates = []
    for iteration in range(3):
        learner.publish(iteration)
        for share in source(make_groups(iteration, GROUPS, RESPONSES, seed=5), iteration).updates(
            2
        ):
            learner.accumulate(share)
            rates.append(learner.step().report.learning_rate)
    expected = [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4, 0]
    assert rates == pytest.approx(
        [LEARNING_RATE * share for share in expected], rel=1e-6, abs=1e-12
    )


def test_without_an_old_policy_only_rollouts_of_the_policy_itself_are_trained(model: Path) -> None:
    learner, _ = make_learner(make_config(model))
    learner.publish(0)
    consume(learner, source(make_groups(0, GROUPS, RESPONSES, seed=5)), 1)
    with pytest.raises(
        InvariantViolation, match=r"I1 version: .* weight version 0, but version 1 is trained"
    ):
        consume(learner, source(make_groups(0, GROUPS, RESPONSES, seed=5)), 1)


def test_the_reference_is_refreshed_every_n_versions_and_else_stays(model: Path) -> None:
    config = make_config(model, algorithm={"kl_coef": 0.1, "reference_refresh_every": 2})
    learner, stage = make_learner(config)

    def is_policy() -> bool:
        pairs = zip(stage.policy.parameters(), stage.frozen["reference"].parameters(), strict=True)
        return all(torch.equal(policy, reference) for policy, reference in pairs)

    found = []
    for version in range(4):
        learner.publish(version)
        found.append(is_policy())
        consume(learner, source(make_groups(version, GROUPS, RESPONSES, seed=5), version), 1)
    assert found == [True, False, True, False], (
        "version 0 is the model that the reference was loaded from"
    )


def test_shares_end_at_group_borders_and_no_group_is_left(model: Path) -> None:
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    iterator = source(groups, max_tokens=10_000)
    assert [[m.group_indices for m in share] for share in iterator.updates(2)] == [
        [(0, 1)],
        [(2, 3)],
    ]
    iterator.finish()
    with pytest.raises(ValueError, match="3 does not divide 4 groups"):
        next(source(groups).updates(3))


def test_merged_report_adds_work_and_averages_the_rest() -> None:
    """Means over tokens stay means over all tokens, whatever share of them an update has."""
    first = update_report(
        loss=1.0,
        tokens_response=30,
        train_s=2.0,
        logprob_diff_max=0.5,
        learning_rate=0.1,
        kl=0.1,
        logprob_diff_mean=0.2,
    )
    second = update_report(
        loss=3.0,
        tokens_response=10,
        train_s=1.0,
        logprob_diff_max=0.2,
        learning_rate=0.2,
        kl=0.5,
        logprob_diff_mean=0.6,
    )
    merged = merge_updates([first, second])
    assert merged == replace(
        merged, loss=2.0, tokens_response=40, train_s=3.0, logprob_diff_max=0.5, learning_rate=0.2
    )
    assert (merged.kl, merged.logprob_diff_mean) == (pytest.approx(0.2), pytest.approx(0.3))
    assert merged.importance_weight_mean is None
    weighted = merge_updates(
        [replace(first, importance_weight_mean=1.0), replace(second, importance_weight_mean=0.6)]
    )
    assert weighted.importance_weight_mean == pytest.approx(0.9)
    assert merge_updates([first]) is first


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"schedule": {"updates_per_iteration": 3}},
            "updates_per_iteration: 3 does not divide the 4 groups per replica",
        ),
        (
            {"schedule": {"updates_per_iteration": 2}, "algorithm": {"loss": "reinforce"}},
            "algorithm.loss=reinforce has no ratio .* set it to 1, or algorithm.loss=clip",
        ),
        (
            {"algorithm": {"reference_refresh_every": 2}},
            "there is no reference with algorithm.kl_coef = 0",
        ),
    ],
)
def test_combinations_that_cannot_be_exact_are_refused(
    sections: dict[str, Any], message: str, model: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        for broken in broken_rules(make_config(model, **sections)):
            raise ValueError(broken)
