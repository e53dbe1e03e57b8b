"""Observations: what an environment shows is trained by cross-entropy at a small weight, and nothing else changes."""

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

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.samples.columns import NO_VERSION
from pa_npu.samples.group import Group
from tests.helpers.algorithms import checked
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import make_groups
from tests.unit.algorithm.test_demonstrations import GROUPS, SIZE, learner_of, update

WEIGHT = 0.125


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def config_of(model: Path, backend: str, observations: dict[str, float]) -> Config:
    return model_config(
        model,
        environment={"name": "own:Environment", "observations": observations},
        trainer={"backend": backend},
        rollout={"responses_per_prompt": SIZE, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": GROUPS},
        optimizer={"clip_grad": 0.0},
        publish={"noise_margin": None},
    )


def with_observations(group: Group, component: int) -> Group:
    """The second token behind each prompt becomes the environment's, trained by this component."""
    shown = np.zeros(len(group.tokens), np.bool_)
    for start, end in pairwise(group.offsets().tolist()):
        shown[start + int(group.trained[start:end].argmax()) + 1] = True
    weight = np.where(shown & (component > 0), WEIGHT, 1.0).astype(np.float32)
    return replace(
        group,
        component=np.where(shown, component, group.component).astype(np.uint8),
        versions=np.where(shown, NO_VERSION, group.versions).astype(np.int32),
        logprobs=np.where(shown, 0, group.logprobs).astype(np.float32),
        advantages=np.where(shown, 0, group.advantages).astype(np.float32),
        weight=weight if component else None,
    )


def by_hand(model: Path, groups: list[Group]) -> tuple[float, float, float]:
    """Loss, the observations' part of it, and the gradient's norm, by transformers' model."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rewarded, shown, count = torch.zeros(()), torch.zeros(()), 0
    for group in groups:
        for start, end in pairwise(group.offsets().tolist()):
            ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
            logits = policy(ids[None]).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            component = torch.from_numpy(group.component[start + 1 : end])
            advantages = torch.from_numpy(group.advantages[start + 1 : end])
            ratio = (logprobs - logprobs.detach()).exp()
            rewarded = rewarded - (advantages * ratio)[component == 1].sum()
            shown = shown - WEIGHT * logprobs[component == 2].sum()
            count += int((component == 1).sum())
    loss = (rewarded + shown) / count
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    return loss.item(), shown.item() / count, torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_update_is_the_formula_by_hand(backend: str, model: Path) -> None:
    config = config_of(model, backend, {"tool": WEIGHT})
    part = build_algorithm(config).observations
    assert part is not None and part.number == 2 and not part.needs_provenance
    groups = make_groups(0, GROUPS, SIZE, seed=7)
    taught = [with_observations(group, part.number) for group in groups]
    done = update(learner_of(config), taught)
    loss, shown, norm = by_hand(model, taught)
    assert done.report.loss == pytest.approx(loss, rel=1e-5)
    assert done.report.observation_loss == pytest.approx(shown, rel=1e-5)
    assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    silent = [with_observations(group, 0) for group in groups]
    other = update(learner_of(config_of(model, backend, {})), silent)
    assert other.normaliser == done.normaliser, "the policy's tokens alone are counted"
    assert other.report.observation_loss is None
    assert other.report.loss == pytest.approx(loss - shown, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"environment": {"observations": {"tool": 0.1}}}, "single_turn, which shows no tokens"),
        (
            {"environment": {"name": "tools", "observations": {"user": 0.1}}},
            "shows the role tool alone",
        ),
        (
            {
                "environment": {"name": "tools", "observations": {"tool": 0.1}},
                "algorithm": {"name": "online-dpo"},
            },
            "beside algorithm.loss = dpo",
        ),
    ],
)
def test_what_cannot_be_observed_is_one_line(sections: dict[str, Any], line: str) -> None:
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, **sections}
    with pytest.raises(ValueError, match=line):
        checked(tree)
