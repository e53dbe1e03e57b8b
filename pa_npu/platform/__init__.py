"""Device kinds: npu, cuda and cpu behind one class; nobody else knows which of them a run uses.

`get(kind)` returns the Platform (pa_npu.platform.base). `missing(kind)` describes why a kind cannot
be used, and `typical_memory(kind)` returns the memory to plan with then. Importing this package
imports nothing heavy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pa_npu.errors import UserError
from pa_npu.platform.typical import typical_memory

if TYPE_CHECKING:
    from pa_npu.platform.base import Platform

__all__ = ["KINDS", "get", "missing", "typical_memory"]


@dataclass(frozen=True)
class _Seat:
    """A device kind. platform: module:Class, imported when it is chosen. missing: does what the
    function of this name below does.
    """

    platform: str
    missing: Callable[[], str | None]


def get(kind: str = "auto") -> Platform:
    """Returns the platform `kind`; auto takes npu, then cuda, then cpu.

    Raises UserError, which names what is missing, for a kind that cannot be used.
    """
    if kind == "auto":
        kind = next(candidate for candidate in KINDS if missing(candidate) is None)
    if kind not in _SEATS:
        raise UserError(
            f"run.device: {kind!r} is not one of auto, {', '.join(_SEATS)}; use one of these"
        )
    reason = missing(kind)
    if reason is not None:
        raise UserError(f"run.device: {kind} cannot be used: {reason}, or set run.device=cpu")
    return _create(kind)


def missing(kind: str) -> str | None:
    """Describes what is missing for `kind` and how to get it; None if the kind can be used."""
    return _SEATS[kind].missing()


@functools.cache
def _create(kind: str) -> Platform:
    module, _, name = _SEATS[kind].platform.partition(":")
    platform: Platform = getattr(importlib.import_module(module), name)()
    return platform


def _missing_npu() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; install the npu extra in an environment with CANN"
    try:
        import torch
        import torch_npu  # noqa: F401 - registers torch.npu
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"torch_npu does not import ({error}); source CANN's set_env.sh and match torch_npu "
            "to torch"
        )
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available() or npu.device_count() == 0:
        return "torch_npu sees no NPU; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
    return None


def _missing_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install the cuda extra"
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return "torch sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


# In the order in which `auto` takes them. Another kind is a file beside these and a row here.
_SEATS = {
    "npu": _Seat("pa_npu.platform.npu:NpuPlatform", _missing_npu),
    "cuda": _Seat("pa_npu.platform.cuda:CudaPlatform", _missing_cuda),
    "cpu": _Seat("pa_npu.platform.cpu:CpuPlatform", lambda: None),
}
KINDS = tuple(_SEATS)
