"""launch/install_npu.sh with pip itself, over a CANN that is only files and packages that are only their metadata.

The packages require of each other what the releases do (read in the METADATA of their wheels for
aarch64 and x86-64): vllm asks for one torch and for triton, vllm-ascend for another torch and for
triton-ascend, whose files lie in triton's folder.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from pa_npu.launcher.trainer_versions import STACKS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "install_npu.sh"
VERSIONS = dict(re.findall(r"^([A-Z_]+)=([\w.]+)(?: #.*)?$", SCRIPT.read_text(), re.MULTILINE))

# A build backend in the tree, so that nothing is downloaded to build with.
BACKEND = (
    """
import os, pathlib, zipfile
NAME, VERSION = "{name}", "{version}"
def _wheel(folder, editable):
    path = f"{NAME.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    info = f"{NAME.replace('-', '_')}-{VERSION}.dist-info/"
    with zipfile.ZipFile(pathlib.Path(folder) / path, "w") as wheel:
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
        if editable:
            wheel.writestr(NAME + "_here.pth", os.getcwd() + "\\n")
    return path
def build_wheel(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, False)
def build_editable(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, True)
""".replace("{", "{{")
    .replace("}", "}}")
    .replace("{{name}}", "{name}")
    .replace("{{version}}", "{version}")
)
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(
    shelf: Path, name: str, version: str, requires: tuple[str, ...] = (), **files: str
) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(
        f"Requires-Dist: {text}\n" for text in requires
    )
    written = {**files, f"{info}/METADATA": metadata}
    written[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},,\n" for path in [*written, f"{info}/RECORD"])
    with zipfile.ZipFile(shelf / f"{stem}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**written, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def write_source(shelf: Path, name: str, version: str) -> None:
    with tarfile.open(shelf / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for path, text in (
            ("pyproject.toml", PROJECT),
            ("backend.py", BACKEND.format(name=name, version=version)),
        ):
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the contents of the package indexes."""
    path = tmp_path_factory.mktemp("shelf")
    torch, npu = VERSIONS["TORCH"], VERSIONS["TORCH_NPU"]
    write_wheel(path, "torch", "2.11.0", ("triton==3.6.0",))
    write_wheel(path, "torch", torch, ("triton==3.6.0",))
    write_wheel(
        path,
        "triton",
        "3.6.0",
        **{"triton/__init__.py": "WHO = 'triton'", "triton/language.py": ""},
    )
    write_wheel(
        path,
        "triton-ascend",
        VERSIONS["TRITON_ASCEND"],
        **{"triton/__init__.py": "WHO = 'triton-ascend'"},
    )
    write_wheel(path, "torch_npu", npu, (f"torch=={torch}",))
    write_source(path, "arctic-inference", VERSIONS["ARCTIC_INFERENCE"])
    write_wheel(
        path,
        "vllm",
        VERSIONS["VLLM"],
        ("torch==2.11.0", "transformers"),
        **{"vllm/__init__.py": ""},
    )
    needs = (f"torch=={torch}", f"torch-npu=={npu}", f"triton-ascend=={VERSIONS['TRITON_ASCEND']}")
    arctic = f"arctic-inference=={VERSIONS['ARCTIC_INFERENCE']}"
    write_wheel(path, "vllm-ascend", VERSIONS["VLLM_ASCEND"], (*needs, arctic))
    write_wheel(path, "scipy", "1.15.0")
    for version in (VERSIONS["TRANSFORMERS"], "6.0.0"):  # vllm alone would take the newest
        write_wheel(path, "transformers", version)
    return path


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/usr/local/Ascend of a node with driver, CANN and NNAL."""
    path = tmp_path_factory.mktemp("Ascend")
    for name, text in {
        "driver/version.info": "Version=25.5.0\n",
        "ascend-toolkit/set_env.sh": f"export ASCEND_HOME_PATH={path}/ascend-toolkit/latest\n",
        "ascend-toolkit/latest/ascend_toolkit_install.info": f"version={VERSIONS['CANN']}.0\n",
        "nnal/atb/set_env.sh": f"echo $UNSET; export ATB_HOME_PATH={path}/nnal/atb/latest\n",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def environment(ascend: Path, **others: str) -> dict[str, str]:
    """Returns the environment of a user's new shell."""
    hidden = ("PYTHONPATH", "PA_NPU_", "ASCEND", "ATB_", "VIRTUAL_ENV", "PIP_", "UV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {
        **kept,
        "PA_NPU_ASCEND_ROOT": str(ascend),
        "PA_NPU_NEEDED_GIB": "1",
        "PA_NPU_PYTHON": sys.executable,
        **others,
    }


def call(script: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="vllm-ascend 0.23 is installed with Python 3.11 or 3.12"
)
@pytest.mark.nightly  # what it refuses is below
def test_one_command_makes_the_environment_and_a_second_one_finds_it_made(
    shelf: Path, ascend: Path, tmp_path: Path
) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "backend.py").write_text(BACKEND.format(name="pa_npu", version="0"))
    for package in ("pa_npu", "pa_npu/launcher", "ops", "ops/ascendc"):
        (root / package).mkdir()
        (root / package / "__init__.py").write_text("")
    (root / "pa_npu/launcher/__main__.py").write_text(
        "import os, sys; print('doctor', *sys.argv[1:], os.environ['ATB_HOME_PATH'])"
    )
    (root / "ops/ascendc/build.py").write_text("raise SystemExit(1)")
    redirected, pinned = {}, ""
    for number, (name, tag) in enumerate((("MEGATRON", "Megatron-LM"), ("MINDSPEED", "MindSpeed"))):
        repository = tmp_path / "remote" / tag
        (repository / "megatron").mkdir(parents=True)
        (repository / "megatron" / "here.py").write_text("")
        (repository / "pyproject.toml").write_text(PROJECT)
        (repository / "backend.py").write_text(BACKEND.format(name=tag.lower(), version="0.16.0"))
        git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b")
        for words in (
            ("init", "-q"),
            ("add", "."),
            ("commit", "-qm", "a"),
            ("tag", VERSIONS[name]),
        ):
            subprocess.run([*git, *words], check=True)
        if name == "MINDSPEED":  # a branch that has grown since
            head = subprocess.run(
                [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
            )
            pinned = head.stdout.strip()
            for words in (
                ("tag", "-d", VERSIONS[name]),
                ("commit", "-qm", "b", "--allow-empty"),
                ("branch", VERSIONS[name]),
            ):
                subprocess.run([*git, *words], check=True)
        url = re.search(rf"^{name}_URL=(\S+)$", SCRIPT.read_text(), re.MULTILINE)
        redirected[f"GIT_CONFIG_KEY_{number}"] = f"url.file://{repository}.insteadOf"
        redirected[f"GIT_CONFIG_VALUE_{number}"] = url[1] if url else ""
    env = environment(
        ascend,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(shelf),
        PA_NPU_VENV=str(tmp_path / "venv"),
        PA_NPU_MINDSPEED_COMMIT=pinned,
        GIT_CONFIG_COUNT="2",
        **redirected,
    )

    done = call(root / "launch" / "install_npu.sh", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"doctor doctor --device npu {ascend}/nnal/atb/latest" in done.stdout, (
        "NNAL's variables are there"
    )
    assert "operators not built" in done.stdout
    python = tmp_path / "venv" / "bin" / "python"
    listed = subprocess.run(
        [python, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, check=True
    ).stdout
    for wanted in (
        f"torch=={VERSIONS['TORCH']}",
        f"torch-npu=={VERSIONS['TORCH_NPU']}",
        f"vllm=={VERSIONS['VLLM']}",
        f"vllm-ascend=={VERSIONS['VLLM_ASCEND']}",
        f"triton-ascend=={VERSIONS['TRITON_ASCEND']}",
        f"arctic-inference=={VERSIONS['ARCTIC_INFERENCE']}",
        f"transformers=={VERSIONS['TRANSFORMERS']}",
    ):
        assert wanted in listed.replace("_", "-"), listed
    assert "\ntriton==" not in listed
    head = (tmp_path / "venv" / "src" / "MindSpeed" / ".git" / "HEAD").read_text().strip()
    assert head == pinned, "the commit, not the newest of its branch"
    who = subprocess.run(
        [python, "-c", "import triton; print(triton.WHO)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert who.stdout.strip() == "triton-ascend"
    assert not list((tmp_path / "venv").glob("lib/python3*/site-packages/triton/language.py")), (
        "nothing of triton is left"
    )

    plain = (
        f"source {tmp_path}/venv/npu.sh; echo $ASCEND_HOME_PATH $ATB_HOME_PATH $PYTHONPATH; "
        "command -v python"
    )
    shell = subprocess.run(
        ["bash", "-euc", plain], env=env, capture_output=True, text=True, check=True
    )
    assert shell.stdout.split() == [
        f"{ascend}/ascend-toolkit/latest",
        f"{ascend}/nnal/atb/latest",
        f"{tmp_path}/venv/src/Megatron-LM",
        str(python),
    ], "a user's own shell has CANN, NNAL, the checkout and the commands"
    again = call(root / "launch" / "install_npu.sh", **{**env, "PIP_FIND_LINKS": ""})
    assert again.returncode == 0, again.stdout + again.stderr

    ascend_home = {"ASCEND_HOME_PATH": f"{ascend}/ascend-toolkit/latest"}
    shell = (
        f"source {root}/launch/env.sh; use_environment npu '' ''; echo $ATB_HOME_PATH $PYTHONPATH"
    )
    used = subprocess.run(
        ["bash", "-euc", shell],
        env={**env, **ascend_home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{ascend}/nnal/atb/latest {tmp_path}/venv/src/Megatron-LM" in used.stdout, (
        used.stdout + used.stderr
    )


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("driver/version.info", "no driver: neither"),
        ("ascend-toolkit/set_env.sh", "no CANN: no set_env.sh in"),
        ("nnal/atb/set_env.sh", "no NNAL: no nnal/atb/set_env.sh in"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_changed(
    without: str, message: str, ascend: Path, tmp_path: Path
) -> None:
    shutil.copytree(ascend, tmp_path / "Ascend")
    env = environment(tmp_path / "Ascend", PA_NPU_VENV=str(tmp_path / "venv"))
    (tmp_path / "Ascend" / without).unlink()
    done = call(SCRIPT, **env)
    assert done.returncode == 2 and f"missing: {message}" in done.stderr, done.stderr
    assert (
        "1 thing(s) missing; nothing was changed" in done.stderr
        and not (tmp_path / "venv").exists()
    )


def test_another_release_of_cann_is_named(ascend: Path, tmp_path: Path) -> None:
    shutil.copytree(ascend, tmp_path / "Ascend")
    (tmp_path / "Ascend/ascend-toolkit/latest/ascend_toolkit_install.info").write_text(
        "version=8.5.0\n"
    )
    done = call(
        SCRIPT, "--check", **environment(tmp_path / "Ascend", PA_NPU_VENV=str(tmp_path / "venv"))
    )
    assert (
        done.returncode == 2
        and "missing: CANN 8.5.0 in" in done.stderr
        and "is built for CANN" in done.stderr
    )
    fine = call(SCRIPT, "--check", **environment(ascend, PA_NPU_VENV=str(tmp_path / "venv")))
    assert fine.returncode == 0 and fine.stdout.startswith("it can be installed"), fine.stderr


def test_of_two_releases_of_cann_the_one_that_is_set_up_counts(
    ascend: Path, tmp_path: Path
) -> None:
    toolkit = tmp_path / "Ascend" / "ascend-toolkit"
    shutil.copytree(ascend, tmp_path / "Ascend")
    (toolkit / "latest").rename(toolkit / "9.1.0")
    (toolkit / "8.5.0").mkdir()
    (toolkit / "8.5.0" / "ascend_toolkit_install.info").write_text("version=8.5.0\n")
    (toolkit / "latest").symlink_to("9.1.0")
    env = environment(tmp_path / "Ascend", PA_NPU_VENV=str(tmp_path / "venv"))
    assert call(SCRIPT, "--check", **env).returncode == 0
    older = call(SCRIPT, "--check", **env, ASCEND_HOME_PATH=str(toolkit / "8.5.0"))
    assert "missing: CANN 8.5.0 in" in older.stderr, older.stderr


def test_software_in_another_place_is_found_by_what_the_shell_has_set_up(
    ascend: Path, tmp_path: Path
) -> None:
    """As `/opt/ascend/cann` with NNAL beside it."""
    shutil.copytree(ascend / "nnal", tmp_path / "opt" / "nnal")
    shutil.copytree(ascend / "ascend-toolkit" / "latest", tmp_path / "opt" / "cann")
    (tmp_path / "opt" / "cann" / "set_env.sh").write_text("")
    (tmp_path / "usual" / "driver").mkdir(parents=True)
    (tmp_path / "usual" / "driver" / "version.info").write_text("")
    env = environment(tmp_path / "usual", PA_NPU_VENV=str(tmp_path / "venv"))
    actual = call(SCRIPT, "--check", **env, ASCEND_HOME_PATH=str(tmp_path / "opt" / "cann"))
    assert actual.returncode == 0, actual.stderr
    assert (
        f"CANN {tmp_path}/opt/cann/set_env.sh, NNAL {tmp_path}/opt/nnal/atb/set_env.sh"
        in actual.stdout
    )
    assert "no CANN" in call(SCRIPT, "--check", **env).stderr


def test_the_script_installs_what_doctor_compares_with() -> None:
    (stack,) = [stack for stack in STACKS["npu"] if "one environment" in stack.name]
    for name, key in (
        ("torch", "TORCH"),
        ("torch_npu", "TORCH_NPU"),
        ("cann", "CANN"),
        ("megatron-core", "MEGATRON"),
        ("mindspeed", "MINDSPEED"),
    ):
        (requirement,) = [
            requirement for requirement in stack.requirements if requirement.name == name
        ]
        numbers = re.search(r"\d[\d.]*(post\d+)?", VERSIONS[key])
        assert numbers and requirement.problem({name: numbers[0]}) is None, name
