"""The training backends by the name that trainer.backend selects; each is imported when selected.

To use a backend of your own, write a module with an object that has the functions of BackendModule,
and set trainer.backend=module:NAME.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from pa_npu.backends.protocol import BackendModule
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.sections.learning import TrainerConfig
from pa_npu.config.user_code import check_name, import_object
from pa_npu.errors import ConfigError

_MODULES = {"megatron": "pa_npu.backends.megatron.factory", "fsdp": "pa_npu.backends.fsdp.factory"}
_OFFERED = tuple(name for name in vars(BackendModule) if not name.startswith("_"))

DEFAULT_BACKEND = str(TrainerConfig.model_fields["backend"].default)


def backend_module(name: str) -> BackendModule:
    """Returns the module that makes backends of this name. Raises ConfigError if there is none."""
    check_name("trainer.backend", name, _MODULES, "module:NAME")
    if name in _MODULES:
        return cast(BackendModule, importlib.import_module(_MODULES[name]))
    module = import_object("trainer.backend", name, "module:NAME")
    missing = [function for function in _OFFERED if not callable(getattr(module, function, None))]
    if missing:
        raise ConfigError(
            f"trainer.backend: {name} has no {', '.join(missing)}(); see BackendModule in "
            "pa_npu/backends/protocol.py"
        )
    return cast(BackendModule, module)


def export_checkpoint(
    checkpoint: Path, output: Path, model: str | None = None, merged: bool = False
) -> None:
    """Writes the policy of `checkpoint` as an HF directory, with the backend that wrote it; see
    BackendModule.
    """
    trainer = read_meta(checkpoint).config.get("trainer") or {}
    backend_module(trainer.get("backend", DEFAULT_BACKEND)).export_checkpoint(
        checkpoint, output, model, merged
    )
