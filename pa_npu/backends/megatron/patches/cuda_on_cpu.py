"""Redirects torch.cuda and device="cuda" to the CPU, so that code written for CUDA only (megatron-core) runs there.

The counterpart of torch_npu's `transfer_to_npu`. It changes torch for the whole process: trainer
ranks only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
    "zeros_like",
)


def redirect_cuda_to_cpu() -> None:
    """Install the redirection; `table.prepare` does so once."""
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_cuda_module()


def redirect_megatron_rng() -> None:
    """Point Megatron's RNG tracker, which reaches CUDA generators by private calls, at the CPU
    generator.
    """
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_factories() -> None:
    # torch caches the original factories on first use of a device context; fill that cache before
    # they are replaced, or `with torch.device("meta")` would silently stop working
    import torch.utils._device as torch_device

    torch_device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _with_cpu_device(getattr(torch, name)))


def _with_cpu_device(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def _redirect_tensor_methods() -> None:
    original_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return original_to(self, *args, **kwargs)

    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    replacements: dict[str, Any] = {"to": to, "cuda": same, "pin_memory": same}
    for name, function in replacements.items():
        setattr(torch.Tensor, name, function)
    setattr(torch.nn.Module, "cuda", same)  # noqa: B010 - mypy refuses a plain assignment to a method


class _Event:
    """An event of a device that runs everything in order: always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(contextlib.nullcontext):
    """The only stream of a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def wait_stream(self, *args: Any) -> None:
        pass

    def wait_event(self, *args: Any) -> None:
        pass

    def record_event(self, *args: Any, **kwargs: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


def _returning(value: Any) -> Callable[..., Any]:
    # torch._dynamo asserts that torch.cuda's functions are distinct objects, hence a fresh one for
    # each name
    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    return function


def _seeding() -> Callable[[int], None]:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


def _redirect_cuda_module() -> None:
    replacements: dict[str, Any] = {
        "is_available": _returning(False),
        "device_count": _returning(1),
        "current_device": _returning(_CPU),  # Megatron uses it as a device argument only
        "set_device": _returning(None),
        "synchronize": _returning(None),
        "empty_cache": _returning(None),
        "reset_peak_memory_stats": _returning(None),
        "memory_allocated": _returning(0),
        "max_memory_allocated": _returning(0),
        "memory_reserved": _returning(0),
        "manual_seed": _seeding(),
        "manual_seed_all": _seeding(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
        "current_stream": lambda *args, **kwargs: _Stream(),
        "default_stream": lambda *args, **kwargs: _Stream(),
        "stream": lambda stream=None: _Stream(),
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _returning(None))
    setattr(torch.cuda.nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())  # noqa: B010
