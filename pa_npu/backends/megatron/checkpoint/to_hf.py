"""HF export of a checkpoint on demand: one process on the host, whatever parallel sizes the checkpoint was written at."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.exported import checked_run
from pa_npu.backends.megatron.patches import prepare


def export_checkpoint(checkpoint: Path, output: Path, model: str | None = None) -> None:
    """Write the policy of `checkpoint` as the HF directory `output`, in the type it was trained in.

    model: the HF model that the run began with, for config.json and the tokenizer, where it has moved since.
    Needs the model's size in host memory. Raises as checked_run does; ExportError when it cannot be written.
    """
    config, spec = checked_run(checkpoint, output, model)
    platform = platforms.get("cpu")
    prepare(platform.name)
    # everything below imports megatron, which only works in a prepared process
    from pa_npu.backends.megatron.checkpoint.state import load_policy_only
    from pa_npu.backends.megatron.parallel import initialise_parallel, shutdown_parallel
    from pa_npu.backends.megatron.stage import build_stage
    from pa_npu.backends.megatron.weights.hf_directory import export_hf

    place = initialise_parallel(config, platform, dist.HashStore(), rank=0, world_size=1)
    try:
        stage = build_stage(spec, config, platform)
        load_policy_only(stage, checkpoint)
        export_hf(stage.policy, spec, output, place)
    finally:
        shutdown_parallel()
