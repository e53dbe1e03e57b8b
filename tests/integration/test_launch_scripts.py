"""launch/: the recipe script runs on cpu from start to end; the cluster starters hand it what it understands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "run_grpo_7b.sh"


def environment(**others: str) -> dict[str, str]:
    """Of this interpreter's own virtual environment, as it is."""
    return {**os.environ, "PA_NPU_INSTALL": "0", "PA_NPU_VENV": sys.prefix, **others}


def run(*argv: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=environment(**env), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_the_recipe_script_runs_two_iterations_on_cpu(tiny: Path, tmp_path: Path) -> None:
    done = run(
        *("bash", str(SCRIPT), "--device", "cpu", f"run.dir={tmp_path / 'run'}"),
        *("schedule.iterations=2", "schedule.prompts_per_iteration=4", "rollout.responses_per_prompt=2"),
        timeout_s=300,
        PA_NPU_MODEL=str(tiny / "model"),
        PA_NPU_TRAIN=str(tiny / "train.jsonl"),
        PA_NPU_TEST=str(tiny / "test.jsonl"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1]
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["algorithm"]["name"] == "grpo" and resolved["algorithm"]["kl_coef"] == 0.001, (
        "the recipe's own keys"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "--device: tpu is not npu, cuda or cpu"),
        (["--frobnicate"], "--frobnicate: unknown option"),
        (["--nnodes"], "--nnodes: needs a value"),
        (["oops"], "oops: neither an option nor key=value"),
        (["--dry-run", "--nnodes", "4", "--node-rank", "4"], "placement.node_rank: 4 with placement.nnodes = 4"),
        (["--dry-run", "--nnodes", "4", "--node-rank", "1"], "placement.master_addr: needed on node 1"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    done = run("bash", str(SCRIPT), *arguments)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and said in errors[0], done.stderr


def test_environment_variables_name_model_and_data_and_the_command_line_wins() -> None:
    done = run(
        *("bash", str(SCRIPT), "--dry-run", "model.path=models/Qwen3-8B"),
        PA_NPU_MODEL="/elsewhere/model",
        PA_NPU_TRAIN="/elsewhere/train.jsonl",
    )
    assert done.returncode == 0, done.stderr
    assert "path: models/Qwen3-8B" in done.stdout and "train: /elsewhere/train.jsonl" in done.stdout


def test_slurm_starts_one_launcher_per_node_with_the_three_numbers(tmp_path: Path) -> None:
    """With stand-ins for scontrol and srun, the latter as node 1 of 4; the command that comes out passes a dry run."""
    for name, body in (("scontrol", 'printf "node-a\\nnode-b\\n"'), ("srun", 'shift 5; exec "$@"')):
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    done = run(
        *("bash", "launch/slurm.sh", "--device", "npu", "--config", "configs/clusters/7b_4_nodes.yaml", "--dry-run"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="node-[a-d]",
        SLURM_JOB_NUM_NODES="4",
        SLURM_NODEID="1",
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    for line in ("nnodes: 4", "node_rank: 1", "master_addr: node-a", "on 4 nodes of 8"):
        assert line in done.stdout, done.stdout


def test_volcano_starts_one_launcher_per_pod_with_the_three_numbers() -> None:
    job = yaml.safe_load((ROOT / "launch" / "volcano.yaml").read_text())
    (task,) = job["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    assert job["spec"]["minAvailable"] == task["replicas"] == 4
    (script,) = container["args"]
    assert "exec bash launch/run_grpo_7b.sh" in script
    variables = {entry["name"]: entry["value"] for entry in container["env"]} | {"PA_NPU_VENV": sys.prefix}
    done = run(
        *("bash", "-c", f"{script} --dry-run run.dir=runs/volcano"),
        **variables,
        VC_TASK_INDEX="2",
        VC_NODE_HOSTS="pa-npu-node-0.pa-npu,pa-npu-node-1.pa-npu",
    )
    assert done.returncode == 0, done.stderr
    for line in ("nnodes: 4", "node_rank: 2", "master_addr: pa-npu-node-0.pa-npu", "/shared/models/Qwen2.5-7B"):
        assert line in done.stdout, done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_scripts_pass_shellcheck() -> None:
    scripts = [str(path) for path in sorted((ROOT / "launch").glob("*.sh"))]
    done = run("shellcheck", "--severity=warning", *scripts)
    assert done.returncode == 0, done.stdout
