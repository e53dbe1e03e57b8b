"""MindSpeed's activation on Ascend, and what stands in for it where it is not installed.

MindSpeed rewrites torch and Megatron when it is imported. It is used for compatibility only
(optimizer, type checks, pipeline shapes); fused kernels are called by our own layers. The rules
that its activation needs:

1. torch_npu's transfer_to_npu, then MindSpeed, then megatron; in another order it silently patches
   nothing.
2. sys.argv is cut to its first element meanwhile, because unknown arguments of ours would become
   MindSpeed's.
3. Variable sequence lengths are switched on in its arguments before its adaptor is imported;
   nothing is patched twice.
4. Two of its global patches are undone: `torch.distributed.all_reduce` would turn float64 into a
   silent no-op and refuse keyword calls, `torch.Tensor.view` would copy where torch raises.
5. It replaces the root logger's handlers; ours are put back.
6. It asks every imported module for the names it patches. The aliases that transformers 5 keeps of
   its image processors (transfer_to_npu imports transformers) raise when asked without torchvision,
   so such modules are set aside meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from pa_npu.errors import PaNpuError, UserError

LOG = logging.getLogger(__name__)

UNDONE = ("torch.distributed.all_reduce", "torch.Tensor.view")


def is_installed() -> bool:
    """Raises UserError where MindSpeed is installed without the Megatron-LM checkout that it needs."""
    if importlib.util.find_spec("mindspeed") is None:
        LOG.info(
            "MindSpeed is not installed: megatron-core runs with the replacements of "
            "pa_npu.backends.megatron.patches"
        )
        return False
    if not _has_megatron_training():
        raise UserError(
            "run.device: npu: MindSpeed is installed but needs megatron.training, which "
            "megatron-core's package lacks; put a Megatron-LM checkout of its core version on "
            "PYTHONPATH, or uninstall mindspeed to run without it"
        )
    return True


def transfer_to_npu() -> None:
    """torch_npu's redirection of torch.cuda to torch.npu."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the list of what it redirects
        from torch_npu.contrib import transfer_to_npu  # noqa: F401 - patches on import


def activate() -> None:
    """Import MindSpeed's adaptor under the rules above.

    Raises PaNpuError when a patch to undo stays in place.
    """
    originals = {path: _resolve(path) for path in UNDONE}
    with _short_argv(), _kept_root_logger(), _silent_modules_set_aside():
        from mindspeed.args_utils import get_mindspeed_args

        vars(get_mindspeed_args()).update(variable_seq_lengths=True)
        import mindspeed.megatron_adaptor  # noqa: F401 - patches on import
        from mindspeed.patch_utils import MindSpeedPatchesManager

        for path in UNDONE:
            patch = MindSpeedPatchesManager.patches_info.get(path)
            if patch is not None:
                patch.remove_patch()
                patch.remove_wrappers()
    for path, original in originals.items():
        if _resolve(path) is not original:
            raise PaNpuError(
                f"MindSpeed: its patch of {path} could not be undone, and it changes results; use "
                "its 26.1.0_core_r0.12.1 or core_r0.16.0"
            )


def answer_device_capability() -> None:
    """The capability of a GPU that has what Megatron asks about."""
    torch.cuda.get_device_capability = lambda *args, **kwargs: (8, 0)


def _has_megatron_training() -> bool:
    """Returns whether a Megatron-LM checkout is on the path, found without importing anything of
    it.
    """
    spec = PathFinder.find_spec("megatron")
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "training" / "__init__.py").is_file() for place in places or ())


def _resolve(path: str) -> Any:
    value: Any = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


@contextlib.contextmanager
def _short_argv() -> Iterator[None]:
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = argv


@contextlib.contextmanager
def _kept_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def _silent_modules_set_aside() -> Iterator[None]:
    aside = {name: module for name, module in sys.modules.copy().items() if not _answers(module)}
    for name in aside:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(aside)


def _answers(module: Any) -> bool:
    try:
        hasattr(module, "pa_npu_probe")
    except ImportError:
        return False
    return True
