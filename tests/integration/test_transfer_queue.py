"""The real TransferQueue on a Ray of this machine passes the checks of every rollout buffer, with readers in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Beside the environment, because it brings another release of antlr.
DIRECTORY = Path(os.environ.get("PA_NPU_TRANSFER_QUEUE") or ROOT / ".venv-transfer-queue")
PACKAGES = "TransferQueue==0.1.11 tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3"
TIME_LIMIT_S = 240


@pytest.mark.integration
@pytest.mark.skipif(
    not (DIRECTORY / "transfer_queue").is_dir(),
    reason=f"TransferQueue is not in {DIRECTORY}; run: python -m pip install --no-deps --target {DIRECTORY.name} {PACKAGES}",
)
def test_transfer_queue_on_ray_is_a_rollout_buffer() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(DIRECTORY)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.buffer_conformance"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert done.stdout.splitlines()[-1] == "all of it"
