"""The training backends by the name that trainer.backend selects; a backend is imported when it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from pa_npu.backends.protocol import BackendModule
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.sections import TrainerConfig
from pa_npu.errors import ConfigError

_MODULES = {"megatron": "pa_npu.backends.megatron.factory"}

DEFAULT_BACKEND = str(TrainerConfig.model_fields["backend"].default)


def backend_module(name: str) -> BackendModule:
    """What makes backends of this name. Raises ConfigError naming the known ones."""
    if name not in _MODULES:
        raise ConfigError(f"trainer.backend: {name!r} is not known; set it to one of {', '.join(_MODULES)}")
    return cast(BackendModule, importlib.import_module(_MODULES[name]))


def export_checkpoint(checkpoint: Path, output: Path, model: str | None = None) -> None:
    """Write the policy of `checkpoint` as an HF directory, by the backend that wrote it; see BackendModule."""
    trainer = read_meta(checkpoint).config.get("trainer") or {}
    backend_module(trainer.get("backend", DEFAULT_BACKEND)).export_checkpoint(checkpoint, output, model)
