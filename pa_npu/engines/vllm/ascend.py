"""Faults of an Ascend installation that no version shows, each found before vLLM is started and told in one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pa_npu.engines.interpreter import distributions
from pa_npu.engines.vllm.versions import EngineVersion
from pa_npu.platform.vendor_tools import cann_version

_ASKED = ("torch_npu", "triton", "triton-ascend")
# HCCL's root information of many ranks, sent in a form that only releases from 2.7.1.post11 on know, and 2.10.0.post4 not
_RANKS_PER_ROOT = "TORCH_HCCL_RANKS_PER_ROOT"


def installation_problem(version: EngineVersion, python: str | None) -> str | None:
    """Name what would fail engines of this row, or their publish groups with the trainers here; None off Ascend. python: theirs."""
    if version.cann is None:
        return None
    theirs = distributions(python, _ASKED)
    ours = distributions(None, _ASKED)
    return (
        _cann(version, cann_version())
        or _triton(theirs)
        or _libatb()
        or _root_information(ours.get("torch_npu"), theirs.get("torch_npu"))
    )


def _cann(version: EngineVersion, found: str | None) -> str | None:
    """Both ends of a publish need the same CANN. found: the trainers' release, such as 9.1.0; None where it is unknown."""
    if version.cann is None or not found or int(found.partition(".")[0]) == version.cann[0]:
        return None
    wanted = ".".join(map(str, version.cann))
    return (
        f"{version.name} is built for CANN {wanted}, and the trainers have {found}: both ends of a publish need the same; "
        f"install an engine for CANN {found.partition('.')[0]}, or CANN {wanted} with trainers for it"
    )


def _triton(found: Mapping[str, str]) -> str | None:
    if "triton" not in found:
        return None
    other = f" beside triton-ascend {found['triton-ascend']}" if "triton-ascend" in found else ""
    return (
        f"triton {found['triton']} is installed{other}; both lie in one folder, and vllm-ascend needs the latter's files: "
        "pip uninstall triton triton-ascend, then install triton-ascend (launch/install_npu.sh does)"
    )


def _libatb() -> str | None:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any((Path(folder) / "libatb.so").is_file() for folder in folders if folder):
        return None
    return (
        "libatb.so is in no folder of LD_LIBRARY_PATH, and vllm-ascend loads it; install Ascend-cann-nnal and source its "
        "nnal/atb/set_env.sh"
    )


def _root_information(ours: str | None, theirs: str | None) -> str | None:
    """Name the ends of a publish group that would not understand each other, where the user has set the variable."""
    if not os.environ.get(_RANKS_PER_ROOT) or ours == theirs:
        return None
    return (
        f"{_RANKS_PER_ROOT} is set, the trainers have torch_npu {ours} and the engines {theirs}, of which not both may know "
        "it: a publish group would fail or hang; unset it"
    )
