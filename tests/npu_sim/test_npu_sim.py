"""Run the tests of inside/ in a process of their own, with torch_npu; some again with megatron-core 0.12.1 and with MindSpeed.

Nightly, those of engine/ with vllm-ascend's own classes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.npu_sim import cann_stub
from tools import make_tiny_model

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).with_name("inside")
# torch_npu lives beside the environment, not in it: where it is installed, a plain `import torch`
# wants CANN.
DIRECTORY = Path(os.environ.get("PA_NPU_TORCH_NPU") or ROOT / ".venv-npu")
RELEASE = torch.__version__.split("+")[0]
# The stubs serve these, and every release of the trainers' stack; 2.7.1 before .post8 loads further
# libraries of CANN.
WANTED = (
    f"torch_npu>={RELEASE}.post8,=={RELEASE}.*" if RELEASE == "2.7.1" else f"torch_npu=={RELEASE}.*"
)
INSTALL = f"python -m pip install --no-deps --target {DIRECTORY.name} '{WANTED}'"
# What MindSpeed needs: the variables that name checkouts, and a folder that proves each.
CHECKOUTS = {"MINDSPEED_HOME": "mindspeed", "MEGATRON_LM_HOME": "megatron/training"}
OLDER_CORE = ROOT / ".venv-core-0.12"
TRAINING = [INSIDE / "test_model_stage.py", INSIDE / "test_trainer.py"]
# Classes of Ascend's engines, on the trainers' torch: an environment has one.
ENGINE = ROOT / ".venv-ascend-engine"
ENGINE_TESTS = Path(__file__).with_name("engine")
TIME_LIMIT_S = 3000  # two minutes on two quiet cores; ranks that hang end sooner


def _missing() -> str | None:
    if not (DIRECTORY / "torch_npu").is_dir():
        return f"torch_npu is not in {DIRECTORY}; run: {INSTALL}"
    versions = [
        path.name.removesuffix(".dist-info").split("-")[1]
        for path in DIRECTORY.glob("torch_npu-*.dist-info")
    ]
    if not any(Requirement(WANTED).specifier.contains(version) for version in versions):
        return (
            f"torch_npu {versions} in {DIRECTORY} does not fit torch {RELEASE}; remove it and "
            f"run: {INSTALL}"
        )
    tools = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    return f"{', '.join(tools)} not found; install gcc and binutils" if tools else None


def run_inside(stubs: Path, paths: list[Path], python_path: list[Path], **variables: str) -> None:
    cann_stub.build(DIRECTORY / "torch_npu", stubs)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, DIRECTORY, *python_path])),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CANN_STUB_DEVICES": "1",
        # the tests' engines are in this process; a launcher sets it for engines and trainers
        "HCCL_DETERMINISTIC": "strict",
        "PA_NPU_SIM_STUBS": str(stubs),
        **variables,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )
    print(done.stdout)


@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
def test_everything_inside(tmp_path: Path) -> None:
    run_inside(tmp_path, [INSIDE], [])


@pytest.mark.nightly  # the older core on a CPU: integration/test_older_core.py
@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
@pytest.mark.skipif(
    not (OLDER_CORE / "megatron").is_dir(),
    reason=f"no {OLDER_CORE.name}; run: python -m pip install --no-deps --target {OLDER_CORE.name} "
    "megatron-core==0.12.1",
)
def test_model_and_trainer_with_the_older_core(tmp_path: Path) -> None:
    run_inside(tmp_path, TRAINING, [OLDER_CORE])


@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
@pytest.mark.skipif(
    not all(os.environ.get(name) for name in CHECKOUTS),
    reason="MINDSPEED_HOME and MEGATRON_LM_HOME do not name checkouts: MindSpeed "
    "26.1.0_core_r0.12.1 and Megatron-LM core_v0.12.1, or core_r0.16.0 and core_v0.16.1",
)
def test_model_and_trainer_with_mindspeed(tmp_path: Path) -> None:
    homes = []
    for variable, contents in CHECKOUTS.items():
        homes.append(Path(os.environ[variable]).resolve())
        assert (homes[-1] / contents).is_dir(), (
            f"{variable}: {homes[-1]} has no {contents}; name a checkout's directory"
        )
    run_inside(tmp_path, TRAINING, homes, PA_NPU_SIM_MINDSPEED="1")


@pytest.mark.nightly
@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
@pytest.mark.skipif(
    not (ENGINE / "vllm_ascend").is_dir(),
    reason=f"no {ENGINE.name}; run: python -m pip install --no-deps --target {ENGINE.name} -r "
    "requirements/ascend-engine.txt",
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_classes_of_vllm_ascend(family: str, dtype: str, tmp_path: Path) -> None:
    assert make_tiny_model.main(["--out", str(tmp_path / "m"), "--random", "--family", family]) == 0
    run_inside(
        tmp_path,
        [ENGINE_TESTS],
        [ENGINE_TESTS / "absent", ENGINE],
        PA_NPU_SIM_ENGINE=family,
        PA_NPU_SIM_DTYPE=dtype,
        PA_NPU_SIM_MODEL=str(tmp_path / "m" / "model"),
        LD_LIBRARY_PATH=str(tmp_path),  # of the process in which vLLM looks at a model's class
        # virtual memory, which the stubs have not
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:False",
        VLLM_LOGGING_LEVEL="ERROR",
    )
