"""Assemble one trainer rank: parallel groups, model with weights, publisher, backend, border and rollout iterators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from pa_npu.backends.megatron.backend import MegatronBackend
from pa_npu.backends.megatron.gather import Position
from pa_npu.backends.megatron.hf_map import load_hf
from pa_npu.backends.megatron.parallel import (
    Ranks,
    initialise_parallel,
    shutdown_parallel,
    side_tensor_group,
    tensor_group,
)
from pa_npu.backends.megatron.stage import TriModel, build_stage
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.publish.late_engines import LateEngines, VersionGate
from pa_npu.publish.publisher import Publisher
from pa_npu.publish.sizing import auto_bucket_bytes
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.rollout_buffer import StoreRolloutBuffer
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.border import Border


@dataclass(frozen=True)
class RankParts:
    backend: MegatronBackend
    border: Border
    rollouts: Callable[[int], MicrobatchIterator]
    publisher: Publisher | None
    late_engines: LateEngines | None

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        shutdown_parallel()


def assemble_rank(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    store: dist.TCPStore,
    rank: int,
    local_rank: int,
    timeline: Timeline,
) -> RankParts:
    """Collective over all trainer ranks. `store` is this process's client of the run's store."""
    platform.seed_all(config.run.seed)
    platform.set_deterministic(config.run.deterministic)
    group_store = dist.PrefixStore(f"{attempt_prefix()}trainer", store)
    ranks = initialise_parallel(config, platform, group_store, rank, config.trainer.devices, local_rank)
    device = platform.device(local_rank)
    stage = load_stage(config, spec, platform)
    channel = StoreChannel(store, attempt_prefix())
    gate = VersionGate(config.border_timeout_s)
    late_group = side_tensor_group() if ranks.tensor_size > 1 else None
    publisher, late = None, None
    if ranks.data_rank == 0:
        make = partial(
            make_publisher, config, spec, platform, store, device, bucket_bytes(config, platform, ranks, device)
        )
        publisher = make(stage.policy, Position.from_megatron())
        late_position = replace(Position.from_megatron(), tp_group=late_group)
        late_publisher = make(stage.published_version(), late_position)
        late = LateEngines(late_publisher, channel, gate, platform, rank, config.publish.timeout_s)
        if ranks.is_stage_leader:
            channel.put_json(f"late/manifest/{ranks.pipeline_rank}", late_publisher.manifest())
            channel.put_json(f"publish/manifest/{ranks.pipeline_rank}", publisher.manifest())
    backend = MegatronBackend(stage, config, spec, platform, device, publisher, timeline, gate)
    border = Border(config, backend, channel, timeline, rank)
    return RankParts(backend, border, rollout_source(config, channel, ranks, device, timeline), publisher, late)


def load_stage(config: Config, spec: ModelSpec, platform: Platform) -> TriModel:
    """This rank's pipeline stage with the HF weights in policy and reference; the old policy is copied at every publish."""
    stage = build_stage(spec, config, platform, frozen=config.frozen_models)
    for name, model in stage.gpts().items():
        if name != "old":
            load_hf(model, spec)
    return stage


def make_publisher(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    store: dist.TCPStore,
    device: torch.device,
    num_bytes: int,
    module: torch.nn.Module,
    position: Position,
) -> Publisher:
    """num_bytes: of a bucket."""
    return Publisher(
        module,
        spec,
        store_host=store.host,
        store_port=store.port,
        bucket_bytes=num_bytes,
        timeout_s=config.publish.timeout_s,
        backend=platform.comm_backend,
        device=device,
        position=position,
        scope=attempt_prefix(),
    )


def bucket_bytes(config: Config, platform: Platform, ranks: Ranks, device: torch.device) -> int:
    """publish.bucket_mib in bytes. With auto the ranks of a tensor-parallel group agree: a collective of theirs."""
    mib = config.publish.bucket_mib
    if mib != "auto":
        return int(mib * 2**20)
    own = auto_bucket_bytes(platform.free_memory_bytes(), platform.largest_bucket_bytes)
    size = torch.tensor([own], dtype=torch.int64, device=device)
    if ranks.tensor_size > 1:
        dist.all_reduce(size, op=dist.ReduceOp.MIN, group=tensor_group())
    return int(size.item())


def rollout_source(
    config: Config, channel: StoreChannel, ranks: Ranks, device: torch.device, timeline: Timeline
) -> Callable[[int], MicrobatchIterator]:
    """A function from an iteration to this replica's microbatches of it."""
    buffer = StoreRolloutBuffer(channel, "run", readers=ranks.tensor_size * ranks.pipeline_size)

    def microbatches(iteration: int) -> MicrobatchIterator:
        return MicrobatchIterator(
            buffer,
            replica=ranks.data_rank,
            num_replicas=ranks.data_size,
            iteration=iteration,
            groups=config.groups_per_replica,
            order=config.schedule.order,
            responses_per_microbatch=config.microbatch_responses,
            shared_prompt=config.attention.shared_prompt,
            pad_multiple=config.pad_multiple,
            timeout_s=config.trainer.wait_timeout_s,
            max_tokens=config.microbatch.max_tokens,
            device=device,
            tensor_group=tensor_group() if ranks.tensor_size > 1 else None,
            timeline=timeline,
        )

    return microbatches
