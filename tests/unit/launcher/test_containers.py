"""Dockerfiles: they parse, call what exists, pin what docs/ascend.md says, and hadolint has nothing against them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.launcher.test_cli import ROOT

EXTRAS = set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), flags=re.MULTILINE))
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
# beside the interpreter, where the environment is not activated
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "CMD", "SHELL", "USER"}


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (name, rest)
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dockerfile_calls_what_exists(file: Path) -> None:
    actual = instructions(file)
    assert {name for name, _ in actual} <= INSTRUCTIONS, (
        "an instruction is unknown, or a line's end is not escaped"
    )
    steps = " ".join(rest for _, rest in actual)
    for script in re.findall(r"(?:launch|tools|tests)/[\w./]+\.(?:sh|py)", file.read_text()):
        assert (ROOT / script).is_file(), script
    for group in re.findall(r"'\.\[([\w,]+)\]'", steps):
        assert set(group.split(",")) <= EXTRAS
    for name, rest in actual:
        if name == "RUN":
            assert "curl" not in rest and "sudo" not in rest
            assert "apt-get install" not in rest or "rm -rf /var/lib/apt/lists" in rest
            assert "pip install" not in rest or rest.count("pip install") == rest.count(
                "--no-cache-dir"
            )
    bases = [rest for name, rest in actual if name == "FROM"]
    assert len(bases) == 1 and (
        ":" in bases[0] or any(rest.startswith(bases[0].strip("${}")) for _, rest in actual)
    )


def test_the_ascend_image_is_what_the_script_makes_in_the_versions_of_its_page() -> None:
    page = (ROOT / "docs" / "ascend.md").read_text()
    steps = " ".join(rest for _, rest in instructions(ROOT / "docker" / "npu.Dockerfile"))
    assert "bash launch/install_npu.sh" in steps and "vllm" not in steps, (
        "one place says what is installed"
    )
    script = dict(
        re.findall(
            r"^([A-Z_]+)=([\w.]+)$", (ROOT / "launch" / "install_npu.sh").read_text(), re.MULTILINE
        )
    )
    for name in (
        "CANN",
        "TORCH",
        "TORCH_NPU",
        "VLLM",
        "VLLM_ASCEND",
        "TRITON_ASCEND",
        "MEGATRON",
        "MINDSPEED",
    ):
        assert script[name] in page.split("## Install")[0], name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_runs_as_a_user_who_owns_what_a_run_writes(file: Path) -> None:
    actual = instructions(file)
    number, group = next(rest for name, rest in reversed(actual) if name == "USER").split(":")
    assert int(number) > 0 and int(group) > 0, "a number, or runAsNonRoot cannot be checked"
    after = actual[[name for name, _ in actual].index("USER") :]
    assert all(f"--chown={number}:{group}" in rest for name, rest in actual if name == "COPY")
    assert not any("/root" in rest or "apt-get" in rest for _, rest in after)
    (made,) = [rest for name, rest in actual if name == "RUN" and "install -d" in rest]
    assert {"WORKDIR /workspace/pa_npu", "HOME=/home/pa_npu"} <= {
        "WORKDIR " + rest if name == "WORKDIR" else rest for name, rest in after
    }
    assert f"-o {number} -g {group} /home/pa_npu /workspace /workspace/pa_npu" in made


def test_the_manifest_for_kubernetes_has_the_paths_and_the_user_of_the_ascend_image() -> None:
    actual = instructions(ROOT / "docker" / "npu.Dockerfile")
    values = dict(
        pair.split("=", 1) for name, rest in actual if name == "ENV" for pair in rest.split()
    )
    directory = [rest for name, rest in actual if name == "WORKDIR"][-1]
    job = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        user = pod["securityContext"]
        number = next(rest for name, rest in actual if name == "USER").split(":")[0]
        assert user["runAsNonRoot"] and str(user["runAsUser"]) == str(user["fsGroup"]) == number
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert (
            container["workingDir"] == directory
            and f"{directory}/launch/" in job["spec"]["entrypoint"]
        )
        assert env["PA_NPU_VENV"] == f"{directory}/.venv" and f"{env['PA_NPU_VENV']}/bin" in values[
            "PATH"
        ].split(":")
        assert "PA_NPU_ENGINE_PYTHON" not in env, "engines and trainers have one environment"


def test_the_cpu_image_installs_as_the_quick_start_does() -> None:
    steps = " ".join(rest for _, rest in instructions(ROOT / "docker" / "cpu.Dockerfile"))
    assert "bash launch/install_cpu.sh" in steps and "launch/run_grpo_tiny.sh" in steps
    assert "setup_environment cpu" in (ROOT / "launch" / "run_grpo_tiny.sh").read_text()


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [HADOLINT, *map(str, FILES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
