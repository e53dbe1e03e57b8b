"""Checks whether a run fits into its devices' memory, and names the keys that would make it fit.

A tenth of a device is kept free for what the figures of `memory` leave out (allocator, workspaces,
communication buffers, the device's own context).
    refused   what is exact does not fit: a trainer's weights, gradients, optimizer and frozen
              models, or an engine's weights and the KV cache of one sequence at its longest
    warned    the estimate of a trainer, with that of an engine on its device, exceeds nine tenths
              of the device, or the KV cache does not hold the sequences that an engine may have in
              flight, all at their longest (vLLM would then compute some of them twice)
A proposal adds as few devices as possible, then changes as few keys as possible, in the order of
`_trainer_moves`. A proposal has passed the same arithmetic and all rules between keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.engine_memory import (
    cache_tokens,
    engine_memory,
    teacher_memories,
    wanted_sequences,
    wanted_tokens,
)
from pa_npu.planning.memory import GIB, USABLE, beside_engine, format_bytes, trainer_memory
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.teachers import engine_teacher_specs, teacher_engine_config

_MAX_TENSOR_PARALLEL = 8  # devices that one node links directly
_MAX_CHANGES = 4
_MAX_MEMORY_FRACTION = 0.92

Changes = dict[str, Any]  # dotted key -> value
Moves = Sequence[tuple[str, Sequence[Any]]]  # key -> values to try, the least costly first


@dataclass(frozen=True)
class Shortage:
    """Memory that does not suffice, certainly (`fatal`) or probably.

    problem: what does not fit, in words.
    proposal: keys that make it fit; None where none were found.
    result: what the proposal leads to, in words.
    """

    role: str
    problem: str
    fatal: bool
    proposal: Changes | None
    result: str

    def line(self) -> str:
        """Returns the problem and its remedy as one line for the user."""
        remedy = "no setting near this one fits: give the run more devices, or a smaller model"
        if self.proposal is not None:
            keys = " ".join(f"{key}={_in_yaml(value)}" for key, value in self.proposal.items())
            remedy = f"set {keys} ({self.result})"
        return f"{self.role} memory: {self.problem}; {remedy}"


def shortages(
    config: Config, spec: ModelSpec, device_bytes: int, own_memory: bool
) -> list[Shortage]:
    """Returns everything that does not fit.

    own_memory: whether devices have memory of their own; otherwise (cpu) all share `device_bytes`.
    """
    if not own_memory:
        return _host_shortages(config, spec, device_bytes)
    missing = list(_trainer_shortages(config, spec, device_bytes))
    if not config.rollout.has_engines:
        return missing
    if not config.placement.colocate:
        missing += _engine_shortages(config, spec, device_bytes)
    missing += _teacher_shortages(config, device_bytes)
    missing += _buffer_shortages(config, spec, device_bytes)
    if config.placement.colocate:
        missing += _shared_shortages(config, spec, device_bytes)
    return missing


def _trainer_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    memory = trainer_memory(config, spec)
    if memory.total <= USABLE * device_bytes:
        return
    fatal = memory.state > device_bytes
    if fatal:
        problem = (
            "weights, gradients, optimizer and frozen models of a rank take "
            f"{format_bytes(memory.state)} of a device's {format_bytes(device_bytes)}"
        )
    else:
        problem = (
            f"about {format_bytes(memory.total)} per rank are more than nine tenths of a "
            f"device's {format_bytes(device_bytes)}"
        )

    def fits(candidate: Config) -> bool:
        return trainer_memory(candidate, spec).total <= USABLE * device_bytes

    proposal = _search(config, spec, list(_trainer_moves(config)), fits)
    if proposal is None:
        proposal = _with_more_trainers(config, spec, fits)
    result = ""
    if proposal is not None:
        needed = trainer_memory(_with_changes(config, proposal), spec).total
        result = f"needs {needed / GIB:.1f} of {device_bytes / GIB:.1f} GiB"
    yield Shortage("trainer", problem, fatal, proposal, result)


def _with_more_trainers(
    config: Config, spec: ModelSpec, fits: Callable[[Config], bool]
) -> Changes | None:
    """Returns the smallest doubling of the trainers' devices that fits, with the keys that it takes
    besides.
    """
    for devices in _doublings(config.trainer.devices, 64 * config.trainer.devices):
        more: Changes = {"trainer.devices": devices}
        larger = _with_changes(config, more)
        changes: Changes | None = {}
        if not fits(larger):
            changes = _search(larger, spec, list(_trainer_moves(larger)), fits)
        if changes is not None and _is_allowed(_with_changes(larger, changes), spec):
            return more | changes
    return None


def _engine_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    def capacity(candidate: Config) -> int:
        return cache_tokens(candidate, spec, device_bytes)

    def fits(candidate: Config) -> bool:
        return capacity(candidate) >= wanted_tokens(candidate)

    if fits(config):
        return
    tokens = capacity(config)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    fatal = tokens < longest
    share = f"{config.devices.memory_fraction:.0%} of {format_bytes(device_bytes)}"
    if fatal:
        problem = (
            f"{share} hold the weights and a KV cache of {tokens} tokens, less than one "
            f"sequence of {longest}"
        )
    else:
        problem = (
            f"{share} leave a KV cache of {tokens} tokens, but {wanted_sequences(config)} "
            f"sequences at their longest need {wanted_tokens(config)}"
        )
    proposal = _search(config, spec, list(_engine_moves(config)), fits)
    result = ""
    if proposal is not None:
        result = f"a cache of {capacity(_with_changes(config, proposal))} tokens"
    yield Shortage("engine", problem, fatal, proposal, result)


def _teacher_shortages(config: Config, device_bytes: int) -> Iterator[Shortage]:
    """Yields each teacher whose engines cannot hold one sequence."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for name, teacher in engine_teacher_specs(config).items():
        teacher_config = teacher_engine_config(config, name)
        tokens = cache_tokens(teacher_config, teacher, device_bytes)
        if tokens < longest:
            problem = (
                f"{teacher_config.devices.memory_fraction:.0%} of {format_bytes(device_bytes)} hold the "
                f"weights of teacher.{name} on {teacher_config.rollout.tensor_parallel} devices each "
                f"(teacher.{name}.tensor_parallel) and a KV cache of {tokens} tokens, less than "
                f"one sequence of {longest}"
            )
            yield Shortage("teacher", problem, True, None, "")


def _buffer_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    """Yields a shortage where the second buffer of a delayed publish does not fit beside the share
    of a device that the engine takes for itself.
    """
    buffer_bytes = dict(engine_memory(config, spec, device_bytes).parts)["second buffer"]
    fraction = config.devices.memory_fraction
    if buffer_bytes <= (1 - fraction) * device_bytes:
        return
    problem = (
        f"{1 - fraction:.0%} of {format_bytes(device_bytes)} beside rollout.memory_fraction = "
        f"{fraction:g} do not hold the second buffer of publish.mode={config.publish.mode}, "
        f"{format_bytes(buffer_bytes)}"
    )
    max_fraction = math.floor(100 * (1 - buffer_bytes / device_bytes)) / 100
    proposal: Changes = {"publish.mode": "blocking"}
    if max_fraction > 0:
        proposal = {"rollout.memory_fraction": max_fraction}
    yield Shortage("engine", problem, True, proposal, "which leaves room for it")


def _shared_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    """Yields a shortage where an engine and the trainer on its device do not fit together.

    Where engines sleep, a trainer counts with what it keeps while its device decodes.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens

    def capacity(candidate: Config) -> int:
        return cache_tokens(candidate, spec, device_bytes, shared=True)

    def together(candidate: Config) -> float:
        needed = engine_memory(candidate, spec, device_bytes, shared=True).total
        reserved = candidate.devices.memory_fraction * device_bytes
        return beside_engine(candidate, spec) + max(needed, reserved)

    def fits(candidate: Config) -> bool:
        return together(candidate) <= USABLE * device_bytes and capacity(candidate) >= longest

    if fits(config):
        return
    fatal = capacity(config) < longest
    if fatal:
        problem = (
            f"{config.devices.memory_fraction:.0%} of {format_bytes(device_bytes)} "
            "(rollout.memory_fraction) hold the weights and a KV cache of "
            f"{capacity(config)} tokens, less than one sequence of {longest}"
        )
    else:
        trainer_bytes = beside_engine(config, spec)
        problem = (
            f"about {format_bytes(trainer_bytes)} of a rank and "
            f"{format_bytes(together(config) - trainer_bytes)} of the engine beside it are more "
            f"than nine tenths of a device's {format_bytes(device_bytes)}"
        )
    shares = [percent / 100 for percent in range(90, 0, -5)]
    moves = [("rollout.memory_fraction", shares), *_trainer_moves(config)]
    proposal = _search(config, spec, moves, fits)
    if proposal is None:
        proposal = {"placement.colocate": False}
        result = "engines on devices of their own alone"
    else:
        result = f"together {format_bytes(together(_with_changes(config, proposal)))}"
    yield Shortage("shared engine", problem, fatal, proposal, result)


def _host_shortages(config: Config, spec: ModelSpec, host_bytes: int) -> list[Shortage]:
    def needed(candidate: Config, *, exact: bool = False) -> int:
        trainer = trainer_memory(candidate, spec)
        rank_bytes = trainer.state if exact else trainer.total
        engine_bytes = engine_memory(candidate, spec, None).total
        engine_devices = candidate.rollout.engines * candidate.rollout.tensor_parallel
        of_teachers = 0
        for name, memory in teacher_memories(candidate, None).items():
            teacher = candidate.teacher[name]
            of_teachers += memory.total * teacher.engines * teacher.tensor_parallel
        of_engines = engine_bytes * engine_devices + of_teachers
        return rank_bytes * candidate.trainer.devices + of_engines

    def fits(candidate: Config) -> bool:
        return needed(candidate) <= USABLE * host_bytes

    if fits(config):
        return []
    processes = "engines and trainers together" if config.rollout.has_engines else "trainers"
    problem = (
        f"{processes} take about {format_bytes(needed(config))}, more than nine "
        f"tenths of the host's {format_bytes(host_bytes)}"
    )
    cache = config.rollout.kv_cache_gib
    moves: list[tuple[str, Sequence[Any]]] = list(_trainer_moves(config))
    if config.rollout.has_engines:
        moves.insert(0, ("rollout.kv_cache_gib", [cache / 2, cache / 4, cache / 8]))
        moves.append(("rollout.engines", range(config.rollout.engines - 1, 0, -1)))
    proposal = _search(config, spec, moves, fits)
    result = ""
    if proposal is not None:
        result = f"needs {format_bytes(needed(_with_changes(config, proposal)))}"
    fatal = needed(config, exact=True) > host_bytes
    return [Shortage("host", problem, fatal, proposal, result)]


def _trainer_moves(config: Config) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields keys with values to try, the cheapest first: what costs no speed, what costs little,
    then recomputation, then another layout of the same devices.
    """
    trainer = config.trainer
    if not trainer.distributed_optimizer:
        yield "trainer.distributed_optimizer", [True]
    responses = config.microbatch_responses
    yield "microbatch.responses", [n for n in range(responses - 1, 0, -1) if responses % n == 0]
    if config.microbatch.max_tokens is not None:
        yield "microbatch.max_tokens", [config.microbatch.max_tokens // n for n in (2, 4, 8)]
    if config.microbatch.tokens is not None:
        yield "microbatch.tokens", [config.microbatch.tokens // n for n in (2, 4, 8)]
    chunk = config.model.head_chunk_tokens
    yield "model.head_chunk_tokens", [chunk // n for n in (2, 4, 8) if chunk // n >= 64]
    kinds = ("none", "selective", "full")
    yield "trainer.recompute", kinds[kinds.index(trainer.recompute) + 1 :]
    yield "trainer.tensor_parallel", _doublings(trainer.tensor_parallel, _MAX_TENSOR_PARALLEL)
    stages = trainer.pipeline_parallel
    yield "trainer.pipeline_parallel", _doublings(stages, 8 * stages)
    context = trainer.context_parallel
    yield "trainer.context_parallel", _doublings(context, 8 * context)


def _engine_moves(config: Config) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields keys with values to try, the cheapest first: more memory, fewer sequences, smaller
    steps, then wider engines on the same devices.
    """
    rollout = config.rollout
    if config.devices.memory_fraction < _MAX_MEMORY_FRACTION:
        yield "rollout.memory_fraction", [_MAX_MEMORY_FRACTION]
    group_size = rollout.responses_per_prompt
    if rollout.window == "auto":
        fewer = [rollout.max_num_seqs * eighths // 8 for eighths in range(7, 0, -1)]
        fewer.append(rollout.max_num_seqs // 16)
        yield "rollout.max_num_seqs", [number for number in fewer if number >= group_size]
    else:
        yield "rollout.window", list(range(rollout.window - 1, group_size - 1, -1))
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    step_tokens = max(rollout.max_num_seqs, longest)
    if step_tokens < rollout.max_num_batched_tokens:
        yield "rollout.max_num_batched_tokens", [step_tokens]
    yield "rollout.tensor_parallel", _doublings(rollout.tensor_parallel, _MAX_TENSOR_PARALLEL)
    yield "rollout.engines", [rollout.engines // n for n in (2, 4, 8) if rollout.engines % n == 0]


def _doublings(value: int, limit: int) -> list[int]:
    """Returns 2, 4, ..., 128 times `value`, as far as `limit`."""
    return [value << shift for shift in range(1, 8) if value << shift <= limit]


def _search(
    config: Config, spec: ModelSpec, moves: Moves, fits: Callable[[Config], bool]
) -> Changes | None:
    """Returns the first combination that fits and breaks no rule, by number of keys, then by the
    order of keys and values.
    """
    for number in range(1, min(_MAX_CHANGES, len(moves)) + 1):
        for chosen in itertools.combinations(moves, number):
            keys = [key for key, _ in chosen]
            for values in itertools.product(*[values for _, values in chosen]):
                changes = dict(zip(keys, values, strict=True))
                candidate = _with_changes(config, changes)
                if not _is_whole(candidate) or not _keeps_engine_devices(config, changes):
                    continue
                if fits(candidate) and _is_allowed(candidate, spec):
                    return changes
    return None


def _is_whole(config: Config) -> bool:
    """Returns whether there are whole replicas with whole groups, without which the arithmetic
    means nothing.
    """
    mesh = config.mesh
    groups = config.schedule.prompts_per_iteration
    return mesh.size == config.trainer.devices and mesh.shares(groups)


def _keeps_engine_devices(config: Config, changes: Changes) -> bool:
    """Returns whether engines have as many devices as before: wider ones take those of the engines
    that they replace. On a CPU there may be fewer engines.
    """
    if "rollout.tensor_parallel" not in changes:
        return "rollout.engines" not in changes or config.run.device == "cpu"
    rollout = config.rollout
    engines = changes.get("rollout.engines", rollout.engines)
    devices = engines * changes["rollout.tensor_parallel"]
    return bool(devices == rollout.engines * rollout.tensor_parallel)


def _with_changes(config: Config, changes: Changes) -> Config:
    """Returns the configuration with `changes`, without validation, which is a hundred times
    slower.
    """
    updates: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        updates.setdefault(section, {})[name] = value
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in updates.items()
    }
    return config.model_copy(update=sections)


def _is_allowed(config: Config, spec: ModelSpec) -> bool:
    """Returns whether the configuration is valid and breaks no rule."""
    try:
        validated = Config.model_validate(config.model_dump())
        check_model(validated, spec)
    except (ValidationError, ConfigError):
        return False
    return not any(broken_rules(validated))


def _in_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
