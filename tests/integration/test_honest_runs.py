"""A thousand iterations of the quick start in bf16, the type of production, end at their last one: no check stops an honest run.

Nightly: each run takes six to ten minutes of two idle cores. Runs of a few iterations with the same checks are
all over tests/integration; test_faults_in_runs.py has their other half, runs that must end.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pa_npu.telemetry.chain import read_chain
from tests.helpers.launched import Launched
from tools import make_tiny_model

LIMIT_S = 7200.0
RUNS: dict[str, dict[str, object]] = {
    "megatron, vllm": {"trainer.backend": "megatron", "schedule.iterations": 500, "run.seed": 31},
    "fsdp, vllm": {"trainer.backend": "fsdp", "schedule.iterations": 500, "run.seed": 32},
    # this engine computes each sequence by itself, which takes ten times as long
    "fsdp, transformers": {
        "trainer.backend": "fsdp",
        "rollout.backend": "transformers",
        "schedule.iterations": 100,
        "run.seed": 33,
    },
}

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(LIMIT_S + 600)]


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model and the questions of the quick start."""
    directory = tmp_path_factory.mktemp("quick_start")
    assert make_tiny_model.main(["--out", str(directory)]) == 0
    return directory


@pytest.mark.parametrize("name", RUNS)
def test_bf16_runs_of_the_quick_start_end_at_their_last_iteration(
    name: str, quick_start: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    iterations = RUNS[name]["schedule.iterations"]
    assert isinstance(iterations, int)
    keys: dict[str, object] = {
        "model.path": quick_start / "model",
        "data.train": quick_start / "train.jsonl",
        "data.test": "null",
        "model.dtype": "bf16",
        "schedule.prompts_per_iteration": 8,
        "schedule.compare_iterations": 0,
        "telemetry.trackers": "[]",
        "run.dir": run_dir,
        **RUNS[name],
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    run = Launched(tmp_path, "run", "--config", "configs/grpo_tiny.yaml", *arguments)
    try:
        assert run.popen.wait(LIMIT_S) == 0, run.output[-3000:]
    finally:
        run.close()
    assert [link.iteration for link in read_chain(run_dir)] == list(range(iterations))
    compared = [
        json.loads(line)
        for file in (run_dir / "agreement").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len(compared) >= iterations, "each iteration is compared with its engine"
    assert not [record["subject"] for record in compared if record["broken"]]
