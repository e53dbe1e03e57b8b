"""Engines of two workers (rollout.tensor_parallel) get what a trainer publishes, whoever shards it how."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pa_npu.telemetry.records import read_records
from tests.helpers.launched import random_tiny
from tests.helpers.rank_processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fsdp": ((), ("trainer.backend=fsdp", "trainer.devices=2")),
    "adapters": ((), ("trainer.backend=fsdp", "lora.rank=4", "optimizer.learning_rate=1e-2")),
    "mixture": (("--family", "qwen3_moe"), ("trainer.devices=2", "trainer.expert_parallel=2")),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_agree_after_each_publish(tmp_path: Path, case: str) -> None:
    model, keys = CASES[case]
    tiny = random_tiny(tmp_path, *model)
    command = [
        sys.executable,
        "-m",
        "pa_npu.launcher",
        "run",
        "--config",
        str(ROOT / "configs" / "grpo_tiny.yaml"),
    ]
    command += [
        f"run.dir={tmp_path}/run",
        f"model.path={tiny}/model",
        f"data.train={tiny}/train.jsonl",
        "data.test=null",
    ]
    command += [
        "rollout.tensor_parallel=2",
        "schedule.iterations=3",
        "schedule.prompts_per_iteration=8",
    ]
    command += [
        "telemetry.trackers=[]",
        'reward.functions=[{name: format, pattern: "[0-4]"}]',
        *keys,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = read_records(tmp_path / "run")
    assert len(records) == 3 and records[0]["grad_norm"] > 0, "later publishes have trained weights"
    for record in records:
        assert record["logprob_diff_mean"] < 2e-6 and record["logprob_diff_max"] < 1e-4, record
