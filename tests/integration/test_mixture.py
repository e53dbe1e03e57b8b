"""A mixture of experts in real engines and in whole runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launched import random_tiny
from tests.helpers.models import make_model
from tests.helpers.rank_processes import ROOT
from tools import make_tiny_model

pytestmark = pytest.mark.integration
REPAIR = "kernel.process_weights_after_loading(experts)"


def test_vllm_computes_new_experts_after_a_reload_only_because_they_are_packed_again(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, "qwen3_moe", seed=seed, hidden=128) for seed, name in enumerate("ab")]
    command = [sys.executable, "-m", "tests.helpers.vllm_mixture", *map(str, models), str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["loaded"] < 1e-5 and found["with it"] < 1e-5, found
    assert "no weights for 2 parameter(s) of the engine, the first is 'model.layers.1.mlp.experts" in found["missing"]
    assert found["without the repair"] > 0.1, f"the reload has become right by itself: {found}"


def quick_start(tiny: Path, directory: Path, *keys: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The quick start's run of a model, with the package in `root`."""
    command = [sys.executable, "-m", "pa_npu.launcher", "run", "--config", str(ROOT / "configs" / "grpo_tiny.yaml")]
    command += [f"run.dir={directory}", f"model.path={tiny}/model", f"data.train={tiny}/train.jsonl"]
    command += [f"data.test={tiny}/test.jsonl", f"rollout.python={sys.executable}", "telemetry.trackers=[]", *keys]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1500)


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_tiny_mixture_learns_the_quick_starts_sums(tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    assert make_tiny_model.main(["--out", str(tiny), "--family", "qwen3_moe"]) == 0
    done = quick_start(tiny, tmp_path / "run", "schedule.iterations=12")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records, evaluations = lines(tmp_path / "run/metrics.jsonl"), lines(tmp_path / "run/evaluations.jsonl")
    assert evaluations[-1]["accuracy"] > evaluations[0]["accuracy"] + 0.3, evaluations
    for record in records:
        assert record["logprob_diff_mean"] < 2e-6 and record["logprob_diff_max"] < 1e-4, record
        assert record["experts_untouched"] == 0 and 1 <= record["expert_imbalance"] <= record["expert_imbalance_max"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_whose_experts_are_not_packed_again_is_stopped(tmp_path: Path) -> None:
    tiny, root = random_tiny(tmp_path, "--family", "qwen3_moe"), tmp_path / "changed"
    shutil.copytree(ROOT / "pa_npu", root / "pa_npu")
    file = root / "pa_npu" / "engines" / "vllm" / "experts.py"
    text = file.read_text()
    assert text.count(REPAIR) == 1
    file.write_text(text.replace(REPAIR, "pass"))
    keys = ("schedule.iterations=2", "schedule.prompts_per_iteration=8", "data.test=null")
    done = quick_start(tiny, tmp_path / "run", *keys, root=root)
    assert done.returncode != 0 and "I5 agreement" in done.stdout + done.stderr, done.stdout[-3000:]
