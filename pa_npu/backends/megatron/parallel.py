"""This rank's place among the trainer ranks: process group, Megatron's parallel state and RNG tracker, and who is who.

initialise_parallel(config, platform, store, rank, local_index=0) -> Place
                    (patches.table.prepare() must have run before this module is imported)
place() -> Place    (afterwards, anywhere)
shutdown_parallel()
"""

from __future__ import annotations

import datetime
import math

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from pa_npu.attention.context import ContextGroup
from pa_npu.config.mesh import Mesh, Place
from pa_npu.config.schema import Config
from pa_npu.platform.base import Platform


def initialise_parallel(
    config: Config, platform: Platform, store: dist.Store, rank: int, local_index: int = 0
) -> Place:
    """Join all trainer ranks on `store` (give it a PrefixStore of its own) and build Megatron's
    groups. A collective.

    local_index: this process's device among its visible ones.
    Collectives fail `collective_timeout_s` after they began, or where the device has a deadline of
    its own, soon after that.
    """
    trainer = config.trainer
    timeout_s = platform.group_timeout_s(config.deadlines.collective_timeout_s)
    platform.set_device(local_index)
    dist.init_process_group(
        platform.process_group_backend,
        store=store,
        rank=rank,
        world_size=trainer.devices,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=config.mesh.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed)
    return place()


def shutdown_parallel() -> None:
    """Destroy Megatron's groups and the process group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def place() -> Place:
    """This rank's place; `initialise_parallel` must have run."""
    mesh = Mesh(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        experts_tensor=1,
    )
    return mesh.place(dist.get_rank())


def stage_group() -> dist.ProcessGroup:
    """Returns a new group of all ranks of this stage, of every replica. A collective of all."""
    here = place()
    groups = {
        ranks: dist.new_group(list(ranks))
        for ranks in here.mesh.groups("tensor", "context", "data")
    }
    return groups[here.group("tensor", "context", "data")]


def shard_group(backend: str | None = None) -> dist.ProcessGroup | None:
    """Returns a new group of place().shard_group; None where that is this rank alone.

    A collective of all.
    """
    here = place()
    everyones = [ranks for ranks in here.mesh.shard_groups() if len(ranks) > 1]
    groups = {ranks: dist.new_group(list(ranks), backend=backend) for ranks in everyones}
    return groups.get(here.shard_group)


def context_group() -> ContextGroup | None:
    """This rank's context group, whose ranks have equally many rows for each rank of their tensor
    group; None where that is one rank.
    """
    mesh = place().mesh
    if mesh.context == 1:
        return None
    return ContextGroup(parallel_state.get_context_parallel_group(), multiple=mesh.tensor)
