"""Tells the coordinator, from rank 0, the trainers' devices, software and kernels, before anything is trained."""

from __future__ import annotations

import platform as python

import torch

from pa_npu.attention.runs_on import attention_kernels
from pa_npu.backends.protocol import TrainBackend
from pa_npu.config.schema import Config
from pa_npu.control.software import TrainersRunOn
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def trainers_run_on(config: Config, spec: ModelSpec, platform: Platform, backend: TrainBackend) -> TrainersRunOn:
    """As this rank finds it; the others have the same installation."""
    heads = spec.num_heads // config.trainer.tensor_parallel
    kernels = attention_kernels(
        backend.device, _DTYPES[config.model.dtype], heads, spec.head_dim, config.attention.implementation
    )
    return TrainersRunOn(
        ranks=config.trainer.devices,
        device=platform.name,
        collectives=platform.comm_backend,
        python=python.python_version(),
        torch=torch.__version__,
        backend=backend.software,
        dtype=config.model.dtype,
        attention=config.attention.implementation,
        kernel=kernels.kernel,
        merge=kernels.merge,
        fallback=kernels.fallback,
    )
