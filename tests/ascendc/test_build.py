"""The build of the operators: skipped with a reason where something is missing, told the right things where not."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.ascendc import build

HELPER = Path(build.CMAKE_HELPERS[1]) / "ascendc.cmake"

# Stands for CANN's CMake functions: a library of the kernel's name, and the include directories of
# its target. The variable is what CANN's own sets.
FAKE_CANN_CMAKE = """
set(CMAKE_SKIP_RPATH TRUE)
function(ascendc_library name type)
    foreach(source ${ARGN})
        if(NOT EXISTS ${source})
            message(FATAL_ERROR "kernel source ${source} does not exist")
        endif()
    endforeach()
    file(WRITE ${CMAKE_BINARY_DIR}/kernels.cpp "int kernels;")
    add_library(${name} ${type} ${CMAKE_BINARY_DIR}/kernels.cpp)
endfunction()
function(ascendc_include_directories name scope)
    if(NOT EXISTS ${ARGN}/lse_merge_table.h)
        message(FATAL_ERROR "the kernel's headers are not in ${ARGN}")
    endif()
endfunction()
"""

# Records its arguments and leaves the two libraries where the real build would.
FAKE_CMAKE = """#!/bin/sh
echo "$@" >> {record}
[ "$1" = --build ] || exit 0
mkdir -p "$2/lib"
for library in {libraries}; do touch "$library"; done
"""


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    root = tmp_path / "cann"
    (root / HELPER).parent.mkdir(parents=True)
    (root / HELPER).write_text(FAKE_CANN_CMAKE)
    return root


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch and torch_npu as the build looks for them."""
    monkeypatch.setattr(build, "_package", lambda name: tmp_path / "site-packages" / name)
    monkeypatch.setattr(build, "_torch_cxx11_abi", lambda: True)
    return tmp_path / "site-packages"


def fake_cmake(directory: Path, libraries: tuple[str, ...]) -> Path:
    """A directory for PATH with a cmake in it; returns where it records its calls."""
    directory.mkdir()
    record = directory / "calls.txt"
    script = directory / "cmake"
    touched = " ".join(f'"$2/lib/{name}"' for name in libraries)
    script.write_text(FAKE_CMAKE.format(record=record, libraries=touched))
    script.chmod(0o755)
    return record


def environment(cann: Path, path: Path | None = None) -> dict[str, str]:
    search = os.environ["PATH"] if path is None else f"{path}{os.pathsep}{os.environ['PATH']}"
    return {"ASCEND_HOME_PATH": str(cann), "PATH": search}


def test_without_cann_nothing_is_built_and_the_reason_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CANN_DEFAULTS", (str(tmp_path / "nowhere"),))
    lines: list[str] = []
    assert build.build_operators(tmp_path / "lib", environ={"PATH": ""}, log=lines.append) is None
    assert "no CANN toolkit with Ascend C" in lines[0] and "ASCEND_HOME_PATH" in lines[0]
    assert not (tmp_path / "lib").exists()


def test_without_torch_npu_the_reason_names_it(cann: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        build.NotBuildable, match=r"torch cannot be imported by .*; install it first"
    ):
        build.find_toolchain(environment(cann))


def test_the_build_can_be_skipped(cann: Path, packages: Path) -> None:
    with pytest.raises(build.NotBuildable, match="PA_NPU_SKIP_ASCENDC is set"):
        build.find_toolchain({**environment(cann), "PA_NPU_SKIP_ASCENDC": "1"})


def test_both_libraries_are_built_and_put_into_the_package(
    cann: Path, packages: Path, tmp_path: Path
) -> None:
    record = fake_cmake(tmp_path / "bin", build.LIBRARIES)
    output = tmp_path / "package" / build.PACKAGE_LIBRARIES
    environ = {**environment(cann, tmp_path / "bin"), "SOC_VERSION": "ascend910b4"}
    library = build.build_operators(
        output, build_directory=tmp_path / "build", environ=environ, log=lambda line: None
    )
    assert library == output / "libpa_npu_ascendc.so"
    assert sorted(path.name for path in output.iterdir()) == sorted(build.LIBRARIES)
    configure, compile_ = record.read_text().splitlines()
    for definition in (
        f"-DASCEND_HOME_PATH={cann}",
        "-DSOC_VERSION=ascend910b4",
        f"-DTORCH_PATH={packages / 'torch'}",
        f"-DTORCH_NPU_PATH={packages / 'torch_npu'}",
        "-DTORCH_CXX11_ABI=1",
    ):
        assert definition in configure.split()
    assert compile_.startswith("--build")


def test_a_build_that_leaves_no_library_fails(cann: Path, packages: Path, tmp_path: Path) -> None:
    fake_cmake(tmp_path / "bin", ())
    with pytest.raises(build.BuildFailed, match=r"without .*libpa_npu_ascendc\.so"):
        build.build_operators(
            tmp_path / "lib",
            build_directory=tmp_path / "build",
            environ=environment(cann, tmp_path / "bin"),
            log=lambda line: None,
        )


def test_a_failing_cmake_shows_its_output(cann: Path, packages: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cmake").write_text("#!/bin/sh\necho ccec not found\nexit 3\n")
    (tmp_path / "bin" / "cmake").chmod(0o755)
    with pytest.raises(build.BuildFailed, match=r"exit code 3(.|\n)*ccec not found"):
        build.build_operators(
            tmp_path / "lib",
            build_directory=tmp_path / "build",
            environ=environment(cann, tmp_path / "bin"),
            log=lambda line: None,
        )


def test_the_command_fails_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "CANN_DEFAULTS", (str(tmp_path / "nowhere"),))
    for name in build.CANN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert build.main() == 1
    assert "no CANN toolkit with Ascend C" in capsys.readouterr().out


def test_the_command_fails_when_the_build_does_or_its_library_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(output: Path) -> Path:
        raise build.BuildFailed("ccec not found")

    monkeypatch.setattr(build, "build_operators", fails)
    assert build.main() == 1
    assert "error: ccec not found" in capsys.readouterr().err
    monkeypatch.setattr(build, "build_operators", lambda output: tmp_path / "no library")
    assert build.main() == 1
    assert "does not load" in capsys.readouterr().err
    monkeypatch.setattr(build, "_load_problem", lambda library: None)
    assert build.main() == 0


@pytest.mark.parametrize("editable", [True, False])
def test_setup_builds_for_a_wheel_and_leaves_editable_installs_to_the_command(
    editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure inside an editable install would be a warning that nobody sees."""
    setuptools = pytest.importorskip("setuptools")
    inputs: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: inputs.update(arguments))
    monkeypatch.chdir(build.ROOT)
    runpy.run_path(str(build.ROOT / "setup.py"))
    called: list[Path] = []
    monkeypatch.setattr(build, "build_if_possible", called.append)
    monkeypatch.setattr("setuptools.command.build_py.build_py.run", lambda self: None)
    command = inputs["cmdclass"]["build_py"](setuptools.Distribution())
    command.editable_mode, command.build_lib = editable, str(tmp_path)
    command.run()
    assert called == ([] if editable else [tmp_path])


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_cmake_project_configures(cann: Path, packages: Path, tmp_path: Path) -> None:
    toolchain = build.find_toolchain(environment(cann))
    command = [
        "cmake",
        "-S",
        str(build.SOURCE),
        "-B",
        str(tmp_path / "build"),
        *toolchain.definitions(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("cmake", "g++", "readelf")),
    reason="cmake, g++ or readelf is missing",
)
@pytest.mark.parametrize(("generator", "tool"), [("Unix Makefiles", "make"), ("Ninja", "ninja")])
def test_the_operators_find_the_kernels_beside_them(
    generator: str, tool: str, cann: Path, packages: Path, tmp_path: Path
) -> None:
    """The project as it is, with sources that need no device; loaded from another directory, as
    torch does.
    """
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    source = tmp_path / "ascendc"
    (source / "lse_merge").mkdir(parents=True)
    shutil.copy2(build.SOURCE / "CMakeLists.txt", source)
    for name in ("lse_merge_kernel.cpp", "lse_merge_table.h", "lse_merge_tiling.cpp"):
        (source / "lse_merge" / name).write_text("")
    (source / "lse_merge" / "torch_binding.cpp").write_text(
        'extern int kernels; extern "C" int uses_kernels() { return kernels; }'
    )
    for directory, names in (
        (packages / "torch" / "lib", ("torch", "torch_cpu", "c10")),
        (packages / "torch_npu" / "lib", ("torch_npu",)),
        (cann / "lib64", ("ascendcl",)),
    ):
        directory.mkdir(parents=True)
        for name in names:
            shared = [
                "g++",
                "-shared",
                "-x",
                "c++",
                "/dev/null",
                "-o",
                str(directory / f"lib{name}.so"),
            ]
            subprocess.run(shared, check=True, timeout=60)
    built = str(tmp_path / "build")
    configure = [
        "-G",
        generator,
        "-S",
        str(source),
        "-B",
        built,
        *build.find_toolchain(environment(cann)).definitions(),
    ]
    for command in (configure, ["--build", built]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    operators, kernels = (Path(built) / "lib" / name for name in build.LIBRARIES)
    dynamic = subprocess.run(
        ["readelf", "-d", str(operators)], capture_output=True, text=True, check=True
    ).stdout
    assert f"[{kernels.name}]" in dynamic
    assert [line.split("[")[1] for line in dynamic.splitlines() if "PATH)" in line] == ["$ORIGIN]"]
    moved = tmp_path / "package" / "lib"
    moved.mkdir(parents=True)
    for library in (operators, kernels):
        library.rename(moved / library.name)
    program = f"import ctypes; print(ctypes.CDLL({str(moved / operators.name)!r}).uses_kernels())"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert loaded.stdout == "0\n", loaded.stderr


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_cmake_project_names_what_is_not_set(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(build.SOURCE), "-B", str(tmp_path / "build")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ASCEND_HOME_PATH is not set" in done.stderr
