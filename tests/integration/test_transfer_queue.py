"""The real TransferQueue on a Ray of this machine passes the checks of every rollout buffer, with readers in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launched import Launched, settings
from tests.helpers.raylets import raylets

ROOT = Path(__file__).parents[2]
# Beside the environment, because it brings another release of antlr.
DIRECTORY = Path(os.environ.get("PA_NPU_TRANSFER_QUEUE") or ROOT / ".venv-transfer-queue")
PACKAGES = "TransferQueue==0.1.11 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3"
TIME_LIMIT_S = 240


pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (DIRECTORY / "transfer_queue").is_dir(),
        reason=f"TransferQueue is not in {DIRECTORY}; run: python -m pip install --no-deps --target {DIRECTORY.name} {PACKAGES}",
    ),
]
ON_RAY: dict[str, object] = {
    "placement__cluster": "ray",
    "placement__nnodes": 2,
    "placement__devices_per_node": 2,
    "placement__engine_devices": "[0]",
    "placement__trainer_devices": "[2,3]",
    "placement__join_timeout_s": 120,
    "buffer__backend": "transfer_queue",
}


def test_transfer_queue_on_ray_is_a_rollout_buffer() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(DIRECTORY)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.buffer_conformance"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert done.stdout.splitlines()[-1] == "all of it"


@pytest.mark.nightly
def test_a_run_whose_groups_go_through_transfer_queue_ends_with_the_same_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine on one node and a tensor-parallel replica on the other, against the same run on this machine with the store."""
    pytest.importorskip("ray")
    path = os.pathsep.join([str(ROOT), str(DIRECTORY)])
    monkeypatch.setenv("PYTHONPATH", path)
    common: dict[str, object] = {
        "trainer__devices": 2,
        "trainer__tensor_parallel": 2,
        "schedule__order": "prompt",
        "data__test": "null",
        "placement__pin_cores": "false",
    }
    weights = {}
    with raylets({"PYTHONPATH": path}, head_cpus=5, other_cpus=5) as cluster:  # three for the queue itself
        for name, keys in (("store", {}), ("queue", ON_RAY | {"placement__ray_address": cluster.address})):
            (tmp_path / name).mkdir()
            launched = Launched(tmp_path / name, "run", *settings(tiny, tmp_path / name / "run", **common, **keys))
            try:
                assert launched.popen.wait(TIME_LIMIT_S) == 0, launched.output
            finally:
                launched.close()
            weights[name] = load_file(tmp_path / name / "run" / "hf" / "model.safetensors")
            for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                assert record["rollout_reads"] == 4, "one read per group and replica"
                assert record["rollout_collective_bytes"] > record["rollout_buffer_bytes"] > 0, (
                    "to the one other rank, with sizes"
                )
    assert all(torch.equal(weights["queue"][key], value) for key, value in weights["store"].items())
