"""A mixture of experts in real engines and in whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models import make_model
from tests.helpers.rank_processes import ROOT

pytestmark = pytest.mark.integration


def test_vllm_computes_new_experts_after_a_reload_only_because_they_are_packed_again(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, "qwen3_moe", seed=seed, hidden=128) for seed, name in enumerate("ab")]
    command = [sys.executable, "-m", "tests.helpers.vllm_mixture", *map(str, models), str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["loaded"] < 1e-5 and found["with it"] < 1e-5, found
    assert "no weights for 2 parameter(s) of the engine, the first is 'model.layers.1.mlp.experts" in found["missing"]
    assert found["without the repair"] > 0.1, f"the reload has become right by itself: {found}"
