"""Distillation by a divergence: an update is that of the dense formula on transformers' models, in fp32, on both backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.choices import Choices
from pa_npu.algorithm.divergences import divergence
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.teachers import check_teacher
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.trainer.learner import Learner
from tests.helpers.algorithms import checked
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups
from tests.unit.algorithm.test_distillation import (
    GROUPS,
    RESPONSES,
    TEMPERATURE,
    TREE,
    config_of,
    learner_of,
    update,
    without_credit,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    made = {
        "policy": make_model(tmp_path_factory.mktemp("policy"), tied=True),
        "same shape": make_model(tmp_path_factory.mktemp("same"), tied=True, seed=1),
        "larger": make_model(
            tmp_path_factory.mktemp("larger"), "llama", seed=2, hidden=128, layers=3
        ),
    }
    with single_process(model_config(made["policy"])):
        yield made


def dense(kind: str, policy: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of two whole distributions, [rows], from their log-probs [rows, tokens]."""
    t, s = teacher.exp(), policy.exp()
    if kind == "forward":
        return torch.nn.functional.kl_div(policy, teacher, reduction="none", log_target=True).sum(1)
    if kind == "reverse":
        return torch.nn.functional.kl_div(teacher, policy, reduction="none", log_target=True).sum(1)
    mixed = beta * t + (1 - beta) * s
    return (beta * t * (t / mixed).log() + (1 - beta) * s * (s / mixed).log()).sum(1)


def in_groups(log_softmax: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The distribution over some tokens and the rest."""
    if ids.shape[1] == log_softmax.shape[1]:
        return log_softmax
    of_ids = log_softmax.exp().gather(1, ids)
    rest = log_softmax.exp().sum(1, keepdim=True) - of_ids.sum(1, keepdim=True)
    return torch.cat([of_ids, rest], dim=1).log()


def by_formula(config: Config, groups: list[Group]) -> tuple[float, float, float]:
    """Loss, norm of its gradient and mean divergence by transformers' models in fp64, with the
    reward's part of a policy gradient.
    """
    keys = config.algorithm
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (config.model.path, config.teacher["large"].model)
    )
    loss, total, num_tokens = torch.zeros(()), torch.zeros(()), 0
    for group in groups:
        for start, end in pairwise(group.offsets().tolist()):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            trained = torch.from_numpy(group.trained[start + 1 : end])
            advantages = torch.from_numpy(group.advantages[start + 1 : end])[trained].double()
            ours, theirs = (
                (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)[trained]
                for model in (policy, teacher)
            )
            logprobs = ours.gather(1, ids[1:][trained][:, None])[:, 0]
            loss = loss - (advantages * (logprobs - logprobs.detach() + 1.0)).sum()
            likely = theirs.detach().topk(keys.distill_top_k).indices
            apart = dense(
                keys.distill_divergence,
                in_groups(ours, likely),
                in_groups(theirs.detach(), likely),
                keys.distill_beta,
            )
            total = total + apart.sum()
            num_tokens += len(logprobs)
    loss = (loss + keys.distill_coef * total) / num_tokens
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item()
    return loss.item(), norm, total.item() / num_tokens


KINDS: list[dict[str, Any]] = [
    {"distill_divergence": "forward", "distill_top_k": 8},
    {"distill_divergence": "reverse", "distill_top_k": 8, "distill_coef": 0.3},
    {"distill_divergence": "js", "distill_top_k": 8, "distill_beta": 0.2},
    {"distill_divergence": "forward", "distill_top_k": "all"},
    {"distill_divergence": "reverse", "distill_top_k": "all"},
    {"distill_divergence": "js", "distill_top_k": "all"},
]


def keys_of(kind: dict[str, Any], models: dict[str, Path]) -> dict[str, Any]:
    if kind["distill_top_k"] != "all":
        return kind
    return kind | {"distill_top_k": ModelSpec.read(str(models["policy"])).vocab_size}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_an_update_is_that_of_the_dense_formula(
    backend: str, shared: bool, kind: dict[str, Any], models: dict[str, Path]
) -> None:
    """With k as large as the vocabulary that of the whole distributions; beside a reward's
    advantages.
    """
    config = config_of(models["policy"], models["larger"], backend, **keys_of(kind, models))
    groups = make_groups(0, GROUPS, RESPONSES, seed=3)
    report = update(learner_of(config), groups, shared=shared).report
    loss, norm, mean = by_formula(config, groups)
    assert report.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert report.teacher_divergence == pytest.approx(mean, rel=1e-5)
    assert report.teacher_divergence is not None and report.teacher_divergence > 0.01


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_teacher_with_the_policys_weights_gives_rounding(
    backend: str, kind: dict[str, Any], models: dict[str, Path]
) -> None:
    groups = without_credit(make_groups(0, GROUPS, RESPONSES, seed=3))
    keys = keys_of(kind, models)
    same = config_of(models["policy"], models["policy"], backend, **keys)
    report = update(learner_of(same), groups).report
    # the mixture's logarithm is rounded
    assert report.loss == pytest.approx(0.0, abs=1e-7 if keys["distill_divergence"] == "js" else 0)
    assert report.teacher_divergence == report.loss
    assert report.grad_norm < 1e-6
    other = config_of(models["policy"], models["same shape"], backend, **keys)
    assert update(learner_of(other), groups).report.grad_norm > 0.01


def test_no_cut_into_microbatches_and_no_pass_of_its_own_changes_an_update(
    models: dict[str, Path],
) -> None:
    keys = {"distill_divergence": "js", "distill_top_k": 5}
    config = config_of(models["policy"], models["larger"], **keys)
    groups = make_groups(0, GROUPS, RESPONSES, seed=4)
    whole, cut = (update(learner_of(config), groups, size).report for size in (RESPONSES, 1))
    assert whole.grad_norm == pytest.approx(cut.grad_norm, rel=1e-5)
    assert whole.teacher_divergence == pytest.approx(cut.teacher_divergence, rel=1e-5)
    trainer = config.trainer.model_copy(update={"frozen_pass": "separate"})
    apart = update(learner_of(config.model_copy(update={"trainer": trainer})), groups).report
    assert (apart.grad_norm, apart.loss) == (whole.grad_norm, whole.loss)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "dr-grpo"])
def test_a_divergence_is_weighted_and_divided_like_the_loss_beside_it(
    aggregation: str, models: dict[str, Path]
) -> None:
    """Twice the coefficient is twice the gradient, whatever the aggregation."""
    groups = without_credit(make_groups(0, GROUPS, RESPONSES, seed=4))
    keys = {"distill_divergence": "forward", "aggregation": aggregation}
    once, twice = (
        update(
            learner_of(config_of(models["policy"], models["larger"], distill_coef=coef, **keys)),
            groups,
        ).report
        for coef in (0.5, 1.0)
    )
    assert twice.grad_norm == pytest.approx(2 * once.grad_norm, rel=1e-5)
    assert twice.loss == pytest.approx(2 * once.loss, rel=1e-5)
    assert once.policy_loss == twice.policy_loss == 0.0


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_weights_that_move_along_the_gradient_change_the_divergence_as_it_says(
    backend: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """schedule.finite_difference_every: the second half of I7, which sees the head too."""
    config = config_of(
        models["policy"], models["larger"], backend, distill_divergence="reverse", distill_top_k=6
    )
    pieces = [
        piece
        for group in without_credit(make_groups(0, GROUPS, RESPONSES, seed=4))
        for piece in build_microbatches(group, RESPONSES, True, 1)
    ]
    learner = learner_of(config)
    learner.skip_publish(0)
    compared = learner.finite_difference(pieces, {})
    assert compared is not None and compared.limit is not None
    assert compared.predicted == pytest.approx(compared.measured, rel=0.02)
    _halve_what_comes_to_choices(monkeypatch)
    with pytest.raises(InvariantViolation, match="moved along the gradient"):
        learner.finite_difference(pieces, {})


def _halve_what_comes_to_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    from pa_npu.backends import logprob

    whole: Callable[..., torch.Tensor] = logprob._with_choices

    def half(
        softmax: torch.Tensor, factor: torch.Tensor, grad_choices: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        return whole(softmax, factor / 2, grad_choices / 2, *rest)

    monkeypatch.setattr(logprob, "_with_choices", half)


def outputs_of(seed: int, count: int) -> tuple[Choices, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 40, count + 1, generator=generator) * 3
    policy, teacher = logits.log_softmax(-1)
    weights = torch.rand(40, generator=generator)
    return Choices(policy.requires_grad_(), teacher), weights


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: str(kind["distill_divergence"]))
def test_the_second_calculation_of_the_gradient_agrees_with_autograd(kind: dict[str, Any]) -> None:
    algorithm = build_algorithm(config_of(Path("p"), Path("t"), **kind))
    for seed in range(4):
        choices, weights = outputs_of(seed, 8)
        loss = algorithm.keys.distill_coef * (divergence(choices, algorithm.keys) * weights).sum()
        (found,) = torch.autograd.grad(loss, choices.policy)
        wide = choices.map(lambda values: values.detach().double())
        factors = algorithm.keys.distill_coef * weights.double()
        expected = algorithm.expected_choice_gradient(wide, factors)
        assert (np.abs(found.numpy() - expected.values) <= expected.limit).all()
        shifted = replace(wide, teacher=wide.teacher - 0.01)
        moved = algorithm.expected_choice_gradient(shifted, factors)
        assert (np.abs(found.numpy() - moved.values) > moved.limit).any(), "a hundredth must show"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_gradient_that_is_not_the_divergences_ends_the_run(
    backend: str, dtype: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that was given the teacher's log-probs of other rows."""
    from pa_npu.algorithm import divergences

    config = config_of(models["policy"], models["larger"], backend, distill_divergence="forward")
    model = config.model.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"model": model})
    groups = make_groups(0, GROUPS, RESPONSES, seed=4)
    update(learner_of(config), groups)
    right = divergences.divergence

    def shifted(choices: Choices, keys: Any) -> torch.Tensor:
        return right(replace(choices, teacher=choices.teacher.roll(1, dims=0)), keys)

    monkeypatch.setattr(divergences, "divergence", shifted)
    learner: Learner = learner_of(config)
    with pytest.raises(InvariantViolation, match=r"I7 gradient: .*distill_divergence = forward"):
        update(learner, groups)


def test_the_generalised_jensen_shannon_is_that_of_the_paper() -> None:
    """GKD, arXiv 2306.13649, section 3, in numbers that can be checked by hand: two outcomes."""
    keys = config_of(Path("p"), Path("t"), distill_divergence="js", distill_beta=0.25).algorithm
    policy = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    mixed = (0.6, 0.4)
    expected = 0.25 * (0.9 * math.log(0.9 / mixed[0]) + 0.1 * math.log(0.1 / mixed[1]))
    expected += 0.75 * (0.5 * math.log(0.5 / mixed[0]) + 0.5 * math.log(0.5 / mixed[1]))
    assert float(divergence(Choices(policy, teacher), keys)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"distill_divergence": "forward", "distill_discount": 0.5},
            "algorithm.distill_discount: 0.5 would be read by nothing; set "
            "algorithm.distill_divergence to sampled",
        ),
        (
            {"distill_divergence": "js", "distill_clip": 2.0},
            "algorithm.distill_clip: 2.0 would be read by nothing",
        ),
        ({"distill_top_k": 4}, "algorithm.distill_top_k: 4 would be read by nothing; set"),
        (
            {"distill_divergence": "reverse", "distill_beta": 0.3},
            "algorithm.distill_beta: 0.3 would be read by nothing; .* to js",
        ),
        ({"distill_divergence": "js", "distill_beta": 1.0}, "distill_beta"),
        ({"distill_divergence": "both"}, "distill_divergence"),
        ({"distill_divergence": "js", "distill_top_k": 0}, "distill_top_k"),
    ],
)
def test_keys_that_do_not_go_together_are_one_line(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked(TREE | {"algorithm": {"name": "distill", **keys}})


def test_the_check_of_the_gradient_needs_the_teacher_in_the_policys_pass() -> None:
    tree = TREE | {
        "algorithm": {"name": "distill", "distill_divergence": "forward"},
        "trainer": {"frozen_pass": "separate"},
        "schedule": {"finite_difference_every": 2},
    }
    with pytest.raises(ValueError, match=r"finite_difference_every: 2 with trainer.frozen_pass"):
        checked(tree)


def test_more_choices_than_tokens_are_refused(models: dict[str, Path]) -> None:
    spec, teacher = (ModelSpec.read(str(models[name])) for name in ("policy", "larger"))
    config = config_of(
        models["policy"],
        models["larger"],
        distill_divergence="forward",
        distill_top_k=spec.vocab_size + 1,
    )
    with pytest.raises(ConfigError, match=rf"distill_top_k: {spec.vocab_size + 1} is more than"):
        check_teacher(config, spec, "teacher.large", teacher)
