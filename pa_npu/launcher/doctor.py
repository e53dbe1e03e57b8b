"""`doctor`: what this machine offers, what is installed, what is missing and how to get it."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from pa_npu import __version__
from pa_npu import platform as platforms
from pa_npu.backends.registry import DEFAULT_BACKEND as DEFAULT_TRAINER
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.engines.registry import DEFAULT_BACKEND, distributions, engine_kind
from pa_npu.errors import PaNpuError, UserError, plain
from pa_npu.launcher.placement import available_cores, port_problem
from pa_npu.launcher.run_checks import prepare
from pa_npu.launcher.trainer_versions import installed_versions, nearest_stack, trainer_problems
from pa_npu.platform.vendor_tools import busy_devices

_GIB = 2**30


@dataclass(frozen=True)
class Dependency:
    """A distribution that this package uses.

    use: what it is for, and so what does not work without it.
    needed: whether nothing runs without it.
    """

    name: str
    use: str
    needed: bool = True


_DEPENDENCIES = (
    Dependency("torch", "tensors and collectives"),
    Dependency("megatron-core", "the trainers' parallelism"),
    Dependency("transformers", "tokenizers and HF export"),
    Dependency("safetensors", "weights and the rollout buffer"),
    Dependency("pydantic", "configuration"),
    Dependency("PyYAML", "configuration"),
    Dependency("aiohttp", "requests to engines"),
    Dependency("msgspec", "engine responses"),
    Dependency("math-verify", "math rewards by symbolic comparison (else numeric)", needed=False),
    Dependency("pyarrow", "parquet datasets", needed=False),
    Dependency("tensorboard", "telemetry.trackers", needed=False),
    Dependency("peft", "adapters (lora.rank, model.adapter)", needed=False),
    Dependency("pillow", "images in prompts", needed=False),
    Dependency(
        "torchvision",
        "engines of vLLM for models that read images (on CPU: launch/install_cpu.sh vision)",
        needed=False,
    ),
    Dependency("ray", "several nodes (placement.cluster=ray)", needed=False),
)


def doctor(config: Config | None, device: str | None = None) -> int:
    """Prints the findings; returns 0 if a run can start, else 1.

    config: is checked too.
    device: the kind that runs are to use, where there is no configuration that names one.
    """
    print(f"pa_npu {__version__}, Python {sys.version.split()[0]} ({sys.executable})")
    print("\ndevices")
    for kind in platforms.KINDS:
        print(f"  {kind:<14} {device_line(kind)}")
    print("\nmachine")
    for name, value in _machine():
        print(f"  {name:<14} {value}")
    print("\npackages")
    versions = distributions(None, tuple(dependency.name for dependency in _DEPENDENCIES))
    versions |= installed_versions()
    problems = []
    for dependency in _DEPENDENCIES:
        problem = _report(dependency, versions.get(dependency.name))
        if problem:
            problems.append(problem)
    backend = config.rollout.backend if config else DEFAULT_BACKEND
    if config is None or config.rollout.has_engines:
        engine, engine_problem = engine_kind(backend).describe(config)
        print(f"  {backend:<14} {engine}")
        problems += [engine_problem] if engine_problem else []
    print("\nversions against the supported matrix (trainers)")
    for kind in platforms.KINDS:
        if platforms.missing(kind) is None:
            deviations = "; ".join(trainer_problems(kind)) or "as supported"
            print(f"  {kind:<14} {nearest_stack(kind).name}: {deviations}")
            for index, users in busy_devices(kind).items():
                print(f"  {kind} {index} in use: {users}")
    trainer = config.trainer.backend if config else DEFAULT_TRAINER
    if corrections := len(backend_module(trainer).changes()):
        print(
            f"\ntrainers with {trainer} replace {corrections} functions of other packages in "
            "their own processes, so that\nthese run on each kind of device; what is installed "
            "stays as it is"
        )
    print("\noperators")
    print(f"  {'ascendc':<14} {_ascendc()}")
    problem = port_problem("127.0.0.1", 0)
    problems += [f"cannot listen on 127.0.0.1 ({problem})"] if problem else []
    if config is not None:
        problems += _configuration(config)
    elif device in platforms.KINDS and (reason := platforms.missing(device)):
        problems.append(f"run.device: {device} cannot be used: {reason}")
    print()
    for line in problems:
        print(f"missing: {line}")
    print("a run can start" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def device_line(kind: str) -> str:
    """Returns how many devices of a kind there are and what they have, or why there are none."""
    reason = platforms.missing(kind)
    if reason:
        return f"no: {reason}"
    try:
        platform = platforms.get(kind)
        unit = "cores" if platform.visible_devices_env is None else "devices"
        memory = platform.total_memory_bytes() / _GIB
        return (
            f"yes: {platform.device_count()} {unit}, {memory:.0f} GiB, collectives over "
            f"{platform.comm_backend}"
        )
    except (PaNpuError, RuntimeError) as error:
        return f"no: {error}"


def _machine() -> list[tuple[str, str]]:
    cores = available_cores()
    lines = [("cores", f"{len(cores)} usable of {os.cpu_count()}")]
    for name, path in (("disk here", "."), ("/dev/shm", "/dev/shm"), ("/tmp", "/tmp")):
        if Path(path).exists():
            lines.append((name, f"{shutil.disk_usage(path).free / _GIB:.1f} GiB free"))
    return lines


def _report(dependency: Dependency, version: str | None) -> str | None:
    """Prints one line; returns the remedy where something needed is missing."""
    print(f"  {dependency.name:<14} {version or f'not installed: {dependency.use}'}")
    if version or not dependency.needed:
        return None
    return f"{dependency.name}; run launch/install_cpu.sh, or pip install -e .[cpu|cuda|npu]"


def _ascendc() -> str:
    """Says which implementation of the merge operator NPU tensors would get, and what its build
    lacks here.
    """
    from pa_npu.attention.lse_merge import available

    status = available()
    if status.implementation == "ascendc":
        return f"built: {status.reason}"
    try:
        from ops.ascendc.build import NotBuildable, find_toolchain
    except ImportError:
        return f"torch in its place: {status.reason}"  # installed without the source tree
    try:
        find_toolchain()
    except NotBuildable as error:
        return f"torch in its place: not built, {error}"
    return f"torch in its place: {status.reason}; build it with python -m ops.ascendc.build"


def _configuration(config: Config) -> list[str]:
    """Runs the checks that a run begins with, and prints what they found; returns problems."""
    try:
        findings = prepare(config)[1]
    except UserError as error:
        return [str(error)]
    print("\nconfiguration")
    for line in (*findings.counts, *findings.notes):
        print(f"  {line if sys.stdout.isatty() else plain(line)}")
    return []
