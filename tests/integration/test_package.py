"""The package as others get it: source distribution and wheel are built, installed elsewhere, and `pa-npu` works there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from email.parser import HeaderParser
from pathlib import Path

import pytest

from pa_npu import __version__
from pa_npu.launcher.selftest.parts import PARTS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def run(*argv: object, cwd: Path, **env: str) -> str:
    """The output of a command that must succeed, in an environment in which nothing points to this
    checkout.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, argv)),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**environment, **env},
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a source distribution, which is built from the files that git knows."""
    source = tmp_path_factory.mktemp("source")
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    # without isolation: the build's requirement, setuptools, is here, and nothing is downloaded
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=source, PA_NPU_SKIP_ASCENDC="1")
    assert (source / "dist" / f"pa_npu-{__version__}.tar.gz").is_file()
    return source / "dist" / f"pa_npu-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another environment with this wheel, which finds everything else in the one that runs the
    tests.
    """
    venv = tmp_path_factory.mktemp("elsewhere") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    (packages,) = venv.glob("lib/python3*/site-packages")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv / "bin" / "python",
        "install",
        "--no-deps",
        wheel,
        cwd=venv.parent,
    )
    # a path file of it alone: it does not read the path files there, among them that of an editable
    # pa_npu
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_the_wheel_says_what_it_is_and_holds_types_and_operators(
    wheel: Path, elsewhere: Path
) -> None:
    (packages,) = elsewhere.glob("lib/python3*/site-packages")
    metadata = HeaderParser().parsestr(
        (packages / f"pa_npu-{__version__}.dist-info" / "METADATA").read_text()
    )
    assert (
        metadata["License-Expression"] == "Apache-2.0" and metadata["Author"] == "pa_npu developers"
    )
    assert (
        metadata["Requires-Python"] == ">=3.10"
        and metadata["Description-Content-Type"] == "text/markdown"
    )
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"cpu", "cuda", "npu", "ray", "dev", "docs"} <= extras
    assert any(line.startswith("megatron-core==") for line in metadata.get_all("Requires-Dist", []))
    for name in (
        "pa_npu/py.typed",
        "ops/ascendc/CMakeLists.txt",
        "ops/ascendc/cpu_model/include/ascendc_model/core.h",
    ):
        assert (packages / name).is_file(), name
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "ops").rglob("*")
        if file.suffix in (".cpp", ".h", ".py")
    }
    assert sources and not {name for name in sources if not (packages / name).is_file()}
    assert any(packages.glob("pa_npu-*.dist-info/licenses/LICENSE"))


def test_the_command_works_where_the_wheel_is_installed(elsewhere: Path, tmp_path: Path) -> None:
    command = elsewhere / "bin" / "pa-npu"
    assert run(command, "--version", cwd=tmp_path) == f"pa-npu {__version__}\n"
    where = run(
        elsewhere / "bin" / "python",
        "-c",
        "import pa_npu, ops; print(pa_npu.__file__, ops.__file__)",
        cwd=tmp_path,
    )
    assert all(Path(file).is_relative_to(elsewhere) for file in where.split()), where
    planned = run(
        command,
        "plan",
        "--config",
        ROOT / "configs" / "grpo_qwen2.5_7b.yaml",
        "--device",
        "npu",
        cwd=tmp_path,
    )
    assert "trainer memory" in planned


# in CI other tests have these parts: test_coordinator_run.py, test_exact_schedules.py, test_recovery.py
LONG = ("learns", "equal", "recovers", "speed")
SELFTEST = f"""
import sys
from pa_npu.launcher import cli
from pa_npu.launcher.selftest import command
if sys.argv.pop(1) == "short":
    command.PARTS = tuple(part for part in command.PARTS if part.name not in {LONG})
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.nightly  # its parts: unit/launcher/test_selftest.py
@pytest.mark.parametrize("length", ["short", "whole"])
def test_the_self_test_runs_from_the_wheel(length: str, elsewhere: Path, tmp_path: Path) -> None:
    command = [
        elsewhere / "bin" / "python",
        "-c",
        SELFTEST,
        length,
        "selftest",
        "--device",
        "cpu",
        "--out",
        "report",
    ]
    output = run(*command, "rollout.backend=transformers", cwd=tmp_path)
    number = len(PARTS) - (len(LONG) if length == "short" else 0)
    assert f"{number} of {number} parts passed" in output
    report = (tmp_path / "report" / "report.md").read_text()
    assert "not ok" not in report and (
        "tokens per second per device" in report or length == "short"
    )
    kept = {path.suffix for path in (tmp_path / "report").rglob("*") if path.is_file()}
    assert kept <= {".md", ".json", ".jsonl", ".svg", ".log", ".out", ".yaml"}, (
        "no weights in what is sent"
    )


def test_an_editable_install_is_found_from_the_directory_that_holds_the_checkout(
    tmp_path: Path,
) -> None:
    """There `pa_npu` is also the checkout's own folder, which would be an empty namespace package."""
    checkout, site = tmp_path / "pa_npu", tmp_path / "site"
    shutil.copytree(
        ROOT / "pa_npu", checkout / "pa_npu", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    run(sys.executable, "-c", build, site, cwd=checkout)
    (wheel,) = site.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    ask = "import sys, site; site.addsitedir(sys.argv[1]); import pa_npu; print(pa_npu.__file__)"
    actual = run(sys.executable, "-S", "-c", ask, site, cwd=tmp_path).strip()
    assert Path(actual) == checkout / "pa_npu" / "__init__.py"
