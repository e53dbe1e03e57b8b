"""A configuration's arithmetic as text: what `--dry-run` prints below the resolved tree, and the recipes' comments quote."""

from __future__ import annotations

import math

from pa_npu.config.schema import Config
from pa_npu.config.sections import EngineSettings
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
from pa_npu.planning.prediction.rehearsal import advice, can_rehearse, rehearse
from pa_npu.planning.shared_way import WAY_IN_WORDS, way_to_shared
from pa_npu.platform.typical import typical_speed
from pa_npu.samples.routes import routes_of


def derived_lines(config: Config, spec: ModelSpec | None, device_bytes: int | None, own_memory: bool) -> list[str]:
    """The arithmetic as text. device_bytes: memory of a device, None where unknown.

    own_memory: devices have memory of their own; otherwise (cpu) all share the host's.
    """
    rollout, amount = config.rollout, work(config)
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    mode = "periodic" if config.schedule.stream else "synchronous"
    lines = [
        f"devices               {_devices(config)}{_nodes(config)}",
        f"trainer ranks         {_ranks(config)}",
        f"groups per iteration  {config.schedule.prompts_per_iteration} (x {counted(rollout.responses_per_prompt, 'response')} = "
        f"{counted(amount.sequences, 'sequence')}), {config.groups_per_replica} per replica",
        f"microbatches          {_microbatches(config, amount)}",
        f"tokens per iteration  at most {amount.prompt_tokens + amount.response_tokens} = {amount.prompt_tokens} prompt + "
        f"{amount.response_tokens} response; computed at most {amount.computed_tokens}",
        f"iterations            {config.schedule.iterations}, {mode}, order {config.schedule.order}",
    ]
    lines += [f"engines that differ   {_settings(entry)}" for entry in rollout.engine_settings]
    if spec is None:
        return [*lines, "memory                not known: the model cannot be read here"]
    engine_bytes, colocated = device_bytes if own_memory else None, config.placement.colocate
    trainers = trainer_memory(config, spec)
    active = f", of which a token goes through {spec.num_active_parameters / 1e6:.1f} M" if spec.experts else ""
    lines.append(f"model                 {spec.family}, {spec.num_parameters / 1e6:.1f} M parameters{active}")
    if (routes := routes_of(config, spec)) is not None:
        of_token = routes.column.type.itemsize * math.prod(routes.column.shape)
        tokens = amount.response_tokens + amount.prompt_tokens // rollout.responses_per_prompt
        lines.append(
            f"routes                {of_token} bytes per token, a shared prompt's once: at most {format_bytes(of_token * tokens)} "
            f"per iteration to the trainers"
        )
    lines.append(f"trainer memory        {trainers.line()}")
    if own_memory and device_bytes is None:
        engines = Memory("engine", engine_memory(config, spec, 0).parts[:1])
        lines.append(
            f"engine memory         {engines.line()} + KV cache, up to {config.memory_fraction:.0%} of the device"
        )
    else:
        engines = engine_memory(config, spec, engine_bytes, shared=colocated)
        capacity = cache_tokens(config, spec, engine_bytes, shared=colocated)
        lines.append(f"engine memory         {engines.line()}")
        lines.append(
            f"KV cache              {capacity} tokens, {counted(capacity // longest, 'longest sequence')}; wanted "
            f"{wanted_tokens(config)} "
            f"for {wanted_sequences(config)} in flight"
        )
    if colocated and own_memory and device_bytes is not None:
        shared = engine_memory(config, spec, device_bytes, shared=True)
        both = (beside_engine(config, spec) + shared.total) / device_bytes
        how = "both resident"
        if config.engines_sleep:
            kept = f"{format_bytes(trainers.at_rest)} that its trainer keeps as the device decodes"
            how = f"of which {kept}; it sleeps while that trains"
        lines.append(f"shared engine memory  {shared.line()}; with its trainer {both:.0%} of the device, {how}")
    if trainers.on_host:
        per_node = format_bytes(trainers.on_host * min(config.trainer.devices, config.devices_per_node))
        lines.append(
            f"host memory           {format_bytes(trainers.on_host)} of optimizer a rank but for the step, {per_node} a node"
        )
    if colocated:
        lines.append(_shared_weights(config, trainers, one_group=not own_memory))
    lines += predicted_lines(config, spec)
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
    return f"TP {trainer.tensor_parallel} x PP {trainer.pipeline_parallel} x DP {config.data_parallel}{after}"


def _devices(config: Config) -> str:
    engines = f"{counted(config.rollout.engines, 'engine')} x {config.rollout.tensor_parallel}"
    if config.placement.colocate:
        return f"{config.num_devices} = {counted(config.trainer.devices, 'trainer rank')}, with {engines} on them"
    return f"{config.num_devices} = {engines} + {counted(config.trainer.devices, 'trainer rank')}"


def _settings(entry: EngineSettings) -> str:
    said = [
        entry.device,
        f"expected speed {entry.speed:g}" if entry.speed != 1.0 else None,
        f"window {entry.window}" if entry.window is not None else None,
    ]
    numbers = f"engine{'s' if len(entry.engines) > 1 else ''} {', '.join(map(str, entry.engines))}"
    return f"{numbers}: {', '.join(filter(None, said)) or 'nothing is said of them'}"


def _shared_weights(config: Config, trainers: Memory, one_group: bool) -> str:
    """Which way weights go to shared engines, and what its buffers cost the trainer that sends."""
    way = way_to_shared(config, one_group)
    kept = dict(trainers.parts)["handed buckets"]
    cost = f"; buffers of {format_bytes(kept)} on a leader's device" if kept and way == "handles" else ""
    return f"shared weights        {WAY_IN_WORDS[way]} (publish.shared_through={config.publish.shared_through}){cost}"


def predicted_lines(config: Config, spec: ModelSpec) -> list[str]:
    """How an iteration would overlap on usual devices of this kind, and what would make it shorter."""
    if not can_rehearse(config):
        return ["predicted             nothing: an iteration has too many sequences to simulate here"]
    typical = typical_speed(config.run.device)
    found = rehearse(config, spec, typical)
    # colocated, each side has all devices already, and neither waits for the other's groups
    changes = [] if config.placement.colocate else advice(config, spec, typical, found)
    lines = [
        f"predicted             waves {found.waves:.1f}, Tg {found.generate_s:.3g} s, Tt {found.train_s:.3g} s, iteration "
        f"{found.iteration_s:.3g} s: {found.of_bound:.2f} of the bound {found.bound:.2f}x; {found.idle} "
        f"({typical.name}, assumed lengths)"
    ]
    for change, after in changes[:2]:
        per_group = after.iteration_s / found.iteration_s
        lines.append(
            f"to change             {change}: iteration {after.iteration_s:.3g} s ({per_group:.2f} of it), {after.of_bound:.2f} of "
            f"the bound; {after.idle}"
        )
    return lines


def _nodes(config: Config) -> str:
    nodes = config.placement.nnodes
    return "" if nodes == 1 else f", on {counted(nodes, 'node')} of {config.devices_per_node}"


def _microbatches(config: Config, amount: Work) -> str:
    number, responses, tokens = amount.microbatches_per_replica, config.microbatch_responses, amount.microbatch_tokens
    if config.microbatch.max_tokens is None:
        return f"{number} per replica, {counted(responses, 'response')} and at most {tokens} tokens each"
    return (
        f"at most {number} per replica, {counted(responses, 'response')} or several times so many in at most {tokens} "
        f"tokens each"
    )


def _device_line(config: Config, trainers: Memory, engines: Memory, device_bytes: int, own_memory: bool) -> str:
    if own_memory:
        share = f"trainers use {trainers.total / device_bytes:.0%}, engines {engines.total / device_bytes:.0%} of it"
        return f"device memory         {format_bytes(device_bytes)}; {share}"
    together = trainers.total * config.trainer.devices
    together += engines.total * config.num_engines * config.rollout.tensor_parallel
    return f"host memory           {format_bytes(device_bytes)}; all together use {together / device_bytes:.0%} of it"
