"""Rules for learning: algorithm, tokens of older weights, how an iteration is divided among trainers, adapters."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.presets import preset_keys
from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted


def broken_algorithm(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken, whatever the algorithm is; those of its own are
    Algorithm.broken_rules.
    """
    refresh = c.algorithm.reference_refresh_every
    if refresh and not c.algorithm.has_reference:
        yield (
            f"algorithm.reference_refresh_every: {refresh}: there is no reference with "
            "algorithm.kl_coef = 0; set kl_coef, or remove the key"
        )


def of_preset(c: ConfigTree, key: str, section: str = "algorithm") -> str:
    """Says so where a key's value may be a preset's, which the user has not written."""
    known = f"{section}.{key}" in preset_keys(c.algorithm.name)
    return f" (of algorithm.name={c.algorithm.name})" if known else ""


# Engines of a run in which some can swap before the others: two keep the version before.
_LEAST_ROLLING = 3


def broken_staleness(c: ConfigTree) -> Iterator[str]:
    """Yields combinations that cannot be exact, or make no sense, with or without tokens of older
    weights.
    """
    s, a = c.schedule, c.algorithm
    yield from _broken_divergence(c)
    yield from _broken_budget(c)
    yield from _broken_delay(c)
    if not s.max_staleness:
        if a.age_exponent:
            yield (
                f"algorithm.age_exponent: {a.age_exponent}: with schedule.max_staleness = 0 every "
                "token has the age 0; set max_staleness, or remove the key"
            )
        return
    ahead = f"schedule.max_staleness = {s.max_staleness}"
    if s.max_staleness >= s.iterations:
        yield (
            f"schedule.max_staleness: {s.max_staleness} versions ahead in a run of "
            f"schedule.iterations = {s.iterations}: the last iteration would be sampled by the "
            "first model; lower max_staleness"
        )
    if s.compare_iterations:
        yield (
            f"schedule.compare_iterations: {s.compare_iterations} with {ahead}: it measures "
            "streamed against synchronous iterations, and neither is what runs ahead; set it to 0, "
            "or max_staleness to 0"
        )


def _broken_divergence(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement of publish.divergence."""
    p, entry = c.publish, f"publish.divergence: {c.publish.divergence}"
    if p.divergence is None:
        return
    if not c.schedule.max_staleness:
        yield (
            f"{entry} with schedule.max_staleness = 0, where every token is trained by the version "
            "that generated it; set max_staleness to 1 or more, or remove the key"
        )
    if not p.probe_tokens:
        yield f"{entry} is measured on the probe, which publish.probe_tokens = 0 turns off; raise it"


def _broken_budget(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of schedule.tokens_per_update."""
    s, budget = c.schedule, c.schedule.tokens_per_update
    if budget is None:
        return
    entry = f"schedule.tokens_per_update: {budget}"
    if not s.max_staleness:
        yield (
            f"{entry} with schedule.max_staleness = 0: groups that an update leaves over would be "
            "trained by weights that did not generate them; set max_staleness to 1 or more, or "
            "remove the key"
        )
    if s.dynamic_sampling:
        yield (
            f"{entry} with schedule.dynamic_sampling{of_preset(c, 'dynamic_sampling', 'schedule')}, "
            "which trains a fixed number of groups; set dynamic_sampling to false, or remove the "
            "key"
        )
    if c.publish.divergence is not None:
        yield (
            f"{entry} with publish.divergence: one would keep groups and the other weights for the "
            "same versions of max_staleness; remove one"
        )
    if s.updates_per_iteration > 1:
        yield (
            f"{entry} with schedule.updates_per_iteration = {s.updates_per_iteration}, which shares "
            "a fixed number of groups; set it to 1, or remove the key"
        )
    max_tokens = (
        s.prompts_per_iteration * c.rollout.responses_per_prompt * c.rollout.max_response_tokens
    )
    if budget > max_tokens:
        yield (
            f"{entry} is more than the {max_tokens} tokens that schedule.prompts_per_iteration = "
            f"{s.prompts_per_iteration} groups can have; lower it, or raise prompts_per_iteration"
        )


def _broken_delay(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of publish.mode=delayed and rolling."""
    entry = f"publish.mode: {c.publish.mode}"
    if c.publish.mode == "blocking":
        return
    yield from _broken_rolling(c)
    if not c.schedule.max_staleness:
        yield (
            f"{entry} with schedule.max_staleness = 0, where engines have nothing to generate while "
            "newer weights arrive; set max_staleness to 1 or more, or mode to blocking"
        )
    if c.publish.divergence is not None:
        yield (
            f"{entry} with publish.divergence, which is decided when engines are through; remove "
            "it, or set mode to blocking"
        )
    if c.rollout.tensor_parallel > 1:
        yield (
            f"{entry} with rollout.tensor_parallel = {c.rollout.tensor_parallel}: an engine's own "
            "collectives and a publish would run side by side; set tensor_parallel to 1, or mode "
            "to blocking"
        )


def _broken_rolling(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of publish.mode=rolling."""
    s, entry = c.schedule, "publish.mode: rolling"
    if c.publish.mode != "rolling":
        return
    if (engines := c.rollout.engines) < _LEAST_ROLLING:
        yield (
            f"{entry} with rollout.engines = {engines}: two engines keep the version before until all "
            f"its groups are complete, in case one of them dies; set engines to {_LEAST_ROLLING} "
            "or more, or mode to delayed"
        )
    if s.dynamic_sampling:
        yield (
            f"{entry} with schedule.dynamic_sampling{of_preset(c, 'dynamic_sampling', 'schedule')}: "
            "which groups are replaced is known only when all are complete; set mode to delayed, "
            "or dynamic_sampling to false"
        )
    if s.tokens_per_update is not None:
        yield (
            f"{entry} with schedule.tokens_per_update: which groups are carried is known only when "
            "all are complete; set swap to delayed, or remove the budget"
        )
    if c.agent.port is not None:
        yield (
            f"{entry} with agent.port: samples for other programs would be of no version; set mode "
            "to delayed, or remove the port"
        )
    if c.evaluate.overlap:
        yield (
            f"{entry} with evaluate.overlap: engines would go on to the next version while they "
            "are evaluated; remove one"
        )


def broken_shards(c: ConfigTree) -> Iterator[str]:
    """Devices that no number of replicas uses up."""
    t = c.trainer
    replica = c.mesh.replica_size
    if c.mesh.size != t.devices:
        sizes = "tensor_parallel x pipeline_parallel"
        if t.context_parallel > 1:
            sizes += " x context_parallel"
        yield (
            f"trainer.devices: {t.devices} is not a multiple of {sizes} = {replica}; set "
            f"trainer.devices to a multiple of {replica}"
        )


def broken_training(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    if c.trainer.backend == "fsdp":
        yield from _broken_fsdp(c)
    yield from _broken_backend_features(c)
    yield from _broken_division(c)
    t, s = c.trainer, c.schedule
    if c.microbatch.max_tokens is not None and t.pipeline_parallel > 1:
        yield (
            f"microbatch.max_tokens: {c.microbatch.max_tokens}: packing does not know the number "
            f"of microbatches in advance, which trainer.pipeline_parallel = {t.pipeline_parallel} "
            "needs; remove the key or set pipeline_parallel to 1"
        )
    if c.microbatch.tokens is not None and t.pipeline_parallel > 1:
        yield (
            f"microbatch.tokens: {c.microbatch.tokens}: how many microbatches a group has follows "
            f"from its lengths, and trainer.pipeline_parallel = {t.pipeline_parallel} needs to know "
            "it in advance; set microbatch.responses instead, or pipeline_parallel to 1"
        )
    if c.microbatch.tokens is not None and c.microbatch.max_tokens is not None:
        yield (
            f"microbatch.max_tokens: {c.microbatch.max_tokens} beside microbatch.tokens = "
            f"{c.microbatch.tokens}, which packs up to its own bound; remove one"
        )
    profiled = c.telemetry.profile_iterations
    if any(not 0 <= value < s.iterations for value in profiled):
        yield (
            f"telemetry.profile_iterations: {list(profiled)}: the run has 0 to "
            f"{s.iterations - 1}; leave out the others"
        )
    if c.optimizer.min_learning_rate > c.optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate: {c.optimizer.min_learning_rate} exceeds "
            f"optimizer.learning_rate = {c.optimizer.learning_rate}; lower it"
        )
    if c.optimizer.warmup_share and c.optimizer.warmup_iterations:
        yield (
            f"optimizer.warmup_share: {c.optimizer.warmup_share:g} beside "
            f"optimizer.warmup_iterations = {c.optimizer.warmup_iterations}, which says the same; "
            "remove one"
        )
    yield from _broken_adapters(c)


def _broken_fsdp(c: ConfigTree) -> Iterator[str]:
    """Yields what trainer.backend=fsdp does not have, or cannot divide."""
    t = c.trainer
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        if getattr(t, name) > 1:
            yield (
                f"trainer.{name}: {getattr(t, name)} with trainer.backend=fsdp, which shards "
                "every weight over all trainer devices instead; remove the key, or set "
                "trainer.backend=megatron"
            )
    if c.algorithm.router_aux_coef:
        yield (
            f"algorithm.router_aux_coef: {c.algorithm.router_aux_coef} with "
            "trainer.backend=fsdp, whose layers are those of transformers and have no such "
            "loss; set it to 0, or trainer.backend=megatron"
        )
    for name, value, remedy in (
        ("recompute", "selective", "full"),
        ("frozen_pass", "separate", "together"),
    ):
        if getattr(t, name) == value:
            yield (
                f"trainer.{name}: {value} with trainer.backend=fsdp, which has none; set it "
                f"to {remedy}"
            )
    if t.devices % (t.shards or 1):
        yield (
            f"trainer.shards: {t.shards} does not divide trainer.devices = {t.devices}; set "
            "it to a divisor"
        )
    elif t.shards not in (None, c.mesh.weight_shards):
        yield (
            f"trainer.shards: {t.shards} is not a multiple of trainer.context_parallel = "
            f"{t.context_parallel}, whose ranks share a copy of the weights; set it to a multiple"
        )


def _broken_backend_features(c: ConfigTree) -> Iterator[str]:
    """Yields features that only one of the training backends has."""
    t = c.trainer
    if c.algorithm.router_replay != "none" and t.backend != "megatron":
        yield (
            f"algorithm.router_replay: {c.algorithm.router_replay} with "
            f"trainer.backend={t.backend}, whose routers choose by themselves; set it to none, or "
            "trainer.backend=megatron"
        )
    if c.attention.implementation in ("sdpa", "eager"):
        entry = (
            f"attention.implementation: {c.attention.implementation} is transformers' own attention"
        )
        if t.context_parallel > 1:
            yield (
                f"{entry}, which computes whole sequences, with trainer.context_parallel = "
                f"{t.context_parallel}; set the implementation to auto, or context_parallel to 1"
            )
        if t.backend != "fsdp":
            yield f"{entry}, which trainer.backend={t.backend} has not; set it to auto"
        elif c.attention.shared_prompt:
            yield (
                f"{entry}, which shares no prompts; set attention.shared_prompt=false, or the "
                "implementation to auto"
            )


def _broken_division(c: ConfigTree) -> Iterator[str]:
    """Yields numbers of ranks, groups and responses that do not divide each other."""
    t, s = c.trainer, c.schedule
    if c.mesh.expert != t.expert_parallel:
        yield (
            f"trainer.expert_parallel: {t.expert_parallel} does not divide the {c.mesh.stage_size} "
            "ranks of a pipeline stage (trainer.devices / pipeline_parallel); set it to a divisor"
        )
    if not c.mesh.shares(s.prompts_per_iteration):
        yield (
            f"schedule.prompts_per_iteration: {counted(s.prompts_per_iteration, 'group')} cannot "
            f"be divided evenly among {counted(c.mesh.data, 'replica')}; set it to a multiple of "
            f"{c.mesh.data}"
        )
    if c.groups_per_replica % s.updates_per_iteration:
        yield (
            f"schedule.updates_per_iteration: {s.updates_per_iteration} does not divide the "
            f"{counted(c.groups_per_replica, 'group')} per "
            f"replica (schedule.prompts_per_iteration / data parallel size); set it to a divisor"
        )
    if c.rollout.responses_per_prompt % c.microbatch_responses:
        yield (
            f"microbatch.responses: {c.microbatch.responses} does not divide "
            f"rollout.responses_per_prompt = {c.rollout.responses_per_prompt}; set it to a divisor"
        )


def _broken_adapters(c: ConfigTree) -> Iterator[str]:
    if not c.has_adapters:
        if c.checkpoint.export_hf == "merged":
            yield (
                "checkpoint.export_hf: merged, but there are no adapters; set lora.rank or "
                "model.adapter, or export_hf to true"
            )
        return
    key, value = (
        ("model.adapter", c.model.adapter) if c.model.adapter else ("lora.rank", c.lora.rank)
    )
    if c.trainer.backend != "fsdp":
        yield (
            f"{key}: {value} with trainer.backend={c.trainer.backend}, which trains no adapters; "
            "set trainer.backend=fsdp"
        )
    if c.model.adapter and c.lora.rank:
        yield (
            f"lora.rank: {c.lora.rank} beside model.adapter, which has rank, alpha and targets of "
            "its own; remove the keys of lora, or model.adapter to begin anew"
        )
