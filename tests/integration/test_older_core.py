"""megatron-core 0.12.1, the second row of docs/ascend.md, beside the release that everything else is tested with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDER = ROOT / ".venv-core-0.12"
TIME_LIMIT_S = 900
UNITS = ["backends/test_parity.py", "backends/test_experts.py", "checkpoints/test_trainer.py"]

pytestmark = [
    pytest.mark.timeout(TIME_LIMIT_S + 60),
    pytest.mark.skipif(
        not (OLDER / "megatron").is_dir(),
        reason=f"no {OLDER.name}; run: python -m pip install --no-deps --target {OLDER.name} "
        "megatron-core==0.12.1",
    ),
]

# One update, which the older core saves and the newer one loads. Arguments: save or load, a
# directory, distributed or plain.
CROSSING = """
import sys
from pathlib import Path
import pytest
import torch
from pa_npu.errors import UserError
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.unit.checkpoints.test_trainer import Run, same
import megatron.core
from pa_npu.backends.megatron.checkpoint import load_policy_only

step, directory, optimizer = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
assert megatron.core.__version__.startswith("0.12." if step == "save" else "0.16.")
model = make_model(directory) if step == "save" else Path((directory / "model.txt").read_text())
options = {"trainer": {"distributed_optimizer": optimizer == "distributed"}, "model": {"dtype": "bf16"}}
if step == "load":
    options["checkpoint"] = {"load": str(directory / "checkpoints" / "iteration_000001")}
with single_process(model_config(model)):
    run = Run(model, directory, **options)
    if step == "save":
        (directory / "model.txt").write_text(str(model))
        run.train(0)
        run.checkpoints.finish(1)
        torch.save((run.weights(), run.moments()), directory / "expected.pt")
    else:
        if optimizer == "distributed":
            with pytest.raises(UserError, match="another release of megatron-core saved a distributed optimizer"):
                run.checkpoints.load()
            load_policy_only(run.stage, run.directory / "iteration_000001")  # what an export does
        else:
            assert run.checkpoints.load() == 1
        weights, moments = torch.load(directory / "expected.pt")
        assert same(run.weights(), weights) and (optimizer == "distributed" or same(run.moments(), moments))
"""


def run_python(arguments: list[str], *first: Path) -> None:
    """Run Python with `first` in front of its path."""
    path = os.pathsep.join(map(str, filter(None, [*first, ROOT, os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == 0, (
        f"{arguments[:3]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    )


def test_the_model_its_gradients_and_its_checkpoints() -> None:
    units = [str(ROOT / "tests" / "unit" / name) for name in UNITS]
    run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *units], OLDER)


@pytest.mark.parametrize(
    "optimizer", ["plain", pytest.param("distributed", marks=pytest.mark.nightly)]
)
def test_the_newer_core_goes_on_from_its_checkpoints_bit_for_bit_or_says_why_not(
    optimizer: str, tmp_path: Path
) -> None:
    """The distributed optimizer's state is flattened in core 0.12, which 0.16 cannot read."""
    run_python(["-c", CROSSING, "save", str(tmp_path), optimizer], OLDER)
    run_python(["-c", CROSSING, "load", str(tmp_path), optimizer])
