"""This rank's place among the trainer ranks: process group, Megatron's parallel state and RNG tracker, and who is who.

    initialise_parallel(config, platform, store, rank, world_size, local_index=0) -> Ranks
                        (patches.prepare() must have run before this module is imported)
    ranks() -> Ranks    (afterwards, anywhere)
    shutdown_parallel()

Rank order is Megatron's default: tensor parallel varies fastest, then data parallel, then pipeline.
"""

from __future__ import annotations

import datetime
import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from pa_npu.backends.protocol import Ranks
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.platform.base import Platform
from pa_npu.samples.replica_feed import ReplicaLinks


def initialise_parallel(
    config: Config, platform: Platform, store: dist.Store, rank: int, world_size: int, local_index: int = 0
) -> Ranks:
    """Join all trainer ranks on `store` (give it a PrefixStore of its own) and build Megatron's groups. A collective.

    local_index: this process's device among its visible ones.
    Collectives fail `collective_timeout_s` after they began, or where the device has a deadline of its own, soon after that.
    Raises ConfigError when `world_size` is not `trainer.devices`.
    """
    trainer = config.trainer
    if world_size != trainer.devices:
        raise ConfigError(
            f"trainer.devices: {trainer.devices}, but {world_size} ranks were started; start one rank per device"
        )
    timeout_s = platform.group_timeout_s(config.collective_timeout_s)
    platform.set_device(local_index)
    dist.init_process_group(
        platform.process_group_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed)
    return ranks()


def shutdown_parallel() -> None:
    """Destroy Megatron's groups and the process group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks() -> Ranks:
    """This rank's place; `initialise_parallel` must have run."""
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
    )


def tensor_group() -> dist.ProcessGroup:
    """Ranks that share one stage of one replica."""
    return parallel_state.get_tensor_model_parallel_group()


def side_tensor_group() -> dist.ProcessGroup:
    """The ranks of `tensor_group` again, for a thread whose collectives must not mix with training's. A collective of all."""
    here = ranks()
    groups = [
        dist.new_group(list(range(first, first + here.tensor_size)))
        for first in range(0, here.world_size, here.tensor_size)
    ]
    return groups[here.rank // here.tensor_size]


def replica_links(platform: Platform, device: torch.device, timeout_s: float) -> ReplicaLinks | None:
    """This rank's, see ReplicaLinks; None where a replica is one rank. A collective of all.

    timeout_s: of the groups' collectives.
    """
    here = ranks()
    size = here.tensor_size * here.pipeline_size
    if size == 1:
        return None
    timeout = datetime.timedelta(seconds=platform.group_timeout_s(timeout_s))
    found: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup | None]] = {}
    for replica in range(here.data_size):
        members = [
            tensor + here.tensor_size * (replica + here.data_size * stage)
            for stage in range(here.pipeline_size)
            for tensor in range(here.tensor_size)
        ]
        with_loss = [members[0], *members[-here.tensor_size :]]
        group = dist.new_group(members, timeout=timeout)
        loss = dist.new_group(with_loss, timeout=timeout) if here.pipeline_size > 1 else None
        found[replica] = group, loss if here.rank in with_loss else None
    group, loss = found[here.data_rank]
    # communicators come into being with their first collective: here, in one order on all ranks, not beside training's first ones
    for made in (group, loss):
        if made is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=made)
    tensor_ranks = tensor_group() if here.tensor_size > 1 else None
    return ReplicaLinks(group, loss, tensor_ranks, here.pipeline_size, platform.detached_stream)


def pipeline_group() -> dist.ProcessGroup:
    """Ranks of one replica with the same tensor rank, one per stage."""
    return parallel_state.get_pipeline_model_parallel_group()


def data_group() -> dist.ProcessGroup:
    """Ranks that hold the same weights in different replicas."""
    return parallel_state.get_data_parallel_group()


def model_group() -> dist.ProcessGroup:
    """All ranks of one replica."""
    return parallel_state.get_model_parallel_group()
