"""A configuration's arithmetic as text: what `--dry-run` prints below the resolved tree, and the recipes' comments quote."""

from __future__ import annotations

import math

from pa_npu.config.schema import Config
from pa_npu.config.sections.rollout import EngineSettings
from pa_npu.config.words import counted
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import Work, work
from pa_npu.planning.memory import (
    Memory,
    beside_engine,
    cache_tokens,
    engine_memory,
    format_bytes,
    trainer_memory,
    wanted_sequences,
    wanted_tokens,
)
from pa_npu.planning.prediction.virtual_run import assumed_basis
from pa_npu.platform.typical import typical_speed
from pa_npu.samples.routes import routes_of


def derived_lines(
    config: Config, spec: ModelSpec | None, device_bytes: int | None, own_memory: bool
) -> list[str]:
    """The arithmetic as text. device_bytes: memory of a device, None where unknown.

    own_memory: devices have memory of their own; otherwise (cpu) all share the host's.
    """
    rollout, amount = config.rollout, work(config)
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    mode = "periodic" if config.schedule.stream else "synchronous"
    lines = [
        f"devices               {_devices(config)}{_nodes(config)}",
        f"trainer ranks         {_ranks(config)}",
        f"groups per iteration  {config.schedule.prompts_per_iteration} (x "
        f"{counted(rollout.responses_per_prompt, 'response')} = "
        f"{counted(amount.sequences, 'sequence')}), {config.groups_per_replica} per replica",
        f"microbatches          {_microbatches(config, amount)}",
        f"tokens per iteration  at most {amount.prompt_tokens + amount.response_tokens} = "
        f"{amount.prompt_tokens} prompt + {amount.response_tokens} response; computed at most "
        f"{amount.computed_tokens}",
        f"iterations            {config.schedule.iterations}, {mode}, order "
        f"{config.schedule.order}",
    ]
    lines += [f"engines that differ   {_settings(entry)}" for entry in rollout.engine_settings]
    if spec is None:
        return [*lines, "memory                not known: the model cannot be read here"]
    engine_bytes, colocated = device_bytes if own_memory else None, config.placement.colocate
    trainers = trainer_memory(config, spec)
    active = (
        f", of which a token goes through {spec.num_active_parameters / 1e6:.1f} M"
        if spec.experts
        else ""
    )
    lines.append(
        f"model                 {spec.family}, {spec.num_parameters / 1e6:.1f} M parameters{active}"
    )
    if (routes := routes_of(config, spec)) is not None:
        of_token = routes.column.type.itemsize * math.prod(routes.column.shape)
        tokens = amount.response_tokens + amount.prompt_tokens // rollout.responses_per_prompt
        lines.append(
            f"routes                {of_token} bytes per token, a shared prompt's once: at most "
            f"{format_bytes(of_token * tokens)} per iteration to the trainers"
        )
    lines.append(f"trainer memory        {trainers.line()}")
    if own_memory and device_bytes is None:
        engines = Memory("engine", engine_memory(config, spec, 0).parts[:1])
        lines.append(
            f"engine memory         {engines.line()} + KV cache, up to "
            f"{config.memory_fraction:.0%} of the device"
        )
    else:
        engines = engine_memory(config, spec, engine_bytes, shared=colocated)
        capacity = cache_tokens(config, spec, engine_bytes, shared=colocated)
        lines.append(f"engine memory         {engines.line()}")
        lines.append(
            f"KV cache              {capacity} tokens, "
            f"{counted(capacity // longest, 'longest sequence')}; wanted {wanted_tokens(config)} "
            f"for {wanted_sequences(config)} in flight"
        )
    if colocated and own_memory and device_bytes is not None:
        shared = engine_memory(config, spec, device_bytes, shared=True)
        both = (beside_engine(config, spec) + shared.total) / device_bytes
        how = "both resident"
        if config.engines_sleep:
            kept = f"{format_bytes(trainers.at_rest)} that its trainer keeps as the device decodes"
            how = f"of which {kept}; it sleeps while that trains"
        lines.append(
            f"shared engine memory  {shared.line()}; with its trainer {both:.0%} of the device, "
            f"{how}"
        )
    if trainers.on_host:
        per_node = format_bytes(
            trainers.on_host * min(config.trainer.devices, config.devices_per_node)
        )
        lines.append(
            f"host memory           {format_bytes(trainers.on_host)} of optimizer a rank but for "
            f"the step, {per_node} a node"
        )
    if colocated:
        way = (
            "through host memory, in a gloo group of their own"
            if own_memory
            else "in the group of the other engines"
        )
        lines.append(f"shared weights        {way}")
    lines.append(predicted_line(config, spec))
    if device_bytes is not None:
        lines.append(_device_line(config, trainers, engines, device_bytes, own_memory))
    return lines


def _ranks(config: Config) -> str:
    trainer, mesh = config.trainer, config.mesh
    if trainer.backend == "fsdp":
        copies = f" x {mesh.data // mesh.shards} copies" if mesh.shards < mesh.data else ""
        return f"{mesh.shards} shards of every weight{copies}, each rank a replica"
    after = f", EP {trainer.expert_parallel}" if trainer.expert_parallel > 1 else ""
    after += ", sequence parallel" if trainer.tensor_parallel > 1 else ""
    return (
        f"TP {trainer.tensor_parallel} x PP {trainer.pipeline_parallel} x DP "
        f"{config.mesh.data}{after}"
    )


def _devices(config: Config) -> str:
    engines = f"{counted(config.rollout.engines, 'engine')} x {config.rollout.tensor_parallel}"
    if config.placement.colocate:
        return (
            f"{config.num_devices} = {counted(config.trainer.devices, 'trainer rank')}, with "
            f"{engines} on them"
        )
    return f"{config.num_devices} = {engines} + {counted(config.trainer.devices, 'trainer rank')}"


def _settings(entry: EngineSettings) -> str:
    said = [
        entry.device,
        f"expected speed {entry.speed:g}" if entry.speed != 1.0 else None,
        f"window {entry.window}" if entry.window is not None else None,
    ]
    numbers = f"engine{'s' if len(entry.engines) > 1 else ''} {', '.join(map(str, entry.engines))}"
    return f"{numbers}: {', '.join(filter(None, said)) or 'nothing is said of them'}"


def predicted_line(config: Config, spec: ModelSpec) -> str:
    """How an iteration would overlap on usual devices of this kind.

    Figures are published ones and lengths assumed, so seconds are good to a factor of two, and for
    comparing: which side waits, and whether an iteration has enough groups.
    """
    basis = assumed_basis(config, spec, typical_speed(config.run.device))
    synchronous, found = basis.predicted(config, streams=False), basis.predicted(config)
    iteration_s = found.iteration_s - found.border_s
    sides = (synchronous.generate_s, synchronous.train_s)
    idle = f"engines idle {found.engines_idle:.0%}, trainers {found.trainers_idle:.0%}"
    if config.trainer.devices == config.num_devices:  # each device does both
        idle = f"devices idle {found.engines_idle:.0%}"
    return (
        f"predicted             waves {found.waves:.1f}, Tg {sides[0]:.3g} s, Tt {sides[1]:.3g} s, "
        f"iteration {iteration_s:.3g} s: {max(sides) / iteration_s:.2f} of the bound "
        f"{sum(sides) / max(sides):.2f}x; {idle} ({basis.typical.name}, assumed lengths)"
    )


def _nodes(config: Config) -> str:
    nodes = config.placement.nnodes
    return "" if nodes == 1 else f", on {counted(nodes, 'node')} of {config.devices_per_node}"


def _microbatches(config: Config, amount: Work) -> str:
    number, responses, tokens = (
        amount.microbatches_per_replica,
        config.microbatch_responses,
        amount.microbatch_tokens,
    )
    if config.microbatch.max_tokens is None:
        return (
            f"{number} per replica, {counted(responses, 'response')} and at most {tokens} "
            "tokens each"
        )
    return (
        f"at most {number} per replica, {counted(responses, 'response')} or several times so many "
        f"in at most {tokens} tokens each"
    )


def _device_line(
    config: Config, trainers: Memory, engines: Memory, device_bytes: int, own_memory: bool
) -> str:
    if own_memory:
        share = (
            f"trainers use {trainers.total / device_bytes:.0%}, engines "
            f"{engines.total / device_bytes:.0%} of it"
        )
        return f"device memory         {format_bytes(device_bytes)}; {share}"
    together = trainers.total * config.trainer.devices
    together += engines.total * config.rollout.engines * config.rollout.tensor_parallel
    return (
        f"host memory           {format_bytes(device_bytes)}; all together use "
        f"{together / device_bytes:.0%} of it"
    )
