"""Held-out rows: packed as training is, dealt to replicas, and their loss is transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.held_out import HELD_OUT_LOSS, HELD_OUT_SETS
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.held_out_loss import HeldOutLosses
from pa_npu.data.row_sets import Row, RowSet
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.microbatch import filled
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.held_out import HeldOutRows
from pa_npu.trainer.learner import Learner
from tests.helpers.backend import make_learner
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model

ROWS = 7
NO_TIMES = Timeline(None, "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)
    with single_process(model_config(path)):
        yield path


def rows() -> list[Row]:
    """Of 10 to 22 tokens, the last four of which are trained; a third begins alike."""
    rng = np.random.default_rng(2)
    made = []
    for number in range(ROWS):
        beginning = np.arange(3, 9) + number % 3
        tokens = np.concatenate([beginning, rng.integers(3, 60, rng.integers(4, 16))])
        weight = np.zeros(len(tokens), np.float32)
        weight[-4:] = 0.5  # no weight counts where rows are held out
        made.append(Row(number, tokens.astype(np.int32), weight, "", 0))
    return made


def config_of(model: Path, **sections: Any) -> Config:
    return model_config(
        model,
        algorithm={"name": "sft"},
        rollout={"responses_per_prompt": 4, "max_response_tokens": 32},
        **sections,
    )


def sent(config: Config) -> StoreChannel:
    """A store with the set that the coordinator sends."""
    channel = StoreChannel(dist.HashStore())
    held_out: Any = RowSet("held_out.jsonl", tuple(rows()), ROWS, 0, 0, "")
    nothing: Any = None
    HeldOutLosses(config, channel, {"test": held_out}, nothing, NO_TIMES, nothing).send()
    return channel


def learner_of(config: Config) -> Learner:
    if config.trainer.backend == "megatron":
        return make_learner(config)[0]
    module = backend_module(config.trainer.backend)
    spec = ModelSpec.read(config.model.path)
    backend = module.create(config, spec, PLATFORM, dist.HashStore(), 0, 0, NO_TIMES)
    return Learner(config, backend, PLATFORM, NO_TIMES)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("microbatch", "num_microbatches"),
    [({}, 2), ({"responses": 1}, 7), ({"responses": 1, "max_tokens": 64}, 2)],
    ids=["groups", "apart", "packed"],
)
def test_the_loss_of_held_out_rows_is_transformers_own_however_they_are_packed(
    backend: str, microbatch: dict[str, int], num_microbatches: int, model: Path
) -> None:
    config = config_of(model, trainer={"backend": backend}, microbatch=microbatch)
    channel = sent(config)
    (held_out,) = HELD_OUT_SETS.get(channel).sets
    assert (len(held_out.microbatches), held_out.rows) == (num_microbatches, ROWS)
    HeldOutRows(config, learner_of(config), channel, NO_TIMES, Milestones(last=1)).at_border(0)
    loss = HELD_OUT_LOSS.get(channel, version=0).means["test"]["loss"]

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for row in rows():
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        labels = torch.where(torch.from_numpy(row.weight != 0), ids, -100)
        total += 4 * policy(ids[None], labels=labels[None]).loss.item()
    assert loss == pytest.approx(total / (4 * ROWS), rel=1e-5)


def test_replicas_compute_equally_many_microbatches_and_count_each_once(model: Path) -> None:
    config = config_of(
        model,
        microbatch={"responses": 1},
        trainer={"devices": 3},
        schedule={"prompts_per_iteration": 3},
    )
    channel = sent(config)
    (held_out,) = HELD_OUT_SETS.get(channel).sets
    counted: list[int] = []
    computed = []
    for replica in range(3):
        place = SimpleNamespace(place=SimpleNamespace(replica=replica, rank=replica))
        learner: Any = SimpleNamespace(backend=place)
        share = HeldOutRows(config, learner, channel, NO_TIMES, Milestones(last=1))._share(held_out)
        computed.append(len(share.microbatches))
        counted += [m.group_indices[0] for m in share.microbatches[: share.counted]]
    assert sorted(counted) == list(range(ROWS))
    assert computed == [3, 3, 3]


def test_microbatches_are_filled_in_order_and_none_beyond_its_budget() -> None:
    assert filled([4, 4, 4, 9, 1, 1], 8, 1) == [2, 1, 1, 2], "9 goes alone"
    assert filled([4, 3, 1], 7, 4) == [1, 2], "padding to a multiple of 4 leaves 4 of 7"
    assert filled([4, 4], None, 1) == [1, 1]
    assert filled([], 8, 1) == []
