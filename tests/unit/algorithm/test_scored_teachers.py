"""A teacher that engines compute trains as one that trainers hold: its log-probs and likely tokens come as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.algorithm import NeededModel
from pa_npu.algorithm.choices import CHOICES_COLUMN, by_target, chosen_tokens
from pa_npu.algorithm.distillation import TEACHER_COLUMN
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.config.schema import Config
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import run_columns, trained_columns
from pa_npu.samples.teachers import score_columns, without_scores
from tests.helpers.algorithms import checked
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups
from tests.unit.algorithm.test_distillation import (
    GROUPS,
    RESPONSES,
    TEMPERATURE,
    config_of,
    learner_of,
    update,
    without_credit,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    made = {
        "policy": make_model(tmp_path_factory.mktemp("policy"), tied=True),
        "larger": make_model(
            tmp_path_factory.mktemp("larger"), "llama", seed=2, hidden=128, layers=3
        ),
    }
    with single_process(model_config(made["policy"])):
        yield made


def with_engines(config: Config) -> Config:
    """The same run, whose teacher has an engine."""
    tree = config.model_dump(exclude_unset=True)
    tree["teacher"]["large"]["engines"] = 1
    return Config.model_validate(tree)


def scored(config: Config, groups: list[Group]) -> list[Group]:
    """The groups with what transformers' model of the teacher says of their tokens."""
    path = config.teacher["large"].model
    teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    count = config.scored_choices
    found = []
    for group in groups:
        columns = {column: column.blank(len(group.tokens)) for column in score_columns(config)}
        for start, end in pairwise(group.offsets().tolist()):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            with torch.no_grad():
                logits = teacher(ids[None]).logits[0, :-1] / TEMPERATURE
            logprobs = logits.log_softmax(-1)
            top = logprobs.topk(max(count, 1), -1)
            rest = (1 - top.values.double().exp().sum(-1)).clamp(min=1e-6).log().float()
            values = (
                logprobs.gather(1, ids[1:, None])[:, 0],
                top.indices,
                torch.cat([top.values, rest[:, None]], 1),
            )
            trained = group.trained[start + 1 : end]
            for column, value in zip(columns, values, strict=False):
                columns[column][start + 1 : end][trained] = value.numpy()[trained]
        found.append(replace(group, columns=columns))
    return found


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    "keys",
    [
        {"distill_clip": 0.7, "distill_discount": 0.9, "distill_coef": 0.3},
        {"distill_divergence": "forward", "distill_top_k": 6},
        {"distill_divergence": "js", "distill_top_k": 5, "distill_beta": 0.3},
    ],
)
def test_an_update_is_that_of_the_same_teacher_in_the_trainers(
    backend: str, keys: dict[str, Any], models: dict[str, Path]
) -> None:
    held = config_of(models["policy"], models["larger"], backend, **keys)
    config = with_engines(held)
    assert not trainer_models(config).directories, "trainers hold none"
    groups = without_credit(make_groups(0, GROUPS, RESPONSES, seed=3))
    expected = update(learner_of(held), groups).report
    with_scores = scored(config, groups)
    report = update(learner_of(config), with_scores).report
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert report.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
    assert report.teacher_kl == pytest.approx(expected.teacher_kl, rel=1e-4)
    cut = update(learner_of(config), with_scores, 1, shared=False).report
    assert cut.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)
    if report.teacher_divergence is not None:
        assert report.teacher_divergence == pytest.approx(expected.teacher_divergence, rel=1e-3)
    blind = [replace(group, columns=_moved(group)) for group in with_scores]
    other = update(learner_of(config), blind).report
    assert other.grad_norm != pytest.approx(report.grad_norm, rel=2e-3), "the scores must show"


def _moved(group: Group) -> dict[Any, Any]:
    """The group's scores, each at the place of another token."""
    moved = {}
    for column, values in group.columns.items():
        moved[column] = values.copy()
        moved[column][group.trained] = np.roll(values[group.trained], 1, axis=0)
    return moved


def test_a_teacher_like_the_policy_teaches_rounding_alone(models: dict[str, Path]) -> None:
    for keys in ({}, {"distill_divergence": "reverse", "distill_top_k": 8}):
        config = with_engines(config_of(models["policy"], models["policy"], **keys))
        groups = scored(config, without_credit(make_groups(0, GROUPS, RESPONSES, seed=3)))
        report = update(learner_of(config), groups).report
        assert abs(report.teacher_kl) < 1e-6 and report.grad_norm < 2e-5


def test_the_columns_travel_and_rows_without_a_teacher_have_blank_ones(
    models: dict[str, Path],
) -> None:
    keys = {"distill_divergence": "forward", "distill_top_k": 6}
    config = with_engines(config_of(models["policy"], models["larger"], **keys))
    columns = score_columns(config)
    assert [column.shape for column in columns] == [(), (6,), (7,)]
    assert set(columns) <= set(run_columns(config).carried)
    assert all(trained_columns(config).wants(column) for column in columns)
    samples = make_groups(0, 1, RESPONSES, seed=3)[0].samples([""] * RESPONSES)
    blank = without_scores(samples, columns)[0].columns
    assert (blank[columns[1]] == -1).all() and not blank[columns[0]].any()
    assert not score_columns(config_of(models["policy"], models["larger"], **keys))


@pytest.mark.parametrize(
    ("teacher", "sections", "line"),
    [
        ({}, {}, r"teacher\.large\.model: is missing"),
        ({"model": "m", "url": "http://h:1"}, {}, "are several teachers in one"),
        ({"url": "host:80"}, {}, r"url: 'host:80' is no URL"),
        ({"model": "m", "tensor_parallel": 2}, {}, "tensor_parallel: 2 would be read by nothing"),
        ({"url": "http://h:1", "engines": 2}, {}, "engines: 2 would be read by nothing"),
        ({"model": "m", "hint_text": "x {hint}"}, {}, "hint_text: would be read by nothing"),
        ({"hint_column": "h", "hint_text": "x"}, {}, r"does not contain \{hint\}"),
        ({"hint_column": "h"}, {"environment": {"name": "agents"}}, "whose prompts are made by"),
        (
            {"hint_column": "h", "max_prompt_tokens": 40000},
            {},
            "tokens of a prompt with its hint and a response",
        ),
        (
            {"model": "m", "engines": 1},
            {"placement": {"cluster": "ray"}},
            "engines on this machine only",
        ),
    ],
)
def test_a_teacher_that_cannot_be_is_one_line(
    teacher: dict[str, Any], sections: dict[str, Any], line: str
) -> None:
    tree = {
        "run": {"device": "cpu"},
        "model": {"path": "m", "dtype": "fp32"},
        "data": {"train": "t"},
        "algorithm": {"name": "distill"},
        "teacher": {"large": teacher},
        **sections,
    }
    with pytest.raises(ValueError, match=line):
        checked(tree)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x1b[0m"])
def test_a_name_that_no_line_can_hold_is_refused(name: str) -> None:
    tree = {
        "run": {"device": "cpu"},
        "model": {"path": "m", "dtype": "fp32"},
        "data": {"train": "t"},
        "algorithm": {"name": "distill"},
    }
    assert checked(tree | {"teacher": {"openai/gsm8k": {"model": "m"}}}).teacher
    with pytest.raises(ValueError, match="is no name of a teacher"):
        checked(tree | {"teacher": {name: {"model": "m"}}})


def test_a_probe_has_choices_whichever_of_several_engines_teachers_come() -> None:
    """Nothing says there whose targets these are; with the column each target has its teacher's."""
    names = ("teacher.a", "teacher.b")
    teachers = [
        NeededModel(
            name,
            "a scoring engine",
            computed_by="engines",
            num_choices=3,
            targets=(TEACHER_COLUMN, number),
        )
        for number, name in enumerate(names, start=1)
    ]
    targets = torch.zeros(4, dtype=torch.int64)
    probe = chosen_tokens(teachers, {}, {}, targets)
    assert probe is not None and torch.equal(probe, torch.arange(3).expand(4, -1))
    sent = torch.tensor([[7, 8, 9]] * 2 + [[4, 5, 6]] * 2)
    columns = {TEACHER_COLUMN: torch.tensor([1, 1, 2, 2]), CHOICES_COLUMN: sent}
    found = chosen_tokens(teachers, columns, {}, targets)
    assert found is not None and torch.equal(found, sent)
    values = {name: torch.full((4,), float(number)) for number, name in enumerate(names)}
    merged = by_target(teachers, columns, values)
    assert merged is not None and merged.tolist() == [0, 0, 1, 1]
