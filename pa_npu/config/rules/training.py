"""Rules for how an iteration is divided among trainers: replicas, updates, microbatches, adapters, and what of it is profiled."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted


def broken_shards(c: ConfigTree) -> Iterator[str]:
    """Devices that no number of replicas uses up."""
    t = c.trainer
    replica = c.mesh.replica_size
    if c.mesh.size != t.devices:
        yield (
            f"trainer.devices: {t.devices} is not a multiple of tensor_parallel x pipeline_parallel = {replica}; "
            f"set trainer.devices to a multiple of {replica}"
        )


def broken_training(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    t, s = c.trainer, c.schedule
    if t.backend == "fsdp":
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(t, name) > 1:
                yield (
                    f"trainer.{name}: {getattr(t, name)} with trainer.backend=fsdp, which shards every weight over all trainer "
                    f"devices instead; remove the key, or set trainer.backend=megatron"
                )
        if c.algorithm.router_aux_coef:
            yield (
                f"algorithm.router_aux_coef: {c.algorithm.router_aux_coef} with trainer.backend=fsdp, whose layers are those of "
                f"transformers and have no such loss; set it to 0, or trainer.backend=megatron"
            )
        for name, value, other in (("recompute", "selective", "full"), ("frozen_pass", "separate", "together")):
            if getattr(t, name) == value:
                yield f"trainer.{name}: {value} with trainer.backend=fsdp, which has none; set it to {other}"
        if t.devices % (t.shards or 1):
            yield f"trainer.shards: {t.shards} does not divide trainer.devices = {t.devices}; set it to a divisor"
    if c.algorithm.router_replay != "none" and t.backend != "megatron":
        yield (
            f"algorithm.router_replay: {c.algorithm.router_replay} with trainer.backend={t.backend}, whose routers choose by "
            f"themselves; set it to none, or trainer.backend=megatron"
        )
    if c.attention.implementation in ("sdpa", "eager"):
        own = f"attention.implementation: {c.attention.implementation} is transformers' own attention"
        if t.backend != "fsdp":
            yield f"{own}, which trainer.backend={t.backend} has not; set it to auto"
        elif c.attention.shared_prompt:
            yield f"{own}, which shares no prompts; set attention.shared_prompt=false, or the implementation to auto"
    if c.environment.name == "agents" and (needs := c.needs_whole_groups) is not None:
        yield (
            f"environment.name: agents, whose sessions are one sample, several or none, while {needs} needs exactly "
            f"rollout.responses_per_prompt = {c.rollout.responses_per_prompt} samples of every prompt; change that key"
        )
    if c.mesh.expert != t.expert_parallel:
        yield (
            f"trainer.expert_parallel: {t.expert_parallel} does not divide the {c.mesh.stage_size} ranks of a pipeline stage "
            f"(trainer.devices / pipeline_parallel); set it to a divisor"
        )
    if not c.mesh.shares(s.prompts_per_iteration):
        yield (
            f"schedule.prompts_per_iteration: {counted(s.prompts_per_iteration, 'group')} cannot be divided evenly among "
            f"{counted(c.data_parallel, 'replica')}; set it to a multiple of {c.data_parallel}"
        )
    if c.groups_per_replica % s.updates_per_iteration:
        yield (
            f"schedule.updates_per_iteration: {s.updates_per_iteration} does not divide the "
            f"{counted(c.groups_per_replica, 'group')} per "
            f"replica (schedule.prompts_per_iteration / data parallel size); set it to a divisor"
        )
    if c.rollout.responses_per_prompt % c.microbatch_responses:
        yield (
            f"microbatch.responses: {c.microbatch.responses} does not divide rollout.responses_per_prompt = "
            f"{c.rollout.responses_per_prompt}; set it to a divisor"
        )
    if c.microbatch.max_tokens is not None and t.pipeline_parallel > 1:
        yield (
            f"microbatch.max_tokens: {c.microbatch.max_tokens}: packing does not know the number of microbatches in advance, "
            f"which trainer.pipeline_parallel = {t.pipeline_parallel} needs; remove the key or set pipeline_parallel to 1"
        )
    profiled = c.telemetry.profile_iterations
    if any(not 0 <= value < s.iterations for value in profiled):
        yield f"telemetry.profile_iterations: {list(profiled)}: the run has 0 to {s.iterations - 1}; leave out the others"
    if c.optimizer.min_learning_rate > c.optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate: {c.optimizer.min_learning_rate} exceeds optimizer.learning_rate = "
            f"{c.optimizer.learning_rate}; lower it"
        )


def broken_lora(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    if not c.has_adapters:
        if c.checkpoint.export_hf == "merged":
            yield "checkpoint.export_hf: merged, but there are no adapters; set lora.rank or model.adapter, or export_hf to true"
        return
    key, value = ("model.adapter", c.model.adapter) if c.model.adapter else ("lora.rank", c.lora.rank)
    if c.trainer.backend != "fsdp":
        yield f"{key}: {value} with trainer.backend={c.trainer.backend}, which trains no adapters; set trainer.backend=fsdp"
    if c.model.adapter and c.lora.rank:
        yield (
            f"lora.rank: {c.lora.rank} beside model.adapter, which has rank, alpha and targets of its own; remove the keys of "
            f"lora, or model.adapter to begin anew"
        )
