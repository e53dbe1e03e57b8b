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
    """Returns an environment with this interpreter's own virtual environment, as it is."""
    return {**os.environ, "PA_NPU_INSTALL": "0", "PA_NPU_VENV": sys.prefix, **others}


def run(*argv: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=environment(**env),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(
    "backend", ["transformers", pytest.param("vllm", marks=pytest.mark.nightly)]
)
def test_the_recipe_script_runs_two_iterations_on_cpu(
    backend: str, tiny: Path, tmp_path: Path
) -> None:
    done = run(
        "bash",
        str(SCRIPT),
        "--device",
        "cpu",
        f"run.dir={tmp_path / 'run'}",
        "schedule.iterations=2",
        "schedule.prompts_per_iteration=4",
        "rollout.responses_per_prompt=2",
        f"rollout.backend={backend}",
        timeout_s=300,
        PA_NPU_MODEL=str(tiny / "model"),
        PA_NPU_TRAIN=str(tiny / "train.jsonl"),
        PA_NPU_TEST=str(tiny / "test.jsonl"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["iteration"] for record in records] == [0, 1]
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["algorithm"]["name"] == "grpo" and resolved["algorithm"]["kl_coef"] == 0.001, (
        "the recipe's own keys"
    )


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_the_recipe_script_plans_sharded_trainers(device: str) -> None:
    done = run("bash", str(SCRIPT), "--device", device, "--backend", "fsdp", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 shards of every weight" in done.stdout and "gathered layers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: tpu is not npu, cuda or cpu"),
        (["--frobnicate"], "--frobnicate: unknown option"),
        (["--config"], "--config: needs a value"),
        (["--backend", "fsdp2"], "--backend: fsdp2 is not megatron or fsdp"),
        (["oops"], "oops: neither an option nor key=value"),
        (["--dry-run", "placement.nnodes=4"], "placement.nnodes: 4 with placement.cluster=local"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str) -> None:
    done = run("bash", str(SCRIPT), *arguments)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], done.stderr


def test_environment_variables_name_model_and_data_and_the_command_line_wins() -> None:
    done = run(
        "bash",
        str(SCRIPT),
        "--dry-run",
        "--full",
        "model.path=models/Qwen3-8B",
        PA_NPU_MODEL="/elsewhere/model",
        PA_NPU_TRAIN="/elsewhere/train.jsonl",
    )
    assert done.returncode == 0, done.stderr
    assert "path: models/Qwen3-8B" in done.stdout and "train: /elsewhere/train.jsonl" in done.stdout


def test_slurm_starts_a_ray_cluster_and_the_launcher_on_its_head(tmp_path: Path) -> None:
    """With stand-ins for scontrol and srun; the launcher's command passes a dry run."""
    log = tmp_path / "srun.log"
    srun = f"""
    echo "$*" >>{log}
    case "$*" in
      *"hostname --ip-address") echo "127.0.0.1 10.0.0.1" ;;
      *ray_node.sh*) ;;
      *) while [ "$1" != bash ]; do shift; done; while [ "$2" != "$ROOT/launch/run_grpo_7b.sh" ]; do shift; done; exec "$@" ;;
    esac"""
    for name, body in (("scontrol", 'printf "node-a\\nnode-b\\n"'), ("srun", srun)):
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    done = run(
        "bash",
        "launch/slurm.sh",
        "--device",
        "npu",
        "--config",
        "configs/clusters/7b_4_nodes.yaml",
        "--dry-run",
        "--full",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        ROOT=str(ROOT),
        SLURM_JOB_NODELIST="node-[a-d]",
        SLURM_JOB_NUM_NODES="4",
        SLURM_SUBMIT_DIR=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    for line in ("nnodes: 4", "cluster: ray", "on 4 nodes of 8"):
        assert line in done.stdout, done.stdout
    started = log.read_text()
    assert (
        f"--nodelist node-a bash {ROOT}/launch/ray_node.sh --device npu head 10.0.0.1:6379"
        in started
    )
    assert (
        f"--nodes 3 --ntasks 3 --exclude node-a bash {ROOT}/launch/ray_node.sh --device npu worker "
        "10.0.0.1:6379" in started
    )


def test_kuberay_gives_every_pod_the_same_and_its_entrypoint_passes_a_dry_run() -> None:
    job = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert job["kind"] == "RayJob" and workers["replicas"] == 3
    assert workers["template"] == cluster["headGroupSpec"]["template"], (
        "the head is a node of the run too"
    )
    (container,) = workers["template"]["spec"]["containers"]
    entrypoint = job["spec"]["entrypoint"].replace("/workspace/pa_npu", str(ROOT))
    variables = {entry["name"]: entry["value"] for entry in container["env"]} | {
        "PA_NPU_VENV": sys.prefix
    }
    done = run("bash", "-c", f"{entrypoint} --dry-run --full run.dir=runs/kuberay", **variables)
    assert done.returncode == 0, done.stderr
    for line in ("nnodes: 4", "cluster: ray", "/shared/models/Qwen2.5-7B"):
        assert line in done.stdout, done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_scripts_pass_shellcheck() -> None:
    scripts = [str(path) for path in sorted((ROOT / "launch").glob("*.sh"))]
    done = run("shellcheck", "--severity=warning", *scripts)
    assert done.returncode == 0, done.stdout


def test_compiling_packages_says_how_far_it_is_and_passes_over_what_is_no_python(
    tmp_path: Path,
) -> None:
    for number in range(500):
        (tmp_path / f"module_{number}.py").write_text(f"value = {number}\n")
    (tmp_path / "template.py").write_text("class {{ name }}:\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_module.py").write_text("value = 1\n")
    done = run(sys.executable, str(ROOT / "launch" / "compile_packages.py"), str(tmp_path))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "501 files: 10% 30% 50% 60% 80% 100% "
    assert len(list(tmp_path.rglob("*.pyc"))) == 500
