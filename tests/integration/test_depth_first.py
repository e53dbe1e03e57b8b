"""Prompts that are computed once for several microbatches, on several ranks: the training of prompts computed in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job
from tests.integration.test_context_parallel import assert_same_training, job, weights

pytestmark = pytest.mark.integration

PROMPT = 400
RESPONSES = 4


def long_job(
    model: Path, directory: Path, trainer: dict[str, Any], depth_first: bool, **sections: Any
) -> Job:
    """Two iterations of two updates with a reference and an old policy, a response a microbatch."""
    prepared = job(
        model,
        directory,
        trainer,
        data={"max_prompt_tokens": PROMPT},
        microbatch={"responses": 1, "depth_first": depth_first},
        **sections,
    )
    prepared.options["prompt_tokens"] = PROMPT
    return prepared


@pytest.mark.parametrize(
    ("trainer", "sections"),
    [
        pytest.param({"backend": "fsdp", "devices": 2, "recompute": "full"}, {}, id="fsdp"),
        pytest.param(
            {"backend": "fsdp", "devices": 2},
            {"lora": {"rank": 3}},
            id="fsdp, adapters",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"devices": 2, "tensor_parallel": 2, "recompute": "full"},
            {},
            id="TP 2",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"devices": 2, "frozen_pass": "separate"},
            {},
            id="two replicas, separate frozen passes",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_ranks_train_as_with_the_prompt_in_each_microbatch_and_repeat_to_the_bit(
    trainer: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    if "lora" in sections:
        sections = {**sections, "checkpoint": {"export_hf": "merged"}}
    of_each = run_job(long_job(model, tmp_path / "each", trainer, False, **sections))
    once = run_job(long_job(model, tmp_path / "once", trainer, True, **sections))
    # a hundredth of each of the four updates
    assert_same_training(
        tmp_path / "each" / "hf", tmp_path / "once" / "hf", of_each, once, atol=4e-5
    )
    for each, of_once in zip(of_each, once, strict=True):
        saved = each["tokens_computed"] - of_once["tokens_computed"]
        stem = PROMPT - 2 if trainer.get("tensor_parallel") else PROMPT - 1
        assert saved == 4 * (RESPONSES - 1) * stem
    again = run_job(long_job(model, tmp_path / "again", trainer, True, **sections))
    assert [r["grad_norm"] for r in again] == [r["grad_norm"] for r in once]
    first = weights(tmp_path / "once" / "hf")
    second = weights(tmp_path / "again" / "hf")
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
