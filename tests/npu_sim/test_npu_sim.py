"""Run the tests of inside/ in a process of their own, with torch_npu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).with_name("inside")
# torch_npu lives beside the environment, not in it: where it is installed, a plain `import torch` wants CANN.
DIRECTORY = Path(os.environ.get("PA_NPU_TORCH_NPU") or ROOT / ".venv-npu")
INSTALL = f"python -m pip install --no-deps --target {DIRECTORY.name} torch_npu==2.13.0"
TIME_LIMIT_S = 300


def _missing() -> str | None:
    if not (DIRECTORY / "torch_npu").is_dir():
        return f"torch_npu is not in {DIRECTORY}; run: {INSTALL}"
    versions = [path.name.split("-")[1] for path in DIRECTORY.glob("torch_npu-*.dist-info")]
    release = torch.__version__.split("+")[0]
    if not any(version.startswith(release) for version in versions):
        return f"torch_npu {versions} in {DIRECTORY} does not fit torch {release}; remove it and run: {INSTALL}"
    tools = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    return f"{', '.join(tools)} not found; install gcc and binutils" if tools else None


@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
def test_everything_inside() -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(DIRECTORY)]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CANN_STUB_DEVICES": "1",
        "PA_NPU_INSIDE_SIM": str(DIRECTORY / "torch_npu"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INSIDE)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    print(done.stdout)
