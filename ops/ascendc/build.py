"""Builds the Ascend C operators where CANN, torch and torch_npu are found, and says why not where they are not.

python -m ops.ascendc.build     into the package that this interpreter imports; ends with 1 where that cannot be done
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
ROOT = SOURCE.parents[1]
# Where pa_npu.attention.lse_merge looks, relative to the directory that holds the package.
PACKAGE_LIBRARIES = Path("pa_npu") / "attention" / "lib"
LIBRARIES = ("libpa_npu_ascendc.so", "libpa_npu_ascendc_kernels.so")

CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_DEFAULTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
CMAKE_HELPERS = (
    "tools/tikcpp/ascendc_kernel_cmake",
    "compiler/tikcpp/ascendc_kernel_cmake",
    "ascendc_devkit/tikcpp/samples/cmake",
)
SKIP_VARIABLE = "PA_NPU_SKIP_ASCENDC"
SOC_VARIABLE = "SOC_VERSION"
DEFAULT_SOC = "ascend910b1"
BUILD_TIMEOUT_S = 1800
IMPORT_TIMEOUT_S = 300


class NotBuildable(Exception):
    """Something the build needs is missing; the message says what."""


class BuildFailed(RuntimeError):
    """Everything was there and the build failed; the message has the end of its output."""


@dataclass(frozen=True)
class Toolchain:
    """The settings of the CMake project."""

    cann: Path
    torch: Path
    torch_npu: Path
    cxx11_abi: bool
    soc_version: str
    cmake: Path

    def definitions(self) -> list[str]:
        return [
            f"-DASCEND_HOME_PATH={self.cann}",
            f"-DSOC_VERSION={self.soc_version}",
            f"-DTORCH_PATH={self.torch}",
            f"-DTORCH_NPU_PATH={self.torch_npu}",
            f"-DTORCH_CXX11_ABI={int(self.cxx11_abi)}",
        ]


def main() -> int:
    """The command.

    What was installed into this environment (torch, torch_npu) is what it builds against.
    """
    try:
        library = build_operators(ROOT / PACKAGE_LIBRARIES)
    except BuildFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    if library is None:
        return 1
    problem = _load_problem(library)
    if problem is not None:
        print(f"error: {library} was built and does not load: {problem}", file=sys.stderr)
        return 1
    return 0


def build_if_possible(package_root: Path) -> Path | None:
    """Builds the operators into the package under `package_root`, setuptools' build_lib; setup.py
    calls it for a wheel.
    """
    return build_operators(package_root / PACKAGE_LIBRARIES)


def build_operators(
    output: Path,
    *,
    build_directory: Path = ROOT / "build" / "ascendc",
    environ: Mapping[str, str] = os.environ,
    log: Callable[[str], None] = print,
) -> Path | None:
    """Build into `output` and return the operator library, or log why not and return None.

    Raises BuildFailed when the toolchain is complete and the build fails all the same.
    """
    try:
        toolchain = find_toolchain(environ)
    except NotBuildable as missing:
        log(f"Ascend C operators not built: {missing}. torch does their work.")
        return None
    log(f"building Ascend C operators for {toolchain.soc_version} with {toolchain.cann}")
    configure = [
        str(toolchain.cmake),
        "-S",
        str(SOURCE),
        "-B",
        str(build_directory),
        *toolchain.definitions(),
    ]
    _run(configure, environ)
    _run([str(toolchain.cmake), "--build", str(build_directory), "--parallel"], environ)
    output.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        built = build_directory / "lib" / name
        if not built.exists():
            raise BuildFailed(f"the build ended without {built}; see {build_directory}")
        shutil.copy2(built, output / name)
    log(f"Ascend C operators are in {output}")
    return output / LIBRARIES[0]


def find_toolchain(environ: Mapping[str, str] = os.environ) -> Toolchain:
    """CANN with Ascend C, torch, torch_npu and CMake; raises NotBuildable naming the first that is
    missing.
    """
    if environ.get(SKIP_VARIABLE, "0") not in ("", "0"):
        raise NotBuildable(f"{SKIP_VARIABLE} is set")
    cann = _find_cann(environ)
    torch = _package("torch")
    torch_npu = _package("torch_npu")
    cmake = shutil.which("cmake", path=environ.get("PATH"))
    if cmake is None:
        raise NotBuildable("cmake is not on PATH; pip install cmake")
    soc_version = environ.get(SOC_VARIABLE, DEFAULT_SOC)
    return Toolchain(cann, torch, torch_npu, _torch_cxx11_abi(), soc_version, Path(cmake))


def _find_cann(environ: Mapping[str, str]) -> Path:
    named = [environ[name] for name in CANN_VARIABLES if environ.get(name)]
    for candidate in (*named, *CANN_DEFAULTS):
        if any((Path(candidate) / helper / "ascendc.cmake").exists() for helper in CMAKE_HELPERS):
            return Path(candidate).resolve()
    raise NotBuildable(
        f"no CANN toolkit with Ascend C in {', '.join((*named, *CANN_DEFAULTS))}; source its "
        f"set_env.sh or set {CANN_VARIABLES[0]}"
    )


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NotBuildable(f"{name} cannot be imported by {sys.executable}; install it first")
    return Path(spec.origin).parent


def _torch_cxx11_abi() -> bool:
    """Which C++ ABI torch was built with; asked of a process of its own, so that installing imports
    no torch.
    """
    code = "import torch; print(int(torch.compiled_with_cxx11_abi()))"
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
    )
    if asked.returncode != 0:
        raise NotBuildable(f"torch does not import: {asked.stderr.strip().splitlines()[-1]}")
    return asked.stdout.strip() == "1"


def _load_problem(library: Path) -> str | None:
    """Why an NPU process could not load the operators, in one line; asked of a process of its own."""
    code = f"import torch, torch_npu; torch.ops.load_library({str(library)!r})"
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
    )
    if asked.returncode == 0:
        return None
    return (asked.stderr.strip().splitlines() or [f"the process ended with {asked.returncode}"])[-1]


def _run(command: list[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        command,
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise BuildFailed(
            f"{' '.join(command[:4])} ... failed with exit code {done.returncode}; set "
            f"{SKIP_VARIABLE}=1 to install without the operators\n{done.stdout[-6000:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
