"""Repairs to megatron-core 0.12.x that its own pins make necessary on every device kind; applied after its import."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from pa_npu.errors import PaNpuError


def require_no_megatron(what: str) -> None:
    """Raise when megatron.core is already imported: what was bound at its import can no longer be redirected."""
    if "megatron.core" in sys.modules:
        raise PaNpuError(
            f"{what}: megatron.core is already imported; call platform.prepare_megatron() before any import of it"
        )


def import_megatron() -> None:
    """Import what the trainer uses of megatron-core, without its advice to install apex and TransformerEngine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401 - imported for its effect


def apply_common_fixes() -> None:
    """Fix checkpoint writing (torch >= 2.7), checkpoint validation (numpy >= 2) and fp8 code that runs without fp8."""
    import numpy as np

    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]
    _fix_write_item()
    _fix_empty_fp8_shards()


def replace_megatron_jit() -> None:
    """Keep Megatron from compiling about 20 helpers at its import, which gains nothing outside CUDA. Before its import."""
    name = "megatron.core.jit"
    module: Any = types.ModuleType(name)
    module.jit_fuser = module.noop_decorator = lambda function: function
    module.enable_jit_fuser = module.disable_jit_fuser = lambda *args, **kwargs: None
    sys.modules.setdefault(name, module)


def answer_cuda_types(rename: Callable[[str], str]) -> None:
    """Megatron's optimizers compare param.type() with CUDA's type names: give them, and only them, the renamed one."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return rename(result) if isinstance(result, str) and caller.startswith("megatron.") else result

    setattr(torch.Tensor, "type", type_)  # noqa: B010 - mypy refuses a plain assignment to a method


def install_adam(adam: type[torch.optim.Optimizer]) -> None:
    """Make Megatron's optimizers use `adam`, an apex-shaped class, and treat it as apex's."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    for module in (optimizer, distributed):
        _set_if_present(module, "Adam", adam)
        _set_if_present(module, "HAVE_APEX_OR_TE", True)
        _set_if_present(module, "USING_PYTORCH_OPTIMIZER", False)


def has_fused_adam() -> bool:
    """True when Megatron found the Adam of TransformerEngine or apex (or MindSpeed's, which takes apex's place)."""
    import megatron.core.optimizer as optimizer

    return not issubclass(optimizer.Adam, torch.optim.AdamW)


def _set_if_present(module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        setattr(module, name, value)


def _fix_write_item() -> None:
    """torch >= 2.7 added a required argument to the private function that Megatron calls to write a shard."""
    import torch.distributed.checkpoint.filesystem as torch_filesystem

    try:
        import megatron.core.dist_checkpointing.strategies.filesystem_async as megatron_filesystem
    except ImportError as error:
        raise PaNpuError(f"megatron-core's checkpointing cannot be imported ({error}); install psutil") from error
    original = torch_filesystem._write_item
    parameters = inspect.signature(original).parameters
    if "serialization_format" not in parameters or not hasattr(megatron_filesystem, "_write_item"):
        return
    position = list(parameters).index("serialization_format")

    @functools.wraps(original)
    def write_item(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= position:
            kwargs.setdefault("serialization_format", torch_filesystem.SerializationFormat.TORCH_SAVE)
        return original(*args, **kwargs)

    megatron_filesystem._write_item = write_item


def _fix_empty_fp8_shards() -> None:
    """Without TransformerEngine the distributed optimizer's fp8 copy raises even when no parameter is fp8."""
    import megatron.core.fp8_utils as fp8

    if getattr(fp8, "HAVE_TE", False) or not hasattr(fp8, "_quantize_param_shard_impl"):
        return
    original = fp8._quantize_param_shard_impl

    def quantize(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    fp8._quantize_param_shard_impl = quantize
