"""Writing the stages of the policy as an HF directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Place
from pa_npu.families.spec import ModelSpec


def export_hf(
    module: torch.nn.Module,
    spec: ModelSpec,
    directory: str | Path,
    place: Place,
    shard_group: dist.ProcessGroup | None = None,
    **limits: Any,
) -> None:
    """Write the stage in `module` (one GPT stage, wrappers are fine) as its share of `directory`; collective, see write_hf."""
    source = StageTensors(module, spec, place, BUCKET_BYTES, shard_group) if place.sends else None
    write_hf(source, spec, directory, place, next(module.parameters()).device, **limits)
