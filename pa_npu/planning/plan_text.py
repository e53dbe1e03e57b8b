"""A configuration's arithmetic as the lines that `--dry-run` prints and the recipes quote."""

from __future__ import annotations

import math

from pa_npu.config.pieces import MIN_SAVED_ROWS, saved_rows
from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import EngineSettings
from pa_npu.config.words import counted, three_digits
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import Work, work
from pa_npu.planning.engine_memory import (
    cache_tokens,
    engine_memory,
    teacher_memories,
    wanted_sequences,
    wanted_tokens,
)
from pa_npu.planning.memory import Memory, beside_engine, format_bytes, trainer_memory
from pa_npu.planning.prediction.teachers import teacher_seconds
from pa_npu.planning.prediction.virtual_run import planned_basis
from pa_npu.planning.publish import published_bytes
from pa_npu.platform.typical import typical_speed
from pa_npu.samples.expert_choices import ExpertChoices


def derived_lines(
    config: Config, spec: ModelSpec | None, device_bytes: int | None, own_memory: bool
) -> list[str]:
    """Returns the lines.

    Args:
        spec: the model's shape; None where the model cannot be read.
        device_bytes: memory of a device; None where it is not known.
        own_memory: whether devices have memory of their own; otherwise (cpu) all share the host's.
    """
    lines = _work_lines(config)
    if spec is None:
        return [*lines, "memory                not known: the model cannot be read here"]
    lines += _model_lines(config, spec)
    trainers = trainer_memory(config, spec)
    lines.append(f"trainer memory        {trainers.line()}")
    engines = None
    if config.rollout.has_engines:
        engines, engine_lines = _engine_lines(config, spec, device_bytes, own_memory)
        lines += engine_lines
    lines += _teacher_lines(config, device_bytes if own_memory else None)
    if config.placement.colocate and own_memory and device_bytes is not None:
        lines.append(_shared_memory_line(config, spec, device_bytes, trainers))
    if trainers.on_host:
        per_node = trainers.on_host * min(config.trainer.devices, config.devices.devices_per_node)
        lines.append(
            f"host memory           {format_bytes(trainers.on_host)} of optimizer a rank but for "
            f"the step, {format_bytes(per_node)} a node"
        )
    if config.placement.colocate:
        transport = "in the group of the other engines"
        if own_memory:
            transport = "through host memory, in a gloo group of their own"
        lines.append(f"shared weights        {transport}")
    if config.rollout.has_engines:
        lines.append(published_bytes(config, spec).line())
        lines.append(predicted_line(config, spec))
    if device_bytes is not None:
        lines.append(_device_line(config, trainers, engines, device_bytes, own_memory))
    return lines


def _work_lines(config: Config) -> list[str]:
    """Returns the lines about the devices and the work that an iteration has for them."""
    amount = work(config)
    mode, sample = "periodic" if config.schedule.stream else "synchronous", "response"
    if not config.rollout.has_engines:
        mode, sample = "of rows of data", "row"
    demonstrations = ""
    if config.demonstration_groups:
        demonstrations = f", and {config.demonstration_groups} of data.demonstrations"
    lines = [
        f"devices               {_devices(config)}{_nodes(config)}",
        f"trainer ranks         {_ranks(config)}",
        f"groups per iteration  {config.schedule.prompts_per_iteration} (x "
        f"{counted(config.rollout.responses_per_prompt, sample)} = "
        f"{counted(amount.sequences, 'sequence')}){demonstrations}, {config.groups_per_replica} "
        "per replica",
        f"microbatches          {_microbatches(config, amount)}",
        f"tokens per iteration  at most {amount.prompt_tokens + amount.response_tokens} = "
        f"{amount.prompt_tokens} prompt + {amount.response_tokens} response; computed at most "
        f"{amount.computed_tokens}",
        f"iterations            {config.schedule.iterations}, {mode}, order "
        f"{config.schedule.order}",
    ]
    for entry in config.rollout.engine_settings:
        lines.append(f"engines that differ   {_settings(entry)}")
    return lines


def _model_lines(config: Config, spec: ModelSpec) -> list[str]:
    """Returns the lines about the model, and about a mixture's expert choices that travel with its
    tokens.
    """
    active = ""
    if spec.experts:
        active = f", of which a token goes through {spec.num_active_parameters / 1e6:.1f} M"
    lines = [
        f"model                 {spec.family}, {spec.num_parameters / 1e6:.1f} M parameters{active}"
    ]
    expert_choices = ExpertChoices.from_config(config, spec)
    if expert_choices is not None:
        amount = work(config)
        token_bytes = expert_choices.column.type.itemsize * math.prod(expert_choices.column.shape)
        prompt_tokens = amount.prompt_tokens // config.rollout.responses_per_prompt
        total_bytes = token_bytes * (amount.response_tokens + prompt_tokens)
        lines.append(
            f"expert choices        {token_bytes} bytes per token, a shared prompt's once: at most "
            f"{format_bytes(total_bytes)} per iteration to the trainers"
        )
    return lines


def _engine_lines(
    config: Config, spec: ModelSpec, device_bytes: int | None, own_memory: bool
) -> tuple[Memory, list[str]]:
    """Returns an engine's memory, and the lines about it and its KV cache."""
    if own_memory and device_bytes is None:
        engines = Memory("engine", engine_memory(config, spec, 0).parts[:1])
        return engines, [
            f"engine memory         {engines.line()} + KV cache, up to "
            f"{config.devices.memory_fraction:.0%} of the device"
        ]
    engine_bytes = device_bytes if own_memory else None
    colocated = config.placement.colocate
    engines = engine_memory(config, spec, engine_bytes, shared=colocated)
    capacity = cache_tokens(config, spec, engine_bytes, shared=colocated)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return engines, [
        f"engine memory         {engines.line()}",
        f"KV cache              {capacity} tokens, "
        f"{counted(capacity // longest, 'longest sequence')}; wanted {wanted_tokens(config)} "
        f"for {wanted_sequences(config)} in flight",
    ]


def _shared_memory_line(
    config: Config, spec: ModelSpec, device_bytes: int, trainers: Memory
) -> str:
    """Returns the line about an engine on a device that it shares with a trainer."""
    shared = engine_memory(config, spec, device_bytes, shared=True)
    both = (beside_engine(config, spec) + shared.total) / device_bytes
    sharing = "both resident"
    if config.devices.engines_sleep:
        kept = f"{format_bytes(trainers.at_rest)} that its trainer keeps as the device decodes"
        sharing = f"of which {kept}; it sleeps while that trains"
    return (
        f"shared engine memory  {shared.line()}; with its trainer {both:.0%} of the device, "
        f"{sharing}"
    )


def _ranks(config: Config) -> str:
    trainer = config.trainer
    mesh = config.mesh
    if trainer.backend == "fsdp":
        copies = f" x {mesh.data // mesh.shards} copies" if mesh.shards < mesh.data else ""
        replica = "each rank a replica"
        if mesh.context > 1:
            replica = f"{mesh.context} ranks share the sequences of a replica"
        return f"{counted(mesh.weight_shards, 'shard')} of every weight{copies}, {replica}"
    text = f"TP {trainer.tensor_parallel} x PP {trainer.pipeline_parallel} x DP {mesh.data}"
    if trainer.expert_parallel > 1:
        text += f", EP {trainer.expert_parallel}"
    if trainer.tensor_parallel > 1:
        text += ", sequence parallel"
    if trainer.context_parallel > 1:
        text += f", context parallel {trainer.context_parallel}"
    return text


def _devices(config: Config) -> str:
    devices = config.devices
    ranks = counted(config.trainer.devices, "trainer rank")
    parts = []
    if config.rollout.has_engines and not config.placement.colocate:
        engines = counted(config.rollout.engines, "engine")
        parts.append(f"{engines} x {config.rollout.tensor_parallel}")
    for name, teacher in config.teacher.items():
        if teacher.place == "engines":
            engines = counted(teacher.engines, "engine")
            parts.append(f"{engines} x {teacher.tensor_parallel} of teacher.{name}")
    text = f"{devices.num_devices} = {' + '.join([*parts, ranks])}"
    if config.placement.colocate:
        engines = f"{counted(config.rollout.engines, 'engine')} x {config.rollout.tensor_parallel}"
        text += f", with {engines} on them"
    return text


def _teacher_lines(config: Config, device_bytes: int | None) -> list[str]:
    """Returns the lines about teachers that engines compute."""
    lines = []
    memories = teacher_memories(config, device_bytes)
    for name, teacher in config.scored_teachers.items():
        who = {
            "engines": "engines of its own",
            "server": f"the server {teacher.url}",
            "policy": "the run's engines, behind a prompt with its hint",
        }[teacher.place]
        memory = f"; {memories[name].line()}" if name in memories else ""
        if teacher.place == "engines":
            seconds = three_digits(teacher_seconds(config, name))
            time = f"an iteration's scores take {seconds} s, beside what is predicted"
        else:
            time = "its time is not in the prediction"
        lines.append(f"teacher {name:<13} scored by {who}, beside the rewards{memory}; {time}")
    return lines


def _settings(entry: EngineSettings) -> str:
    settings = []
    if entry.device:
        settings.append(entry.device)
    if entry.speed != 1.0:
        settings.append(f"expected speed {entry.speed:g}")
    if entry.window is not None:
        settings.append(f"window {entry.window}")
    plural = "s" if len(entry.engines) > 1 else ""
    numbers = ", ".join(str(number) for number in entry.engines)
    return f"engine{plural} {numbers}: {', '.join(settings) or 'no setting differs'}"


def predicted_line(config: Config, spec: ModelSpec) -> str:
    """Returns the line that says how an iteration would overlap on usual devices of this kind.

    Figures are published ones and lengths assumed, so seconds are good to a factor of two. The line
    serves to compare: it shows which side waits, and whether an iteration has enough groups.
    """
    basis = planned_basis(config, spec, typical_speed(config.run.device))
    synchronous = basis.predict(config, streams=False)
    generate_s = synchronous.generate_s
    train_s = synchronous.train_s
    longer_s = max(generate_s, train_s)

    periodic = basis.predict(config)
    iteration_s = periodic.iteration_s - periodic.border_s
    idle = f"engines idle {periodic.engines_idle:.0%}, trainers {periodic.trainers_idle:.0%}"
    if config.trainer.devices == config.devices.num_policy_devices:  # each device does both
        idle = f"devices idle {periodic.engines_idle:.0%}"
    return (
        f"predicted             waves {periodic.waves:.1f}, "
        f"Tg {three_digits(generate_s)} s, Tt {three_digits(train_s)} s, "
        f"iteration {three_digits(iteration_s)} s: {longer_s / iteration_s:.2f} of the "
        f"bound {(generate_s + train_s) / longer_s:.2f}x; {idle} ({basis.typical.name}, "
        "assumed lengths)"
    )


def _nodes(config: Config) -> str:
    nodes = config.placement.nnodes
    return (
        "" if nodes == 1 else f", on {counted(nodes, 'node')} of {config.devices.devices_per_node}"
    )


def _microbatches(config: Config, amount: Work) -> str:
    number = amount.microbatches_per_replica
    responses = counted(config.microbatch_responses, "response")
    tokens = amount.microbatch_tokens
    shared = _shared_prompts(config, amount)
    if config.microbatch.tokens is not None:
        return (
            f"at most {number} per replica, as many responses as fit into {tokens} tokens "
            f"each{shared}"
        )
    if config.microbatch.max_tokens is None:
        return f"{number} per replica, {responses} and at most {tokens} tokens each{shared}"
    return (
        f"at most {number} per replica, {responses} or several times so many in at most {tokens} "
        f"tokens each{shared}"
    )


def _shared_prompts(config: Config, amount: Work) -> str:
    """Returns how the microbatches of a group come by the prompt that they share, in words."""
    pieces = amount.microbatches_per_replica // config.groups_per_replica
    prompt = config.data.max_prompt_tokens
    if not config.attention.shared_prompt or saved_rows(pieces, prompt) < MIN_SAVED_ROWS:
        return ""
    if amount.stem_tokens:
        return f"; a prompt is computed once for its {pieces}, depth first"
    why = f" ({config.depth_first_obstacle})" if config.depth_first_obstacle else ""
    return f"; a prompt is computed {pieces} times{why}"


def _device_line(
    config: Config, trainers: Memory, engines: Memory | None, device_bytes: int, own_memory: bool
) -> str:
    if own_memory:
        share = f"trainers use {trainers.total / device_bytes:.0%}"
        if engines is not None:
            share += f", engines {engines.total / device_bytes:.0%}"
        return f"device memory         {format_bytes(device_bytes)}; {share} of it"
    together = trainers.total * config.trainer.devices
    if engines is not None:
        together += engines.total * config.rollout.engines * config.rollout.tensor_parallel
    for name, memory in teacher_memories(config, None).items():
        teacher = config.teacher[name]
        together += memory.total * teacher.engines * teacher.tensor_parallel
    return (
        f"host memory           {format_bytes(device_bytes)}; all together use "
        f"{together / device_bytes:.0%} of it"
    )
