"""The supervised stage: its update is that of transformers' own loss on the same masked rows, on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.coordinator.row_groups import group_of
from pa_npu.data.row_sets import Row
from pa_npu.data.row_stream import RowGroup, groups_of_rows
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner, Update
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model

RATE, ROWS, SIZE = 3e-3, 12, 4
IGNORED = -100  # transformers' label of a token that is not trained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def config_of(model: Path, backend: str = "megatron", **sections: Any) -> Config:
    return model_config(
        model,
        **{
            "algorithm": {"name": "sft"},
            "trainer": {"backend": backend},
            "rollout": {"responses_per_prompt": SIZE, "max_response_tokens": 32},
            "schedule": {"prompts_per_iteration": ROWS // SIZE},
            "optimizer": {"learning_rate": RATE, "clip_grad": 0.0, "epsilon": 1e-3},
            **sections,
        },
    )


def learner_of(config: Config) -> Learner:
    if config.trainer.backend == "megatron":
        return make_learner(config)[0]
    spec, timeline = ModelSpec.read(config.model.path), Timeline(None, "")
    module = backend_module(config.trainer.backend)
    backend = module.create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)
    return Learner(config, backend, PLATFORM, timeline)


def rows(*, weighted: bool = False) -> list[Row]:
    """Conversations of two turns, half of which begin alike, the answers of which are trained."""
    rng = np.random.default_rng(5)
    made = []
    for number in range(ROWS):
        beginning = np.arange(3, 12) + (0 if number % 2 else 30)
        parts = [beginning, *(rng.integers(3, 60, rng.integers(3, 9)) for _ in range(3))]
        tokens = np.concatenate(parts).astype(np.int32)
        weight = np.concatenate(
            [np.full(len(part), float(n % 2), np.float32) for n, part in enumerate(parts)]
        )
        if weighted:
            weight *= 0.25 + number % 3
        made.append(Row(number, tokens, weight, "", 0))
    return made


def groups_for(config: Config, given: list[Row]) -> list[Group]:
    algorithm = build_algorithm(config)
    return [
        group_of(prompt, algorithm).group(1, 0, number, algorithm.credit)
        for number, prompt in enumerate(groups_of_rows(given, SIZE))
    ]


def update(learner: Learner, groups: list[Group], size: int = SIZE, shared: bool = True) -> Update:
    pieces = [one for group in groups for one in build_microbatches(group, size, shared, 1)]
    source = Source(pieces)
    learner.skip_publish(0)
    learner.accumulate(source)
    return learner.step()


def by_transformers(model: Path, given: list[Row]) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, norm of its gradient and weights after AdamW's step of transformers' model and its own
    loss on one padded batch, in fp32.
    """
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    longest = max(len(row.tokens) for row in given)
    ids = torch.zeros(len(given), longest, dtype=torch.int64)
    labels = torch.full((len(given), longest), IGNORED)
    mask = torch.zeros(len(given), longest, dtype=torch.int64)
    for number, row in enumerate(given):
        length = len(row.tokens)
        ids[number, :length] = torch.from_numpy(row.tokens.astype(np.int64))
        mask[number, :length] = 1
        labels[number, :length] = torch.where(
            torch.from_numpy(row.weight != 0), ids[number, :length], IGNORED
        )
    loss = policy(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    optimizer.step()
    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    return loss.item(), norm.item(), weights


def exported(learner: Learner, directory: Path) -> dict[str, torch.Tensor]:
    learner.backend.export(directory)
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_update_is_that_of_transformers_own_loss(
    backend: str, shared: bool, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, backend)
    given = rows()
    learner = learner_of(config)
    done = update(learner, groups_for(config, given), shared=shared)
    loss, norm, weights = by_transformers(model, given)
    assert done.report.loss == pytest.approx(loss, rel=1e-5)
    assert done.report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert done.normaliser == sum(row.num_trained for row in given)
    mine = exported(learner, tmp_path)
    assert mine.keys() <= weights.keys() and len(mine) > 10
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor.float(), weights[name], rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
    everything = [Row(r.row_id, r.tokens, np.ones_like(r.weight), "", 0) for r in given]
    other, _, _ = by_transformers(model, everything)
    assert loss != pytest.approx(other, rel=1e-3), "the mask must show"


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_weights_multiply_the_tokens_of_their_rows(backend: str, model: Path) -> None:
    config, given = config_of(model, backend), rows(weighted=True)
    done = update(learner_of(config), groups_for(config, given))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = torch.zeros(())
    for row in given:
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        logprobs = policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (logprobs * torch.from_numpy(row.weight[1:])).sum()
    loss = total / sum(row.num_trained for row in given)
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    assert done.report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert done.report.grad_norm == pytest.approx(
        torch.stack(squares).sum().sqrt().item(), rel=1e-4
    )


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_no_cut_into_microbatches_changes_an_update(aggregation: str, model: Path) -> None:
    """I3, with weights: pieces of one, two and four rows."""
    config = config_of(model, algorithm={"name": "sft", "aggregation": aggregation})
    groups = groups_for(config, rows(weighted=True))
    updates = [update(learner_of(config), groups, size) for size in (1, 2, 4)]
    for other in updates[1:]:
        assert other.normaliser == updates[0].normaliser
        assert other.report.loss == pytest.approx(updates[0].report.loss, rel=1e-5)
        assert other.report.grad_norm == pytest.approx(updates[0].report.grad_norm, rel=1e-5)


def test_rows_that_begin_alike_are_computed_once(model: Path) -> None:
    given = rows()
    groups = groups_for(config_of(model), given)
    (packed,) = build_microbatches(groups[0], SIZE, True, 1)
    (apart,) = build_microbatches(groups[0], SIZE, False, 1)
    assert len(packed.tokens) < len(apart.tokens)
    assert isinstance(groups_of_rows(given, SIZE)[0], RowGroup)


def test_a_report_says_nothing_of_a_policy_that_wrote_rows(model: Path) -> None:
    config = config_of(model)
    report = update(learner_of(config), groups_for(config, rows())).report
    assert (report.kl, report.clip_ratio, report.logprob_diff_mean) == (None, None, None)
    assert report.entropy > 0
