"""Distillation: an update is its formula's on transformers' models, and a teacher like the policy teaches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.distillation import discounted_sums
from pa_npu.algorithm.loss_gradient import on_host
from pa_npu.algorithm.model_outputs import FixedWeights
from pa_npu.algorithm.policy_losses import TokenBatch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError, InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.teachers import check_teacher, check_vocabularies
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner, Update
from tests.helpers.algorithms import checked
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups

GROUPS, RESPONSES, TEMPERATURE = 3, 4, 0.8


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


def config_of(policy: Path, teacher: Path, backend: str = "megatron", **algorithm: Any) -> Config:
    return model_config(
        policy,
        algorithm={"name": "distill", **algorithm},
        teacher={"large": {"model": str(teacher)}},
        trainer={"backend": backend},
        rollout={
            "responses_per_prompt": RESPONSES,
            "max_response_tokens": 16,
            "temperature": TEMPERATURE,
        },
        schedule={"prompts_per_iteration": GROUPS},
        optimizer={"learning_rate": 1e-3, "clip_grad": 0.0},
    )


def learner_of(config: Config) -> Learner:
    if config.trainer.backend == "megatron":
        return make_learner(config)[0]
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    module = backend_module(config.trainer.backend)
    backend = module.create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)
    return Learner(config, backend, PLATFORM, timeline)


def update(
    learner: Learner, groups: list[Group], size: int = RESPONSES, shared: bool = True
) -> Update:
    source = Source([m for g in groups for m in build_microbatches(g, size, shared, 1)])
    learner.skip_publish(0)
    learner.accumulate(source)
    return learner.step()


def by_formula(config: Config, groups: list[Group]) -> tuple[float, float, float]:
    """Loss, norm of its gradient and the estimate of KL(policy || teacher), by transformers' models
    on one response after another, in fp32.
    """
    keys = config.algorithm
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (config.model.path, config.teacher["large"].model)
    )
    loss, kl, num_tokens = torch.zeros(()), 0.0, 0
    for group in groups:
        offsets = group.offsets().tolist()
        for start, end in pairwise(offsets):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            trained = torch.from_numpy(group.trained[start + 1 : end])
            rewarded = group.advantages[start + 1 : end][trained.numpy()]
            logprobs = logprobs_of(policy, ids)[trained]
            with torch.no_grad():
                ratios = (logprobs_of(teacher, ids)[trained] - logprobs).double().tolist()
            kl -= sum(ratios)
            if keys.distill_clip is not None:
                ratios = [max(-keys.distill_clip, min(keys.distill_clip, d)) for d in ratios]
            for token in range(len(ratios)):
                later = sum(
                    keys.distill_discount ** (n - token) * ratios[n]
                    for n in range(token, len(ratios))
                )
                advantage = rewarded[token] + keys.distill_coef * later
                # with ratio 1 the clip's loss is -A and its gradient that of -A log p
                surrogate = logprobs[token] - logprobs[token].detach() + 1.0
                loss = loss - advantage * surrogate
            num_tokens += len(ratios)
    loss = loss / num_tokens
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item(), kl / num_tokens


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[None]).logits[0, :-1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("teacher", "keys"),
    [
        ("same shape", {}),
        ("larger", {}),
        ("larger", {"distill_clip": 0.7, "distill_discount": 0.9, "distill_coef": 0.3}),
    ],
)
def test_an_update_is_that_of_the_formula_on_transformers_models(
    backend: str, shared: bool, teacher: str, keys: dict[str, Any], models: dict[str, Path]
) -> None:
    """Beside the random advantages that the groups have: those of a reward."""
    config = config_of(models["policy"], models[teacher], backend, **keys)
    groups = make_groups(0, GROUPS, RESPONSES, seed=3)
    done = update(learner_of(config), groups, shared=shared)
    loss, norm, kl = by_formula(config, groups)
    assert done.report.loss == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert done.report.teacher_kl == pytest.approx(kl, rel=1e-4)
    changed = by_formula(config_of(models["policy"], models["policy"], **keys), groups)
    assert norm != pytest.approx(changed[1], rel=1e-2), "the teacher must show"


def without_credit(groups: list[Group]) -> list[Group]:
    return [replace(group, advantages=np.zeros_like(group.advantages)) for group in groups]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_teacher_with_the_policys_weights_changes_nothing(
    backend: str, models: dict[str, Path]
) -> None:
    groups = without_credit(make_groups(0, GROUPS, RESPONSES, seed=3))
    config = config_of(models["policy"], models["policy"], backend, distill_discount=1.0)
    report = update(learner_of(config), groups).report
    assert (report.teacher_kl, report.grad_norm, report.loss) == (0.0, 0.0, 0.0)
    other = config_of(models["policy"], models["same shape"], backend, distill_discount=1.0)
    assert update(learner_of(other), groups).report.grad_norm > 0.1


def test_no_cut_into_microbatches_changes_an_update(models: dict[str, Path]) -> None:
    config = config_of(models["policy"], models["larger"], distill_discount=0.9)
    groups = make_groups(0, GROUPS, RESPONSES, seed=4)
    whole, cut = (update(learner_of(config), groups, size).report for size in (RESPONSES, 1))
    assert whole.grad_norm == pytest.approx(cut.grad_norm, rel=1e-5)
    assert whole.loss == pytest.approx(cut.loss, rel=1e-5, abs=1e-6)


def test_passes_of_their_own_give_the_same_update(models: dict[str, Path]) -> None:
    config = config_of(models["policy"], models["larger"])
    trainer = config.trainer.model_copy(update={"frozen_pass": "separate"})
    groups = make_groups(0, GROUPS, RESPONSES, seed=4)
    together, separate = (
        update(learner_of(c), groups).report
        for c in (config, config.model_copy(update={"trainer": trainer}))
    )
    assert together.grad_norm == separate.grad_norm
    assert together.teacher_kl == separate.teacher_kl


def test_log_probs_of_other_weights_than_the_teachers_end_the_run(
    models: dict[str, Path],
) -> None:
    learner = learner_of(config_of(models["policy"], models["same shape"]))
    learner.skip_publish(0)
    learner.backend.copy_policy("teacher.large")
    pieces = build_microbatches(make_groups(0, 1, RESPONSES, seed=4)[0], RESPONSES, True, 1)
    with pytest.raises(InvariantViolation, match=r"I7 gradient: .* learns from the policy of"):
        learner.accumulate(Source(pieces))
    learner.backend.name_policy(FixedWeights(str(models["same shape"])), "teacher.large")
    learner.accumulate(Source(pieces))


def batch_of(seed: int) -> TokenBatch:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, 12)
    index = torch.from_numpy(np.repeat(np.arange(12), lengths))
    tokens = len(index)

    def normal(mean: float, deviation: float) -> torch.Tensor:
        return torch.from_numpy(random.normal(mean, deviation, tokens).astype(np.float32))

    logprobs = normal(-2.0, 0.5)
    return TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        entropy=torch.ones(tokens),
        old_logprobs=logprobs + normal(0.0, 0.3),
        reference_logprobs=logprobs + normal(0.0, 0.3),
        engine_logprobs=logprobs + normal(0.0, 0.3),
        advantages=normal(0.0, 1.0),
        weights=torch.ones(tokens),
        response_index=index,
        num_responses=12,
        group_size=4,
        columns={"teacher.large": logprobs + normal(0.0, 0.8)},
    )


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_second_calculation_of_the_gradient_agrees_with_autograd(
    discount: float, clip: float | None, loss: str, kl: float
) -> None:
    keys = {"distill_discount": discount, "distill_clip": clip, "loss": loss, "kl_coef": kl}
    algorithm = build_algorithm(config_of(Path("p"), Path("t"), **keys))
    looked_at = 0
    for seed in range(4):
        batch = batch_of(seed)
        (found,) = torch.autograd.grad(algorithm.loss_sums(batch).loss, batch.logprobs)
        expected = algorithm.expected_gradient(on_host(batch))
        errors = np.abs(found.double().numpy() - expected.values)
        assert not (expected.is_sure & ~(errors <= expected.limit)).any()
        looked_at += int(expected.is_sure.sum())
        other = replace(batch, columns={"teacher.large": batch.columns["teacher.large"] + 0.01})
        (moved,) = torch.autograd.grad(algorithm.loss_sums(other).loss, batch.logprobs)
        errors = np.abs(moved.double().numpy() - expected.values)
        assert (expected.is_sure & ~(errors <= expected.limit)).any(), "a hundredth must show"
    assert looked_at > 200


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
def test_discounted_sums_are_those_of_a_loop_within_each_response(discount: float) -> None:
    random = np.random.default_rng(2)
    lengths = [1, 7, 64, 3, 33]
    values = torch.from_numpy(random.standard_normal(sum(lengths)))
    index = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    expected = []
    for part in values.split(lengths):
        for token in range(len(part)):
            powers = discount ** torch.arange(len(part) - token, dtype=torch.float64)
            expected.append((part[token:] * powers).sum())
    torch.testing.assert_close(
        discounted_sums(values, index, discount), torch.stack(expected), rtol=1e-12, atol=1e-12
    )
    assert discounted_sums(values[:0], index[:0], discount).shape == (0,)


def test_a_teachers_own_shape_counts_in_the_trainers_memory(models: dict[str, Path]) -> None:
    spec = ModelSpec.read(str(models["policy"]))
    teacher = ModelSpec.read(str(models["larger"]))
    for backend in ("megatron", "fsdp"):
        config = config_of(models["policy"], models["larger"], backend)
        parts = dict(trainer_memory(config, spec).parts)
        assert parts["frozen models"] == pytest.approx(4 * teacher.num_parameters, rel=0.01)


TREE = {
    "model": {"path": "m"},
    "data": {"train": "t"},
    "algorithm": {"name": "distill"},
    "teacher": {"large": {"model": "d"}},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": {}}, r"algorithm.distill_coef: 1 \(of .*\) needs a teacher; set teacher.NAME"),
        (
            {"teacher": {"a": {"model": "d"}, "b": {"model": "e"}}},
            "teacher: a, b are 2, and nothing says which of them a row is for; set data.teacher_column",
        ),
        (
            {"data": {"train": "t", "teacher_column": "task"}},
            "data.teacher_column: task would be read by nothing, since there is one teacher",
        ),
        (
            {"data": {"train": "t", "teacher_column": "task"}, "algorithm": {}, "teacher": {}},
            "data.teacher_column: task would be read by nothing; name teachers",
        ),
        ({"algorithm": {"name": "grpo"}}, "teacher: large would be read by nothing; set"),
        (
            {"algorithm": {"name": "distill", "distill_coef": 0.0}},
            "teacher: large would be read by nothing",
        ),
        (
            {"algorithm": {"advantage": "no-reward"}, "teacher": {}},
            "algorithm.advantage: no-reward .* trains nothing",
        ),
        (
            {"algorithm": {"name": "online-dpo", "distill_coef": 0.5}},
            "algorithm.distill_coef: 0.5 with algorithm.loss=dpo, which is no policy gradient",
        ),
        (
            {"algorithm": {"distill_clip": 2.0}, "teacher": {}},
            "algorithm.distill_clip: 2.0 would be read by nothing; set algorithm.distill_coef",
        ),
        ({"teacher": {"large": {}}}, "teacher.large.model"),
    ],
)
def test_a_teacher_that_cannot_be_is_one_line(changes: dict[str, Any], words: str) -> None:
    assert checked(TREE).algorithm.distill_coef == 1.0
    with pytest.raises(ValueError, match=words):
        checked(TREE | changes)


def test_a_teacher_of_another_size_is_refused_where_it_cannot_be_used(
    models: dict[str, Path],
) -> None:
    spec = ModelSpec.read(str(models["policy"]))
    teacher = ModelSpec.read(str(models["larger"]))
    config = config_of(models["policy"], models["larger"])
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    assert longest == 528 > teacher.max_positions == 512
    teacher = replace(teacher, max_positions=528)
    check_teacher(config, spec, "teacher.large", teacher)
    with pytest.raises(ConfigError, match=r"teacher.large.model: .* has 100 tokens, fewer than"):
        check_teacher(config, spec, "teacher.large", replace(teacher, vocab_size=100))
    with pytest.raises(ConfigError, match=r"teacher.large.model: .* has 64 positions, fewer than"):
        check_teacher(config, spec, "teacher.large", replace(teacher, max_positions=64))
    halves = config.trainer.model_copy(update={"devices": 2, "pipeline_parallel": 2})
    with pytest.raises(ConfigError, match=r"teacher.large.model: trainer.pipeline_parallel: 2"):
        check_teacher(config.model_copy(update={"trainer": halves}), spec, "teacher.large", teacher)


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._tokens)}


def test_vocabularies_are_compared_token_by_token() -> None:
    ours = Vocabulary("a", "b", "c")
    check_vocabularies("teacher.x", "dir", ours, Vocabulary("a", "b", "c"))
    check_vocabularies("teacher.x", "dir", ours, Vocabulary("a", "b", "c", "further"))
    for theirs, words in (
        (Vocabulary("a", "c", "b"), "token 1 is 'b' of the policy and 'c' there; 2 of 3"),
        (Vocabulary("a", "b"), "token 2 is 'c' of the policy and no such token; 1 of 3"),
    ):
        with pytest.raises(DataError, match=f"teacher.x.model: dir: {words}"):
            check_vocabularies("teacher.x", "dir", ours, theirs)
