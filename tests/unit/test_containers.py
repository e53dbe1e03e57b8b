"""Dockerfiles: they parse, call what exists, pin what docs/ascend.md says, and hadolint has nothing against them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_launcher_cli import ROOT

EXTRAS = set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(), flags=re.MULTILINE))
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
# beside the interpreter, where the environment is not activated
HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "CMD", "SHELL"}


def instructions(file: Path) -> list[tuple[str, str]]:
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dockerfile_calls_what_exists(file: Path) -> None:
    found = instructions(file)
    assert {name for name, _ in found} <= INSTRUCTIONS, "an instruction is unknown, or a line's end is not escaped"
    steps = " ".join(rest for _, rest in found)
    for script in re.findall(r"(?:launch|tools|tests)/[\w./]+\.(?:sh|py)", file.read_text()):
        assert (ROOT / script).is_file(), script
    for group in re.findall(r"'\.\[([\w,]+)\]'", steps):
        assert set(group.split(",")) <= EXTRAS
    for name, rest in found:
        if name == "RUN":
            assert "curl" not in rest and "sudo" not in rest
            assert "apt-get install" not in rest or "rm -rf /var/lib/apt/lists" in rest
            assert "pip install" not in rest or rest.count("pip install") == rest.count("--no-cache-dir")
    bases = [rest for name, rest in found if name == "FROM"]
    assert len(bases) == 1 and (":" in bases[0] or any(rest.startswith(bases[0].strip("${}")) for _, rest in found))


def test_the_ascend_image_has_the_versions_of_its_page() -> None:
    page = (ROOT / "docs" / "ascend.md").read_text()
    steps = " ".join(rest for _, rest in instructions(ROOT / "docker" / "npu.Dockerfile"))
    for pin in (
        "vllm==0.23.0",
        "vllm-ascend==0.23.0",
        "--branch core_v0.12.1",
        "--branch 26.1.0_core_r0.12.1",
        "python3.10",
        "python3.11",
    ):
        assert pin in steps and pin in page, pin


def test_the_cpu_image_installs_as_the_quick_start_does() -> None:
    steps = " ".join(rest for _, rest in instructions(ROOT / "docker" / "cpu.Dockerfile"))
    assert "bash launch/install_cpu.sh" in steps and "launch/run_grpo_tiny.sh" in steps
    assert "setup_environment cpu" in (ROOT / "launch" / "run_grpo_tiny.sh").read_text()


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here")
def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, *map(str, FILES)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
