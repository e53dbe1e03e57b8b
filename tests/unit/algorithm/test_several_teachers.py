"""Several teachers in one run: each row's tokens are compared with its own teacher, which alone computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.checkpoints.provenance import model_fingerprint, models_fingerprint
from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.data.teachers import check_teacher_names, teacher_number
from pa_npu.errors import DataError
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches, pack
from pa_npu.samples.rollout_buffer import run_columns, trained_columns
from pa_npu.samples.teachers import teacher_column, with_teacher
from pa_npu.trainer.learner import Learner
from tests.helpers.backend import Source
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups
from tests.unit.algorithm.test_distillation import (
    GROUPS,
    RESPONSES,
    config_of,
    learner_of,
    logprobs_of,
    without_credit,
)

NAMES = ("math", "code")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    made = {
        "policy": make_model(tmp_path_factory.mktemp("policy"), tied=True),
        "math": make_model(tmp_path_factory.mktemp("math"), tied=True, seed=1),
        "code": make_model(tmp_path_factory.mktemp("code"), "llama", seed=2, hidden=128, layers=3),
    }
    with single_process(model_config(made["policy"])):
        yield made


def config_with(models: dict[str, Path], backend: str = "megatron", **keys: Any) -> Config:
    config = config_of(models["policy"], models["policy"], backend, **keys)
    tree = config.model_dump(exclude_unset=True)
    tree["data"]["teacher_column"] = "task"
    tree["teacher"] = {
        "math": {"model": str(models["math"])},
        "code": {"model": str(models["code"]), "weight": 0.25},
    }
    return Config.model_validate(tree)


def groups_of(config: Config) -> tuple[list[Group], list[str]]:
    """Groups without credit, and the name of each one's teacher."""
    column = teacher_column(config)
    assert column is not None
    groups, names = [], ["code", "math", "code"]
    for group, name in zip(
        without_credit(make_groups(0, GROUPS, RESPONSES, seed=3)), names, strict=True
    ):
        values = np.where(group.trained, NAMES.index(name) + 1, 0).astype(np.uint8)
        groups.append(replace(group, columns={column: values}))
    return groups, names


def gradient_norm(learner: Learner, microbatches: Sequence[Microbatch]) -> float:
    learner.skip_publish(0)
    learner.accumulate(Source(microbatches))
    return float(learner.step().report.grad_norm)


def by_formula(config: Config, groups: Sequence[Group], names: Sequence[str]) -> float:
    """Norm of the gradient by transformers' models on one response after another."""
    policy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    loss, num_tokens = torch.zeros(()), 0
    for group, name in zip(groups, names, strict=True):
        keys = config.teacher[name]
        teacher = AutoModelForCausalLM.from_pretrained(keys.model, dtype=torch.float32)
        for start, end in pairwise(group.offsets().tolist()):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            trained = torch.from_numpy(group.trained[start + 1 : end])
            logprobs = logprobs_of(policy, ids)[trained]
            with torch.no_grad():
                advantages = keys.weight * (logprobs_of(teacher, ids)[trained] - logprobs)
            loss = loss - (advantages * logprobs).sum()
            num_tokens += len(logprobs)
    (loss / num_tokens).backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_each_rows_tokens_learn_from_its_own_teacher_with_its_weight(
    backend: str, models: dict[str, Path]
) -> None:
    config = config_with(models, backend)
    groups, names = groups_of(config)
    apart = [m for group in groups for m in build_microbatches(group, RESPONSES, True, 1)]
    expected = by_formula(config, groups, names)
    assert gradient_norm(learner_of(config), apart) == pytest.approx(expected, rel=1e-4)
    mixed = gradient_norm(learner_of(config), [pack(groups, True, 1)])
    assert mixed == pytest.approx(expected, rel=1e-4), "rows of two teachers in a microbatch"
    swapped = by_formula(config, groups, ["math", "code", "math"])
    assert expected != pytest.approx(swapped, rel=1e-2), "which teacher must show"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_divergence_takes_each_rows_choices_from_its_own_teacher(
    backend: str, models: dict[str, Path]
) -> None:
    """Two groups of one teacher alone give what a run with that teacher gives."""
    keys = {"distill_divergence": "forward", "distill_top_k": 6}
    config = config_with(models, backend, **keys)
    groups, _ = groups_of(config)
    of_code = [groups[0], replace(groups[2], index=1)]
    found = gradient_norm(learner_of(config), [pack(of_code, True, 1)])
    one = config_of(models["policy"], models["code"], backend, **keys, distill_coef=0.25)
    plain = [replace(group, columns={}) for group in of_code]
    expected = gradient_norm(learner_of(one), [pack(plain, True, 1)])
    assert found == pytest.approx(expected, rel=1e-5)
    together = gradient_norm(learner_of(config), [pack(groups, True, 1)])
    cut = [m for group in groups for m in build_microbatches(group, RESPONSES, True, 1)]
    assert gradient_norm(learner_of(config), cut) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_teacher_computes_no_microbatch_of_another_ones_rows(
    backend: str, models: dict[str, Path]
) -> None:
    config = config_with(models, backend)
    groups, names = groups_of(config)
    learner = learner_of(config)
    computed: list[str] = []
    for name in NAMES:
        model = _model(learner, f"teacher.{name}")
        model.register_forward_pre_hook(lambda *_, name=name: computed.append(name))
    cut = [m for group in groups for m in build_microbatches(group, RESPONSES, True, 1)]
    gradient_norm(learner, cut)
    assert computed == names


def _model(learner: Learner, name: str) -> torch.nn.Module:
    backend: Any = learner.backend
    models = backend._models if hasattr(backend, "_models") else backend._stage.frozen
    model: torch.nn.Module = models[name]
    return model


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt(7, np.array([3, 4], np.int32), "", "", row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "row 7: column task .* is missing, which is no key of `teacher`"),
        ({"task": "maths"}, "is 'maths', which is no key of `teacher`; .*math"),
        ({"task": 1}, "is 1, which is no key of"),
        ({"task": ["math"]}, "which is no key of"),
    ],
)
def test_a_row_without_a_teacher_of_the_run_is_one_line(
    row: dict[str, Any], words: str, models: dict[str, Path]
) -> None:
    config = config_with(models)
    right = prompt_of({"task": "code"})
    check_teacher_names([right], "train.jsonl", config)
    assert teacher_number(right, config) == 2
    with pytest.raises(DataError, match=words):
        check_teacher_names([right, prompt_of(row)], "train.jsonl", config)


def test_the_column_travels_to_trainers(models: dict[str, Path]) -> None:
    config = config_with(models)
    column = teacher_column(config)
    assert column in run_columns(config).carried and trained_columns(config).wants(column)
    samples = make_groups(0, 1, RESPONSES, seed=3)[0].samples([""] * RESPONSES)
    for sample in with_teacher(samples, 2):
        assert np.array_equal(sample.columns[column], np.where(sample.component != 0, 2, 0))
    one = config_of(models["policy"], models["math"])
    assert teacher_column(one) is None and not run_columns(one).carried


def test_the_chains_model_is_another_one_with_another_teacher(models: dict[str, Path]) -> None:
    one, other = (config_of(models["policy"], models[name]) for name in NAMES)
    assert models_fingerprint(one) != models_fingerprint(other)
    alone = model_config(models["policy"])
    assert models_fingerprint(alone) == model_fingerprint(models["policy"])
