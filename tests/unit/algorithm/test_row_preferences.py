"""Preferences on rows of data: losses and gradients against a dense formula, on both backends, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.loss_gradient import on_host
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.schema import Config
from pa_npu.coordinator.row_groups import group_of
from pa_npu.data.pair_sets import Pair, groups_of_pairs
from pa_npu.data.row_sets import Row
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches, pack
from tests.helpers.backend import Source
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.unit.algorithm.test_supervised import exported, learner_of

RATE, PAIRS, BETA = 3e-3, 5, 0.3
LOSSES = [
    {"preference_loss": "sigmoid"},
    {"preference_loss": "sigmoid", "label_smoothing": 0.2},
    {"preference_loss": "robust", "label_smoothing": 0.2},
    {"preference_loss": "sigmoid-norm"},
    {"preference_loss": "ipo"},
]
NAMES = ["sigmoid", "smoothed", "robust", "sigmoid-norm", "ipo"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def config_of(model: Path | str, backend: str = "megatron", **algorithm: Any) -> Config:
    return model_config(
        model,
        algorithm={"name": "dpo", "kl_coef": BETA, **algorithm},
        trainer={"backend": backend},
        rollout={"max_response_tokens": 32},
        schedule={"prompts_per_iteration": PAIRS},
        optimizer={"learning_rate": RATE, "clip_grad": 0.0, "epsilon": 1e-3},
    )


def pairs(*, weighted: bool = False) -> list[Pair]:
    """Pairs whose answers have several lengths and may begin alike."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(PAIRS):
        prompt = rng.integers(3, 60, 6)
        beginning = rng.integers(3, 60, number % 3)
        rows = []
        for _ in range(2):
            answer = np.concatenate([beginning, rng.integers(3, 60, rng.integers(2, 8))])
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            weight = np.zeros(len(tokens), np.float32)
            weight[len(prompt) :] = 0.5 + number if weighted else 1.0
            rows.append(Row(number, tokens, weight, "", 0))
        made.append(Pair(*rows))
    return made


def groups_for(config: Config, given: list[Pair]) -> list[Group]:
    algorithm = build_algorithm(config)
    return [
        group_of(prompt, algorithm).group(1, 0, number, algorithm.credit)
        for number, prompt in enumerate(groups_of_pairs(given))
    ]


def dense_logprobs(policy: Any, row: Row) -> torch.Tensor:
    """Log-probs of a row's compared tokens, by a pass over this row alone."""
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    logprobs = policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    compared: torch.Tensor = logprobs[torch.from_numpy(row.weight[1:] != 0)]
    return compared


def dense_loss(config: Config, policy: Any, reference: Any, given: list[Pair]) -> torch.Tensor:
    """The mean loss of pairs, written out again."""
    keys = config.algorithm
    share, total = keys.label_smoothing, torch.zeros(())
    for pair in given:
        scores = []
        for row in pair.rows:
            with torch.no_grad():
                known = dense_logprobs(reference, row)
            ratio = dense_logprobs(policy, row) - known
            by_token = keys.preference_loss in ("ipo", "sigmoid-norm")
            scores.append(ratio.mean() if by_token else ratio.sum())
        margin = scores[0] - scores[1]
        if keys.preference_loss == "ipo":
            loss = (margin - 0.5 / keys.kl_coef) ** 2
        elif keys.preference_loss == "robust":
            right, wrong = logsigmoid(keys.kl_coef * margin), logsigmoid(-keys.kl_coef * margin)
            loss = (-(1 - share) * right + share * wrong) / (1 - 2 * share)
        else:
            right, wrong = logsigmoid(keys.kl_coef * margin), logsigmoid(-keys.kl_coef * margin)
            loss = -(1 - share) * right - share * wrong
        total = total + loss * float(pair.chosen.weight.max())
    return total / len(given)


def dense_updates(
    config: Config, model: Path, given: list[Pair], updates: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and last weights of AdamW on `dense_loss`."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    losses, norms = [], []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = dense_loss(config, policy, reference, given)
        loss.backward()
        squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.item())
        norms.append(torch.stack(squares).sum().sqrt().item())
    return losses, norms, {name: t.detach().clone() for name, t in policy.state_dict().items()}


@pytest.mark.parametrize("keys", LOSSES, ids=NAMES)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_updates_are_those_of_the_dense_formula(
    shared: bool, backend: str, keys: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Two updates: at the first one policy and reference are equal, at the second they are not."""
    config, given = config_of(model, backend, **keys), pairs(weighted=True)
    learner = learner_of(config)
    groups = groups_for(config, given)
    pieces = [one for group in groups for one in build_microbatches(group, 2, shared, 1)]
    losses, norms, weights = dense_updates(config, model, given, 2)
    learner.skip_publish(0)
    for loss, norm in zip(losses, norms, strict=True):
        source = Source(pieces)
        learner.accumulate(source)
        done = learner.step()
        assert done.normaliser == PAIRS
        assert done.report.loss == pytest.approx(loss, rel=2e-5)
        assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3), "the second update must differ"
    mine = exported(learner, tmp_path)
    assert len(mine) > 10
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor.float(), weights[name], rtol=1e-3, atol=2e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


def test_no_packing_changes_an_update(model: Path) -> None:
    """I3: pairs one by one, and all in one microbatch."""
    config, reports = config_of(model), []
    groups = groups_for(config, pairs())
    for packed in (False, True):
        pieces = [pack([group], True, 1) for group in groups]
        if packed:
            pieces = [pack(groups, True, 1)]
        learner = learner_of(config)
        learner.skip_publish(0)
        learner.accumulate(Source(pieces))
        reports.append(learner.step().report)
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)


def test_a_prompt_is_computed_once_for_both_answers(model: Path) -> None:
    given = pairs()
    (group, *_), first = groups_for(config_of(model), given), given[0]
    (shared,) = build_microbatches(group, 2, True, 1)
    (apart,) = build_microbatches(group, 2, False, 1)
    prompt = int(np.count_nonzero(first.chosen.weight == 0))
    assert len(apart.tokens) == len(first.chosen.tokens) + len(first.rejected.tokens)
    assert len(shared.tokens) <= len(apart.tokens) - prompt


def test_the_chosen_answer_gains_and_reports_say_so(model: Path) -> None:
    config = config_of(model)
    pieces = [
        one
        for group in groups_for(config, pairs())
        for one in build_microbatches(group, 2, True, 1)
    ]
    learner, reports = learner_of(config), []
    learner.skip_publish(0)
    for _ in range(4):
        learner.accumulate(Source(pieces))
        reports.append(learner.step().report)
    first, last = reports[0], reports[-1]
    assert (first.preference_margin, first.preference_accuracy) == (0.0, 0.0)
    assert first.loss == pytest.approx(np.log(2), rel=1e-6)
    assert last.preference_margin > 0.1 and last.preference_accuracy == 1.0
    assert last.preference_pairs == PAIRS
    gained = last.preference_chosen_reward - last.preference_rejected_reward
    assert gained == pytest.approx(last.preference_margin, rel=1e-4)
    assert (last.kl, last.logprob_diff_mean) == (None, None), "no policy wrote the rows"


def token_batch(seed: int = 3) -> TokenBatch:
    """Two pairs of answers of 3, 5, 2 and 4 tokens."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 5, 2, 4]))
    logprobs = -torch.rand(14, generator=generator) * 3
    return TokenBatch(
        logprobs=logprobs.requires_grad_(),
        entropy=torch.ones(14),
        old_logprobs=logprobs.detach(),
        reference_logprobs=-torch.rand(14, generator=generator) * 3,
        engine_logprobs=torch.zeros(14),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0])[index],
        weights=torch.tensor([1.0, 1.0, 0.25, 0.25])[index],
        response_index=index,
        num_responses=4,
        group_size=2,
    )


@pytest.mark.parametrize("keys", LOSSES, ids=NAMES)
def test_the_expected_gradient_is_that_of_the_loss(keys: dict[str, Any]) -> None:
    algorithm = build_algorithm(config_of("model", **keys))
    batch = token_batch()
    sums = algorithm.loss_sums(batch)
    assert set(sums.metrics) == set(algorithm.metric_names)
    (gradient,) = torch.autograd.grad(sums.loss, batch.logprobs)
    expected = algorithm.expected_gradient(on_host(batch))
    assert (np.abs(gradient.numpy() - expected.values) <= expected.limit).all()
    size = np.abs(expected.values)
    assert (expected.limit < 0.2 * size).all(), "the limit must let a mistake show"
    doubled = 1.5 * gradient.numpy()
    assert (np.abs(doubled - expected.values) > expected.limit).all()


def test_answers_that_change_places_change_sides() -> None:
    algorithm, batch = build_algorithm(config_of("model")), token_batch()
    turned = replace(batch, advantages=-batch.advantages)
    margin = algorithm.loss_sums(batch).metrics["preference_margin"]
    assert algorithm.loss_sums(turned).metrics["preference_margin"] == -margin


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"responses_per_prompt": 4}}, "whose groups are pairs"),
        ({"microbatch": {"responses": 1}}, "in one microbatch"),
        ({"algorithm": {"kl_coef": 0.0}}, "whose beta it is"),
        ({"algorithm": {"preference_loss": "ipo", "label_smoothing": 0.1}}, "no labels to smooth"),
        ({"algorithm": {"preference_loss": "robust"}}, "which is sigmoid"),
        ({"algorithm": {"clip_high": 0.3}}, "would be read by nothing"),
        ({"algorithm": {"entropy_coef": 0.3}}, "would be read by nothing"),
        ({"rollout": {"engines": 1}}, "set it to 0"),
        ({"algorithm": {"name": "sft", "label_smoothing": 0.1}}, "set algorithm.name=dpo"),
        ({"algorithm": {"name": "online-dpo", "preference_loss": "ipo"}}, "algorithm.name=dpo"),
    ],
)
def test_what_does_not_go_with_pairs_is_one_line(sections: dict[str, Any], said: str) -> None:
    given = {"algorithm": {}, **sections}
    given["algorithm"] = {"name": "dpo", **given["algorithm"]}
    lines = list(broken_rules(model_config("model", **given)))
    assert any(said in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_the_preset_breaks_no_rule() -> None:
    assert not list(broken_rules(model_config("model", algorithm={"name": "dpo"})))
