"""HF export of a checkpoint on demand: one process on the host, whatever parallel sizes the checkpoint was written at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from pa_npu import platform as platforms
from pa_npu.backends.megatron.patches import prepare
from pa_npu.checkpoints.digests import check_files
from pa_npu.checkpoints.directories import CheckpointMeta, read_meta
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.schema import Config
from pa_npu.errors import DataError, UserError
from pa_npu.families.spec import ModelSpec


def export_checkpoint(checkpoint: Path, output: Path, model: str | None = None) -> None:
    """Write the policy of `checkpoint` as the HF directory `output`, in the type it was trained in.

    model: the HF model that the run began with, for config.json and the tokenizer, where it has moved since.
    Needs the model's size in host memory. Raises UserError when the checkpoint is not complete, is of another model, or
    `output` is not empty, DataError where a file of it is not what was written; ExportError when it cannot be written.
    """
    meta = read_meta(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists; name a directory that does not, or an empty one")
    config = _single_process(checkpoint, meta, model)
    spec = ModelSpec.read(config.model.path)
    if model_fingerprint(config.model.path) != meta.model["fingerprint"]:
        raise DataError(
            f"--model: {config.model.path} is not the model that {checkpoint} began with ({meta.model['path']}); name that one"
        )
    check_files(checkpoint)
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


def _single_process(checkpoint: Path, meta: CheckpointMeta, model: str | None) -> Config:
    """The run's configuration for one process on the host."""
    tree: dict[str, Any] = {**meta.config}
    try:
        tree["run"] = {**tree["run"], "device": "cpu"}
        tree["model"] = {**tree["model"], **({"path": model} if model else {})}
        tree["placement"] = {}
        tree["trainer"] = {}
        tree["microbatch"] = {}
        return Config.model_validate(tree)
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--checkpoint: the configuration in {checkpoint} is of another release of this package ({reason}); use that one"
        ) from None
