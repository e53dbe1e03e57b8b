"""Saves and restores a rank's part of a checkpoint: policy, optimizer, scheduler, refreshed reference, RNG states."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from pa_npu.backends.megatron.checkpoint.shards import PlannedShards
from pa_npu.backends.megatron.patches.known_classes import known_classes_only
from pa_npu.backends.megatron.stage import TriModel
from pa_npu.checkpoints.digests import damaged
from pa_npu.checkpoints.directories import CheckpointMeta, read_meta
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.platform.base import Platform

logger = logging.getLogger(__name__)

_REFERENCE = "reference."
_STAMP = "updates"
# What of a parameter group is state; everything else is the configuration's. Megatron saves rank 0's groups for all ranks,
# although their order follows a stage's parameters: norms would be decayed on a stage that begins with one.
_GROUP_STATE = ("params", "step")


class CheckpointContents:
    """One rank's model, optimizer and generators. Every method is collective."""

    def __init__(self, stage: TriModel, optimizer: Any, scheduler: Any, config: Config, platform: Platform) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._config = config
        self._platform = platform

    def plan(self, directory: Path, reference_version: int) -> PlannedShards:
        """reference_version: of the policy that the reference is a copy of; 0 is the HF model, which needs no saving."""
        has_reference = "reference" in self._stage.frozen
        save_reference = has_reference and reference_version > 0
        description = {
            "updates": int(self._scheduler.num_steps),
            "layout": layout(self._config),
            "reference": {"version": reference_version, "saved": save_reference} if has_reference else None,
        }
        state = self._sharded(is_loading=False, with_rng=True, with_reference=save_reference)
        state[_STAMP] = [_stamp(dist.get_rank(), dist.get_world_size(), int(self._scheduler.num_steps))]
        return PlannedShards(state, directory, description)

    def load(self, directory: Path) -> CheckpointMeta:
        """Restore everything from `directory`, whatever the parallel sizes it was written at.

        RNG states are those of ranks, so they are restored only at the same sizes. Raises UserError when it is not complete or
        holds other tensors, DataError when its files are of different versions or name what no checkpoint contains.
        """
        meta = read_meta(directory)
        same_layout = meta.layout == layout(self._config)
        with_reference = self._has_other_reference(meta)
        own = [{key: group[key] for key in group if key not in _GROUP_STATE} for group in self._groups()]
        state = self._sharded(is_loading=True, with_rng=same_layout, with_reference=with_reference)
        loaded = _read(state, directory, meta)
        load_policy(self._stage, loaded["model"])
        if with_reference:
            self._stage.frozen["reference"].load_state_dict(_without_prefix(loaded["reference"]))
        with torch.no_grad():
            model = {name: parameter.clone() for name, parameter in self._stage.policy.named_parameters()}
            self._optimizer.load_state_dict(loaded["optimizer"])
            self._check_masters(model, directory)
        for group, values in zip(self._groups(), own, strict=True):
            group.update(values)
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=meta.updates)
        if same_layout:
            _set_rng_state(loaded["rng"], self._platform)
        else:
            logger.info("checkpoint %s was written with %s: RNG states are not restored", directory, meta.layout)
        return meta

    def _check_masters(self, model: dict[str, torch.Tensor], directory: Path) -> None:
        """Raises DataError where the weights that the optimizer steps, in the model's type, are not the model's."""
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if hasattr(
                part, "_copy_main_params_to_model_params"
            ):  # in fp32 both are one memory, which the optimizer loaded last
                part._copy_main_params_to_model_params()
        for name, parameter in self._stage.policy.named_parameters():
            if not torch.equal(parameter, model[name]):
                raise damaged(directory, f"the optimizer's weights of {name} are not those of the model")

    def _groups(self) -> list[dict[str, Any]]:
        return list(self._optimizer.param_groups)

    def _has_other_reference(self, meta: CheckpointMeta) -> bool:
        """Whether the reference differs from the HF model that the stage already has."""
        return "reference" in self._stage.frozen and bool(meta.reference and meta.reference["saved"])

    def _sharded(self, *, is_loading: bool, with_rng: bool, with_reference: bool) -> dict[str, Any]:
        model = self._stage.sharded_state_dict()
        form = _sharding_arguments() if self._config.trainer.distributed_optimizer else {}
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, **form)
        state = {"model": model, "optimizer": optimizer}
        if with_reference:
            state["reference"] = self._stage.frozen["reference"].sharded_state_dict(_REFERENCE)
        if with_rng:
            shape, place = (dist.get_world_size(),), (dist.get_rank(),)
            state["rng"] = ShardedObject("rng", _rng_state(self._platform), shape, place)
        return state


def load_policy_only(stage: TriModel, directory: Path) -> None:
    """The policy's weights alone, as an export needs them. Raises as CheckpointContents.load does."""
    loaded = _read({"model": stage.sharded_state_dict()}, directory, read_meta(directory))
    load_policy(stage, loaded["model"])


def _read(state: dict[str, Any], directory: Path, meta: CheckpointMeta) -> dict[str, Any]:
    """Reads `state` through Megatron, and checks that all ranks that wrote a part of it were at the same update. Collective."""
    writers = meta.layout["devices"] if meta.digests else 0  # both came with one release
    stamps = [_stamp(rank, writers) for rank in range(dist.get_rank(), writers, dist.get_world_size())]
    try:
        with known_classes_only(str(directory)):
            loaded: dict[str, Any] = dist_checkpointing.load({**state, _STAMP: stamps}, str(directory))
    except CheckpointException as error:
        if not any(isinstance(failure, KeyError) for failure, _ in error.failures.values()):
            raise
        raise UserError(
            f"checkpoint {directory}: it holds other tensors than are asked for, as where another release of megatron-core saved a "
            f"distributed optimizer; go on with the release that saved it, or take its weights with pa-npu export"
        ) from None
    for updates in loaded.get(_STAMP, []):  # Megatron drops an empty list
        if updates != meta.updates:
            raise damaged(directory, f"a file is of a checkpoint after {updates} updates instead of {meta.updates}")
    return loaded


def _stamp(rank: int, ranks: int, updates: int | None = None) -> ShardedObject:
    """The number of updates that a writing rank's part of the state has seen; it stands among its tensors."""
    return ShardedObject(_STAMP, updates, (ranks,), (rank,))


def load_policy(stage: TriModel, state: dict[str, Any]) -> None:
    stage.policy.load_state_dict(state)


def layout(config: Config) -> dict[str, int]:
    """Returns the sizes that decide which rank holds which part."""
    trainer = config.trainer
    return {
        "devices": trainer.devices,
        "tensor_parallel": trainer.tensor_parallel,
        "pipeline_parallel": trainer.pipeline_parallel,
    }


def _without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_REFERENCE): value for name, value in state.items()}


def _sharding_arguments() -> dict[str, Any]:
    """The form of the distributed optimizer's state that can be loaded at other sizes; its name and argument vary by release."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    forms = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", None)
    if forms is None:  # core 0.12
        return {"sharding_type": "fully_sharded_model_space"}
    name = "fully_reshardable" if "fully_reshardable" in forms else "fully_sharded_model_space"
    # each replica's state is gathered on the host of its first rank alone
    return {"metadata": {"distrib_optim_sharding_type": name, "distrib_optim_fully_reshardable_mem_efficient": True}}


def _rng_state(platform: Platform) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": platform.rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any], platform: Platform) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    platform.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
