"""Checks before an export of a checkpoint on demand, whichever backend wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pa_npu.checkpoints.digests import check_files
from pa_npu.checkpoints.directories import CheckpointMeta, read_meta
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.schema import Config
from pa_npu.errors import DataError, UserError
from pa_npu.families.spec import ModelSpec


def checked_run(checkpoint: Path, output: Path, model: str | None) -> tuple[Config, ModelSpec]:
    """The configuration of the run for one process on the host, and its model.

    model: the HF model that the run began with, where it has moved since. Raises UserError when the checkpoint is not complete, is
    of another model, or `output` is not empty, DataError where a file of it is not what was written.
    """
    meta = read_meta(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists; name a directory that does not, or an empty one")
    config = _single_process(checkpoint, meta, model)
    spec = ModelSpec.of(config)
    if model_fingerprint(config.model.path) != meta.model["fingerprint"]:
        raise DataError(
            f"--model: {config.model.path} is not the model that {checkpoint} began with ({meta.model['path']}); name that one"
        )
    check_files(checkpoint)
    return config, spec


def _single_process(checkpoint: Path, meta: CheckpointMeta, model: str | None) -> Config:
    """The run's configuration for one process on the host."""
    tree: dict[str, Any] = {**meta.config}
    try:
        tree["run"] = {**tree["run"], "device": "cpu"}
        tree["model"] = {**tree["model"], "path": model or meta.model["path"]}
        tree["placement"] = {}
        tree["trainer"] = {"backend": tree["trainer"]["backend"]}
        tree["microbatch"] = {}
        return Config.model_validate(tree)
    except (KeyError, TypeError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--checkpoint: the configuration in {checkpoint} is of another release of this package ({reason}); use that one"
        ) from None
