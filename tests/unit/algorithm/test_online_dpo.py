"""algorithm.loss=dpo: the pair of each group, ties, and whole updates against transformers in fp64 and the formula by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.normaliser import token_weights
from pa_npu.algorithm.policy_losses import TokenBatch, dpo
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.control.freshness import Freshness
from pa_npu.samples.group import Group
from tests.helpers.algorithms import algorithm_of, checked
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.reports import numbers
from tests.helpers.shelf import Shelf
from tests.helpers.trainer_rank import make_groups, with_advantages
from tests.unit.trainer.test_updates import GROUPS, RESPONSES, make_config, make_learner, source

# these import megatron, which the helper above has prepared
from pa_npu.samples.iterator import MicrobatchIterator  # isort: skip
from pa_npu.trainer.loop import consume  # isort: skip

BETA = 0.3
DPO = AlgorithmConfig(loss="dpo", kl_coef=BETA)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"kl_coef": 0.0}}, "set algorithm.kl_coef, e.g. to 0.1"),
        (
            {"algorithm": {"name": "online-dpo", "importance_sampling": "token"}},
            "of algorithm.name=online-dpo.*set it to none",
        ),
        ({"microbatch": {"responses": 4}}, "remove microbatch.responses"),
        ({"algorithm": {"clip_high": 0.3}}, "algorithm.clip_high: 0.3 would be read by nothing"),
        (
            {"algorithm": {"aggregation": "sequence-mean"}},
            "algorithm.aggregation: sequence-mean would be read by nothing",
        ),
        ({"algorithm": {"kl_in": "reward"}}, "algorithm.kl_in: reward would be read by nothing"),
    ],
)
def test_what_makes_no_sense_with_preferences_is_refused_in_one_line(
    sections: dict[str, Any], says: str
) -> None:
    algorithm = {"loss": "dpo", "kl_coef": 0.1, **sections.get("algorithm", {})}
    with pytest.raises(ValueError, match=says):
        checked(
            {"model": {"path": "m"}, "data": {"train": "t"}, **sections, "algorithm": algorithm}
        )


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_preset_keeps_a_reference_and_nothing_else(staleness: int) -> None:
    schedule = {"max_staleness": staleness, "updates_per_iteration": 2}
    tree = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "schedule": schedule,
        "algorithm": {"name": "online-dpo"},
    }
    config = Config.model_validate(tree)
    assert trainer_models(config).computed == ("reference",) and config.algorithm.kl_coef == 0.1
    assert config.algorithm.loss == "dpo"
    refreshed = {**tree, "algorithm": {"name": "online-dpo", "reference_refresh_every": 5}}
    assert Config.model_validate(refreshed).algorithm.reference_refresh_every == 5


def batch_of(
    lengths: list[int], advantages: list[float], group_size: int, seed: int = 0
) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return -torch.rand(sum(lengths), generator=generator, dtype=torch.float64)

    logprobs = draw().requires_grad_()
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
        old_logprobs=logprobs.detach(),
        reference_logprobs=draw(),
        engine_logprobs=logprobs.detach(),
        advantages=torch.tensor(advantages, dtype=torch.float64)[index],
        weights=token_weights(lengths, "token-mean", torch.device("cpu")).double(),
        response_index=index,
        num_responses=len(lengths),
        group_size=group_size,
    )


def test_the_first_of_the_best_is_preferred_to_the_first_of_the_worst() -> None:
    lengths, advantages = [3, 1, 4, 2, 5, 2, 2, 3], [0.5, -1.0, 0.5, -1.0, 0.0, 2.0, -1.0, -1.0]
    batch = batch_of(lengths, advantages, group_size=4)
    terms = dpo(batch, DPO)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs)
    h = [part.sum().item() for part in (batch.logprobs - batch.reference_logprobs).split(lengths)]
    total, expected = 0.0, np.zeros(len(lengths))
    for best, worst in ((0, 1), (5, 6)):
        margin = BETA * (h[best] - h[worst])
        total += math.log1p(math.exp(-margin))
        slope = BETA / (1 + math.exp(margin))
        expected[[best, worst]] = -slope, slope
    assert terms.loss.sum().item() == pytest.approx(total, rel=1e-12)
    for number, part in enumerate(gradient.split(lengths)):
        assert part.tolist() == pytest.approx([expected[number]] * lengths[number], abs=1e-12), (
            f"response {number}"
        )
    assert terms.metrics["preference_pairs"] == 2


def test_a_group_whose_responses_are_equal_is_no_pair_and_has_no_gradient() -> None:
    lengths = [2, 3, 1, 2]
    batch = batch_of(lengths, [0.0, 0.0, 1.0, -1.0], group_size=2)
    terms = dpo(batch, DPO)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), batch.logprobs)
    assert terms.metrics["preference_pairs"] == 1
    assert not gradient[:5].any() and gradient[5:].all()
    one = dpo(batch_of(lengths, [0.0] * 4, group_size=2), DPO)
    assert one.loss.sum() == 0 and one.metrics["preference_pairs"] == 0


def test_a_preference_is_of_whole_groups_with_a_reference() -> None:
    batch = batch_of([2, 3, 1], [0.0, 1.0, 2.0], group_size=2)
    for broken in (batch, replace(batch, group_size=3, reference_logprobs=None)):
        with pytest.raises(ValueError, match="whole groups of"):
            dpo(broken, DPO)
    pairs = algorithm_of(DPO)
    sums = pairs.loss_sums(replace(batch, group_size=3))
    assert set(sums.metrics) == set(pairs.metric_names), (
        "every number has a name, and the other way round"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


def judged(iteration: int) -> list[Group]:
    """Groups with two values of reward; the last one's are equal."""
    groups = make_groups(iteration, GROUPS, RESPONSES, seed=11)
    rng = np.random.default_rng(iteration)
    found = []
    for number, group in enumerate(groups):
        rewards = rng.permutation(np.arange(RESPONSES) % 3).astype(np.float32)
        found.append(
            with_advantages(group, rewards - rewards.mean() if number < GROUPS - 1 else 0 * rewards)
        )
    return found


def by_hand(policy: Path, reference: Path, groups: list[Group]) -> tuple[float, float, int]:
    """Loss, norm of its gradient, pairs: dense attention, one sequence after another, in fp64."""
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (policy, reference)
    )

    def logprob(model: Any, tokens: torch.Tensor, start: int) -> torch.Tensor:
        logits = model(tokens[None]).logits[0, start - 1 : -1]
        return logits.log_softmax(-1).gather(1, tokens[start:, None]).sum()

    losses = []
    for group in groups:
        ends = np.cumsum(group.lengths)
        sequences = [torch.from_numpy(part).long() for part in np.split(group.tokens, ends[:-1])]
        rewards = [part[-1] for part in np.split(group.advantages, ends[:-1])]
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        if max(rewards) == min(rewards):
            continue
        margins = []
        for number in (best, worst):
            start = group.prompt_lengths()[number]
            with torch.no_grad():
                before = logprob(theirs, sequences[number], start)
            margins.append(logprob(ours, sequences[number], start) - before)
        losses.append(torch.log1p(torch.exp(-BETA * (margins[0] - margins[1]))))
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.sqrt(
        sum(
            (p.grad.square().sum() for p in ours.parameters() if p.grad is not None),
            torch.zeros(()),
        )
    )
    return loss.item(), norm.item(), len(losses)


@pytest.mark.parametrize("max_tokens", [None, 200], ids=["", "packed"])
def test_updates_are_those_of_transformers_in_fp64(
    max_tokens: int | None, model: Path, tmp_path: Path
) -> None:
    """Two iterations: in the first policy and reference are one model, in the second they are not."""
    config = make_config(
        model, algorithm={"loss": "dpo", "kl_coef": BETA}, microbatch={"max_tokens": max_tokens}
    )
    learner, _ = make_learner(config)
    policy = model
    for iteration in range(2):
        groups = judged(iteration)
        learner.publish(iteration)
        report = numbers(consume(learner, source(groups, iteration, max_tokens), 1).report)
        loss, norm, pairs = by_hand(policy, model, groups)
        assert report["preference_pairs"] == pairs == GROUPS - 1
        assert report["loss"] == pytest.approx(loss, rel=1e-5)
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-4)
        if iteration:
            assert abs(loss - math.log(2)) > 1e-3, (
                "the policy must have left the reference for this to show anything"
            )
            others, _, _ = by_hand(
                policy, model, [with_advantages(g, -sample_of(g)) for g in groups]
            )
            assert others != pytest.approx(loss, rel=1e-3), "which response is preferred must show"
        policy = tmp_path / f"after{iteration}"
        learner.backend.export(policy)


def sample_of(group: Group) -> np.ndarray:
    """The advantage of each sample."""
    return np.array(
        [part[-1] for part in np.split(group.advantages, np.cumsum(group.lengths)[:-1])]
    )


def test_older_tokens_are_preferred_like_new_ones(model: Path) -> None:
    """k = 2: the same update whoever sampled the responses; ages are in the report."""
    reports = []
    for staleness in (0, 2):
        config = make_config(
            model,
            algorithm={"name": "online-dpo"},
            schedule={"max_staleness": staleness, "iterations": 9},
        )
        learner, _ = make_learner(config)
        learner.publish(3)
        groups = [
            replace(group, versions=np.where(group.trained, 3 - staleness, group.versions))
            for group in judged(3)
        ]
        iterator = MicrobatchIterator(
            Shelf(groups),  # type: ignore[arg-type]
            **{
                "replica": 0,
                "num_replicas": 1,
                "iteration": 3,
                "groups": GROUPS,
                "order": "prompt",
            },
            **{
                "responses_per_microbatch": RESPONSES,
                "shared_prompt": True,
                "pad_multiple": 1,
                "timeout_s": 1.0,
            },
            freshness=Freshness(staleness),
        )
        reports.append(numbers(consume(learner, iterator, 1).report))
    assert reports[0]["grad_norm"] == reports[1]["grad_norm"] and reports[1]["age_mean"] == 2
