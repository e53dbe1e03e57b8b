"""Megatron dist-checkpoints of a run: model, optimizer, RNG, weight version and data position; complete or not there at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from pa_npu.config.schema import Config
from pa_npu.errors import UserError

logger = logging.getLogger(__name__)

META_FILE = "pa_npu.json"


def directory_name(version: int) -> str:
    return f"iteration_{version:06d}"


def save(parent: Path, version: int, data_position: int, config: Config, stage: Any, optimizer: Any) -> Path:
    """Write `parent`/iteration_<version>. Collective; the directory is renamed into place when all ranks have written."""
    final, temporary = parent / directory_name(version), parent / f".{directory_name(version)}.incomplete"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(stage, optimizer, is_loading=False), str(temporary))
    dist.barrier()
    if dist.get_rank() == 0:
        meta = {
            "version": version,
            "data_position": data_position,
            "seed": config.run.seed,
            "world_size": dist.get_world_size(),
        }
        (temporary / META_FILE).write_text(json.dumps(meta, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        logger.info("saved checkpoint %s", final)
    dist.barrier()
    return final


def read_meta(directory: Path) -> dict[str, Any]:
    """The meta data of a complete checkpoint. Raises UserError when `directory` is not one."""
    try:
        meta = json.loads((directory / META_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"checkpoint.load: {directory} is not a complete checkpoint ({error}); give the path of an iteration_NNNNNN directory"
        ) from None
    return dict(meta)


def load(directory: Path, config: Config, stage: Any, optimizer: Any) -> int:
    """Restore model, optimizer and RNG from `directory`; returns the weight version. Collective."""
    meta = read_meta(directory)
    same_world = meta["world_size"] == dist.get_world_size()
    state = _sharded_state(stage, optimizer, is_loading=True, with_rng=same_world)
    loaded = dist_checkpointing.load(state, str(directory))
    stage.load_state_dict(loaded["model"], strict=False)
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    if same_world:
        _set_rng_state(loaded["rng"])
    else:
        logger.info("the checkpoint was written by %d ranks, so RNG states are not restored", meta["world_size"])
    return int(meta["version"])


def _sharded_state(stage: Any, optimizer: Any, *, is_loading: bool, with_rng: bool = True) -> dict[str, Any]:
    model = stage.sharded_state_dict()
    state = {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, **_sharding_arguments()),
    }
    if with_rng:
        rank = dist.get_rank()
        state["rng"] = ShardedObject("rng", _rng_state(), (dist.get_world_size(),), (rank,))
    return state


def _sharding_arguments() -> dict[str, Any]:
    """The distributed optimizer's sharding, which can be loaded at other parallel sizes; spelled differently since core 0.13."""
    import megatron.core

    if tuple(int(x) for x in megatron.core.__version__.split(".")[:2]) < (0, 13):
        return {"sharding_type": "fully_sharded_model_space"}
    return {"metadata": {"distrib_optim_sharding_type": "fully_sharded_model_space"}}


def _rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
