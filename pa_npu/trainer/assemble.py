"""Assembles one trainer rank: its training backend, its publication, its border and its rollouts."""

from __future__ import annotations

import os
import platform as python
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.attention.forms import attention_kernels
from pa_npu.backends.protocol import DTYPES, TrainBackend
from pa_npu.backends.registry import backend_module
from pa_npu.config.schema import Config
from pa_npu.control.channel import ADDRESS_VARIABLE, StoreChannel, attempt_prefix
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import DISPATCHED, TRAINERS_RUN_ON, UPDATE_SIZE, TrainersRunOn
from pa_npu.control.milestones import Milestones
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.publish import publishers_of
from pa_npu.platform.base import Platform
from pa_npu.platform.typical import BYTES_ON_THE_WIRE
from pa_npu.publish.late_engines import LateEngineSender
from pa_npu.publish.messages import LATE_MANIFEST, MANIFEST
from pa_npu.publish.probes import ProbePlan
from pa_npu.publish.publisher import Publisher, WeightSource
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.rollout_buffer import host_shard, open_buffer
from pa_npu.telemetry.sample_store import TrainerLogprobs, kept_groups
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.border import TrainerBorder
from pa_npu.trainer.held_out import HeldOutRows
from pa_npu.trainer.learner import Learner
from pa_npu.trainer.loop import IterationChecks
from pa_npu.trainer.publication import NoTrainerPublication, TrainerPublication, make_publication
from pa_npu.weight_transfer.transport import HOST_BACKEND

# A publish keeps up to four buckets in the leader's memory: two on the wire, two being gathered
# over TP. With this share of the free memory for each they take a 64th. The free memory is asked
# for before the optimizer has made its state.
SHARE_OF_FREE_MEMORY = 1 / 256
SMALLEST_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class RankParts:
    """The parts of one trainer rank. Close them."""

    learner: Learner
    border: TrainerBorder
    rollouts: Callable[[int], MicrobatchIterator]
    checks: IterationChecks
    publisher: Publisher | None
    late_engines: LateEngineSender | None
    kept_logprobs: TrainerLogprobs | None
    held_out: HeldOutRows | None

    def close(self) -> None:
        self.checks.agreement.close()
        if self.kept_logprobs is not None:
            self.kept_logprobs.close()
        if self.publisher is not None:
            self.publisher.close()
        self.learner.backend.close()


def assemble_rank(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    store: dist.TCPStore,
    rank: int,
    local_rank: int,
    timeline: Timeline,
) -> RankParts:
    """Makes and joins all parts of a rank; collective.

    `store` is this process's client of the run's store.
    """
    platform.seed_all(config.run.seed)
    platform.set_deterministic(config.run.deterministic)
    group_store = dist.PrefixStore(f"{attempt_prefix()}trainer", store)
    module = backend_module(config.trainer.backend)
    backend = module.create(config, spec, platform, group_store, rank, local_rank, timeline)
    channel = StoreChannel(store, attempt_prefix())
    if rank == 0:
        TRAINERS_RUN_ON.put(channel, trainers_run_on(config, spec, platform, backend))
    # before the learner makes the optimizer's state: it asks for the free memory
    sender = make_sender(config, platform, store, backend) if config.rollout.has_engines else None
    kept_logprobs = make_kept_logprobs(config, backend, rank)
    learner = Learner(config, backend, platform, timeline, kept_logprobs=kept_logprobs)
    publisher, late_engines = None, None
    if sender is not None:
        publisher = sender.publisher
        late_engines = LateEngineSender(
            sender.late, channel, learner.gate, platform, backend.place, config.publish.timeout_s
        )
        announce(sender, channel, backend)
    probes = ProbePlan.from_sections(
        publish=config.publish,
        rollout=config.rollout,
        schedule=config.schedule,
        algorithm=config.algorithm,
    )
    agreement = Agreement(config, learner, probes)
    has_held_out = bool(config.evaluate.all_sets(config.data.test))
    milestones = Milestones.from_sections(
        schedule=config.schedule, checkpoint=config.checkpoint, has_held_out=has_held_out
    )
    publication = publication_of(
        config,
        learner=learner,
        publisher=publisher,
        channel=channel,
        timeline=timeline,
        milestones=milestones,
    )
    held_out = None
    if has_held_out and not config.rollout.has_engines:  # engines evaluate by writing
        held_out = HeldOutRows(config, learner, channel, timeline, milestones)
    border = TrainerBorder(
        config=config,
        learner=learner,
        publication=publication,
        channel=channel,
        timeline=timeline,
        agreement=agreement,
        probes=probes,
    )
    return RankParts(
        learner=learner,
        border=border,
        rollouts=rollout_source(config, channel, learner, timeline),
        checks=IterationChecks(config, channel, agreement, backend.place.replica),
        publisher=publisher,
        late_engines=late_engines,
        kept_logprobs=kept_logprobs,
        held_out=held_out,
    )


def make_kept_logprobs(config: Config, backend: TrainBackend, rank: int) -> TrainerLogprobs | None:
    """Makes the record of this rank's log-probs of the samples that telemetry.samples keeps; None
    on a rank that computes no log-probs, or has the same ones as another.
    """
    has_them = backend.place.is_last_stage and backend.place.speaks_for_stage
    if not config.telemetry.samples or not has_them:
        return None
    return TrainerLogprobs(
        config.run.dir, rank, kept_groups(config.telemetry.samples) + config.demonstration_groups
    )


def publication_of(
    config: Config,
    *,
    learner: Learner,
    publisher: Publisher | None,
    channel: StoreChannel,
    timeline: Timeline,
    milestones: Milestones,
) -> TrainerPublication:
    """Makes this rank's side of the run's publication; a run without engines sends nothing."""
    if not config.rollout.has_engines:
        return NoTrainerPublication(learner=learner, channel=channel)
    return make_publication(
        config.publish,
        learner=learner,
        publisher=publisher,
        channel=channel,
        timeline=timeline,
        timeout_s=config.deadlines.border_timeout_s,
        freshness=Freshness.from_sections(config.schedule, config.publish),
        milestones=milestones,
    )


@dataclass(frozen=True)
class WeightSender:
    """Sends a rank's weights. publisher: at borders. late: to engines that come late."""

    publisher: Publisher
    late: Publisher


def make_sender(
    config: Config, platform: Platform, store: dist.TCPStore, backend: TrainBackend
) -> WeightSender | None:
    """Makes the sender of this rank's weights; None on a rank that takes no part in a publish.
    Collective: the weights' sources make process groups on all ranks.
    """
    num_bytes = bucket_bytes(platform, backend, len(publishers_of(config)))
    weights = backend.published_weights(num_bytes)
    late_weights = backend.published_weights(num_bytes, trainer_models(config).published_source)
    if weights is None or late_weights is None:
        return None
    return WeightSender(
        publisher=make_publisher(config, platform, store, backend, weights),
        late=make_publisher(config, platform, store, backend, late_weights, late=True),
    )


def announce(sender: WeightSender, channel: StoreChannel, backend: TrainBackend) -> None:
    """Tells the coordinator, from each rank that sends, how engines reach its weights."""
    if not sender.publisher.is_leader:
        return
    rank = backend.place.rank
    LATE_MANIFEST.put(channel, sender.late.manifest(), rank=rank)
    MANIFEST.put(channel, sender.publisher.manifest(), rank=rank)


def make_publisher(
    config: Config,
    platform: Platform,
    store: dist.TCPStore,
    backend: TrainBackend,
    weights: WeightSource,
    late: bool = False,
) -> Publisher:
    """Makes the publisher of `weights`. late: for engines that come late, to which it sends through
    host memory while training runs.
    """
    return Publisher(
        weights,
        store_host=store.host,
        store_port=store.port,
        timeout_s=config.publish.timeout_s,
        backend=HOST_BACKEND if late else platform.comm_backend,
        device=torch.device("cpu") if late else backend.device,
        scope=attempt_prefix(),
    )


def bucket_bytes(platform: Platform, backend: TrainBackend, num_senders: int) -> int:
    """Returns the bytes of a publish's bucket, the same on all ranks of a tensor-parallel group.
    Collective over these.
    """
    largest = auto_bucket_bytes(
        platform.free_memory_bytes(), platform.largest_bucket_bytes, num_senders
    )
    size = torch.tensor([largest], dtype=torch.int64, device=backend.device)
    if backend.tensor_group is not None:
        dist.all_reduce(size, op=dist.ReduceOp.MIN, group=backend.tensor_group)
    return int(size.item())


def auto_bucket_bytes(free_bytes: int, largest_bytes: int, num_senders: int = 1) -> int:
    """Returns the bytes of a publish's bucket on a device with `free_bytes`.

    An engine has a bucket of each sender on the wire at the same time. With many senders buckets
    are smaller, so that these take no more than BYTES_ON_THE_WIRE.

    largest_bytes: the size from which on larger buckets gain nothing.
    """
    largest_bytes = min(largest_bytes, BYTES_ON_THE_WIRE // num_senders)
    wanted = min(largest_bytes, int(free_bytes * SHARE_OF_FREE_MEMORY))
    return max(min(SMALLEST_BUCKET_BYTES, largest_bytes), wanted)


def rollout_source(
    config: Config, channel: StoreChannel, learner: Learner, timeline: Timeline
) -> Callable[[int], MicrobatchIterator]:
    """Returns the function that gives this replica's microbatches of an iteration."""
    backend = learner.backend
    replica = backend.place.replica
    own_shard = None
    reads = backend.replica_links is None or backend.replica_links.reads
    if config.buffer.lies_on_nodes(config.placement.nnodes) and reads:
        address = os.environ.get(ADDRESS_VARIABLE, config.placement.address)
        own_shard = host_shard(channel, replica, address)
    algorithm = build_algorithm(config)
    buffer = open_buffer(
        config, channel, readers=config.mesh.replica_size, trains=True, own_shard=own_shard
    )

    freshness = Freshness.from_sections(config.schedule, config.publish)
    has_announced_size = config.schedule.trained_groups is None
    max_groups = config.groups_per_replica
    if has_announced_size:
        # a group is carried for max_staleness updates at most
        max_groups *= 1 + freshness.max_staleness

    def size(iteration: int) -> int | None:
        if config.devices.unequal_groups:
            dispatched = DISPATCHED.get_if_there(channel, iteration=iteration)
            if dispatched is None:
                return None
            return sum(group.replica == replica for group in dispatched.groups)
        update_size = UPDATE_SIZE.get_if_there(channel, iteration=iteration)
        return None if update_size is None else update_size.groups

    def unequal(iteration: int) -> bool:
        return config.devices.unequal_groups and config.schedule.streams(iteration)

    def microbatches(iteration: int) -> MicrobatchIterator:
        return MicrobatchIterator(
            buffer,
            replica=replica,
            num_replicas=config.mesh.data,
            iteration=iteration,
            groups=config.schedule.prompts_per_iteration if unequal(iteration) else max_groups,
            order=config.schedule.order,
            responses_per_microbatch=config.microbatch_responses,
            shared_prompt=config.attention.shared_prompt,
            pad_multiple=config.trainer.pad_multiple,
            timeout_s=config.deadlines.wait_timeout_s,
            max_tokens=config.microbatch.budget,
            piece_tokens=config.microbatch.tokens,
            depth_first=not config.depth_first_obstacle,
            device=backend.device,
            links=backend.replica_links,
            timeline=timeline,
            freshness=freshness,
            algorithm=algorithm,
            size=partial(size, iteration) if has_announced_size or unequal(iteration) else None,
            fills_places=fills_places(config),
            dispatched=partial(DISPATCHED.get_if_there, channel, iteration=iteration),
        )

    return microbatches


def trainers_run_on(
    config: Config, spec: ModelSpec, platform: Platform, backend: TrainBackend
) -> TrainersRunOn:
    """Describes the trainers' software as it is on this rank; all ranks have the same installation."""
    heads = spec.num_heads // config.trainer.tensor_parallel
    kernels = attention_kernels(
        backend.device,
        DTYPES[config.model.dtype],
        heads,
        spec.head_dim,
        config.attention.implementation,
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
        computation=msgspec.to_builtins(backend.computation(), str_keys=True),
    )


def fills_places(config: Config) -> bool:
    """Returns whether fillers take the places of groups that are trained by rule.

    They do in a pipeline, whose stages agree on the number of microbatches beforehand. They also do
    with order=prompt if ranks compute one microbatch at a time together: these then add up the same
    microbatches as in a run without the rule, and the sum is equal to the bit.
    """
    mesh = config.mesh
    if mesh.pipeline > 1:
        return True
    in_step = config.trainer.backend == "fsdp" or mesh.expert > mesh.tensor
    is_whole = config.microbatch.budget is None
    return config.schedule.order == "prompt" and in_step and is_whole and mesh.size > 1
