"""Whether a run fits into its devices' memory, and if not, which key to change to what; arithmetic on `memory`.

The rule. A tenth of a device is kept free for what the figures leave out (allocator, workspaces,
communication buffers, the device's own context).
    refused   what is exact does not fit: a trainer's weights, gradients, optimizer and frozen
              models, or an engine's weights and the KV cache of one sequence at its longest
    warned    the estimate of a trainer, with that of an engine on its device, exceeds nine tenths
              of the device, or the KV cache does not hold the sequences that an engine may have in
              flight, all at their longest (vLLM would then compute some of them twice)
A proposal needs as few further devices as possible, then changes as few keys as possible, in the
order of `_trainer_moves`. It passes the same arithmetic, and all rules between keys, itself.
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
from pa_npu.planning.memory import (
    GIB,
    USABLE,
    beside_engine,
    cache_tokens,
    engine_memory,
    format_bytes,
    trainer_memory,
    wanted_sequences,
    wanted_tokens,
)
from pa_npu.planning.model_rules import check_model

_LARGEST_TENSOR_PARALLEL = 8  # devices that one node links directly
_MOST_CHANGES = 4
_LARGEST_MEMORY_FRACTION = 0.92

Changes = dict[str, Any]  # dotted key -> value
Moves = Sequence[tuple[str, Sequence[Any]]]  # key -> values to try, the least costly first


@dataclass(frozen=True)
class Shortage:
    """Memory that does not suffice. fatal: certainly; otherwise probably. proposal: keys that make
    it fit, None where nothing does."""

    role: str
    what: str
    fatal: bool
    proposal: Changes | None
    after: str

    def line(self) -> str:
        if self.proposal is None:
            remedy = "no setting near this one fits: give the run more devices, or a smaller model"
        else:
            keys = " ".join(f"{key}={_shown(value)}" for key, value in self.proposal.items())
            remedy = f"set {keys} ({self.after})"
        return f"{self.role} memory: {self.what}; {remedy}"


def shortages(
    config: Config, spec: ModelSpec, device_bytes: int, own_memory: bool
) -> list[Shortage]:
    """Everything that does not fit. own_memory: devices have memory of their own; else all share
    device_bytes (cpu).
    """
    if not own_memory:
        return _host_shortages(config, spec, device_bytes)
    if not config.has_engines:
        return list(_trainer_shortages(config, spec, device_bytes))
    colocated = config.placement.colocate
    return [
        *_trainer_shortages(config, spec, device_bytes),
        *([] if colocated else _engine_shortages(config, spec, device_bytes)),
        *_buffer_shortages(config, spec, device_bytes),
        *(_shared_shortages(config, spec, device_bytes) if colocated else []),
    ]


def _trainer_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    memory = trainer_memory(config, spec)
    if memory.total <= USABLE * device_bytes:
        return
    fatal = memory.state > device_bytes
    if fatal:
        what = (
            "weights, gradients, optimizer and frozen models of a rank take "
            f"{format_bytes(memory.state)} of a device's {format_bytes(device_bytes)}"
        )
    else:
        what = (
            f"about {format_bytes(memory.total)} per rank are more than nine tenths of a "
            f"device's {format_bytes(device_bytes)}"
        )

    def fits(changed: Config) -> bool:
        return trainer_memory(changed, spec).total <= USABLE * device_bytes

    proposal = _search(config, spec, list(_trainer_moves(config)), fits)
    for devices in (
        _doubled(config.trainer.devices, 64 * config.trainer.devices) if proposal is None else ()
    ):
        further = {"trainer.devices": devices}
        larger = _changed(config, further)
        changes = {} if fits(larger) else _search(larger, spec, list(_trainer_moves(larger)), fits)
        if changes is not None and _allowed(_changed(larger, changes), spec):
            proposal = further | changes
            break
    after = ""
    if proposal is not None:
        needed = trainer_memory(_changed(config, proposal), spec).total
        after = f"needs {needed / GIB:.1f} of {device_bytes / GIB:.1f} GiB"
    yield Shortage("trainer", what, fatal, proposal, after)


def _engine_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    def capacity(changed: Config) -> int:
        return cache_tokens(changed, spec, device_bytes)

    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens, wanted = capacity(config), wanted_tokens(config)
    if tokens >= wanted:
        return
    share = f"{config.memory_fraction:.0%} of {format_bytes(device_bytes)}"
    fatal = tokens < longest
    if fatal:
        what = (
            f"{share} hold the weights and a KV cache of {tokens} tokens, less than one "
            f"sequence of {longest}"
        )
    else:
        what = (
            f"{share} leave a KV cache of {tokens} tokens, but {wanted_sequences(config)} "
            f"sequences at their longest need {wanted}"
        )
    proposal = _search(
        config, spec, list(_engine_moves(config)), lambda c: capacity(c) >= wanted_tokens(c)
    )
    after = "" if proposal is None else f"a cache of {capacity(_changed(config, proposal))} tokens"
    yield Shortage("engine", what, fatal, proposal, after)


def _buffer_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    """The second buffer of a delayed publish lies beside the share that an engine takes for itself."""
    second = dict(engine_memory(config, spec, device_bytes).parts)["second buffer"]
    fraction = config.memory_fraction
    if second <= (1 - fraction) * device_bytes:
        return
    what = (
        f"{1 - fraction:.0%} of {format_bytes(device_bytes)} beside rollout.memory_fraction = "
        f"{fraction:g} do not hold the second buffer of publish.mode={config.publish.mode}, "
        f"{format_bytes(second)}"
    )
    largest = math.floor(100 * (1 - second / device_bytes)) / 100
    proposal: Changes = (
        {"rollout.memory_fraction": largest} if largest > 0 else {"publish.mode": "blocking"}
    )
    yield Shortage("engine", what, True, proposal, "which leaves room for it")


def _shared_shortages(config: Config, spec: ModelSpec, device_bytes: int) -> Iterator[Shortage]:
    """Engines on the trainers' devices: both must fit, or where engines sleep what trainers keep as
    their devices decode.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens

    def capacity(changed: Config) -> int:
        return cache_tokens(changed, spec, device_bytes, shared=True)

    def together(changed: Config) -> float:
        engine = max(
            engine_memory(changed, spec, device_bytes, shared=True).total,
            changed.memory_fraction * device_bytes,
        )
        return beside_engine(changed, spec) + engine

    def fits(changed: Config) -> bool:
        return together(changed) <= USABLE * device_bytes and capacity(changed) >= longest

    if fits(config):
        return
    share, trainer = config.memory_fraction, beside_engine(config, spec)
    if too_small := capacity(config) < longest:
        what = (
            f"{share:.0%} of {format_bytes(device_bytes)} (rollout.memory_fraction) hold the "
            f"weights and a KV cache of {capacity(config)} tokens, less than one sequence of "
            f"{longest}"
        )
    else:
        what = (
            f"about {format_bytes(trainer)} of a rank and "
            f"{format_bytes(together(config) - trainer)} of the engine beside it are more than "
            f"nine tenths of a device's {format_bytes(device_bytes)}"
        )
    shares = [hundredths / 100 for hundredths in range(90, 0, -5)]
    moves = [("rollout.memory_fraction", shares), *_trainer_moves(config)]
    proposal = _search(config, spec, moves, fits)
    after = (
        "" if proposal is None else f"together {format_bytes(together(_changed(config, proposal)))}"
    )
    if proposal is None:
        proposal, after = {"placement.colocate": False}, "engines on devices of their own alone"
    yield Shortage("shared engine", what, too_small, proposal, after)


def _host_shortages(config: Config, spec: ModelSpec, host_bytes: int) -> list[Shortage]:
    def needed(changed: Config, exact: bool = False) -> int:
        trainer, engine = trainer_memory(changed, spec), engine_memory(changed, spec, None)
        trainers = (trainer.state if exact else trainer.total) * changed.trainer.devices
        return trainers + engine.total * changed.rollout.engines * changed.rollout.tensor_parallel

    if needed(config) <= USABLE * host_bytes:
        return []
    named = "engines and trainers together" if config.has_engines else "trainers"
    what = (
        f"{named} take about {format_bytes(needed(config))}, more than nine "
        f"tenths of the host's {format_bytes(host_bytes)}"
    )
    cache = config.rollout.kv_cache_gib
    moves = list(_trainer_moves(config))
    if config.has_engines:
        moves.insert(0, ("rollout.kv_cache_gib", [cache / 2, cache / 4, cache / 8]))
        moves.append(("rollout.engines", range(config.rollout.engines - 1, 0, -1)))
    proposal = _search(config, spec, moves, lambda changed: needed(changed) <= USABLE * host_bytes)
    after = "" if proposal is None else f"needs {format_bytes(needed(_changed(config, proposal)))}"
    return [Shortage("host", what, needed(config, exact=True) > host_bytes, proposal, after)]


def _trainer_moves(config: Config) -> Iterator[tuple[str, Sequence[Any]]]:
    """Cheapest first: what costs no speed, what costs little, then recomputation, then another
    layout of the same devices.
    """
    trainer, responses = config.trainer, config.microbatch_responses
    if not trainer.distributed_optimizer:
        yield "trainer.distributed_optimizer", [True]
    yield "microbatch.responses", [n for n in range(responses - 1, 0, -1) if responses % n == 0]
    if config.microbatch.max_tokens is not None:
        yield "microbatch.max_tokens", [config.microbatch.max_tokens // n for n in (2, 4, 8)]
    chunk = config.model.head_chunk_tokens
    yield "model.head_chunk_tokens", [chunk // n for n in (2, 4, 8) if chunk // n >= 64]
    kinds = ("none", "selective", "full")
    yield "trainer.recompute", kinds[kinds.index(trainer.recompute) + 1 :]
    yield "trainer.tensor_parallel", _doubled(trainer.tensor_parallel, _LARGEST_TENSOR_PARALLEL)
    yield (
        "trainer.pipeline_parallel",
        _doubled(trainer.pipeline_parallel, 8 * trainer.pipeline_parallel),
    )


def _engine_moves(config: Config) -> Iterator[tuple[str, Sequence[Any]]]:
    rollout = config.rollout
    if config.memory_fraction < _LARGEST_MEMORY_FRACTION:
        yield "rollout.memory_fraction", [_LARGEST_MEMORY_FRACTION]
    if rollout.window == "auto":
        fewer = [rollout.max_num_seqs * eighths // 8 for eighths in range(7, 0, -1)]
        yield (
            "rollout.max_num_seqs",
            [n for n in (*fewer, rollout.max_num_seqs // 16) if n >= rollout.responses_per_prompt],
        )
    else:
        yield (
            "rollout.window",
            list(range(rollout.window - 1, rollout.responses_per_prompt - 1, -1)),
        )
    least = max(rollout.max_num_seqs, config.data.max_prompt_tokens + rollout.max_response_tokens)
    if least < rollout.max_num_batched_tokens:
        yield "rollout.max_num_batched_tokens", [least]
    yield "rollout.tensor_parallel", _doubled(rollout.tensor_parallel, _LARGEST_TENSOR_PARALLEL)
    # wider engines on the same devices
    yield "rollout.engines", [rollout.engines // n for n in (2, 4, 8) if rollout.engines % n == 0]


def _doubled(value: int, limit: int) -> list[int]:
    return list(
        itertools.takewhile(lambda n: n <= limit, (value << shift for shift in range(1, 8)))
    )


def _search(
    config: Config, spec: ModelSpec, moves: Moves, fits: Callable[[Config], bool]
) -> Changes | None:
    """The first combination that fits and breaks no rule: by number of keys, then by the order of
    keys and values.
    """
    for number in range(1, min(_MOST_CHANGES, len(moves)) + 1):
        for chosen in itertools.combinations(moves, number):
            for values in itertools.product(*(values for _, values in chosen)):
                changes = {key: value for (key, _), value in zip(chosen, values, strict=True)}
                changed = _changed(config, changes)
                if not _is_whole(changed) or not _same_devices_per_engine(config, changes):
                    continue
                if fits(changed) and _allowed(changed, spec):
                    return changes
    return None


def _is_whole(config: Config) -> bool:
    """Whether there are whole replicas with whole groups, without which the arithmetic means
    nothing.
    """
    mesh, groups = config.mesh, config.schedule.prompts_per_iteration
    return mesh.size == config.trainer.devices and mesh.shares(groups)


def _same_devices_per_engine(config: Config, changes: Changes) -> bool:
    """Wider engines take the devices of those that they replace."""
    if "rollout.tensor_parallel" not in changes:
        return "rollout.engines" not in changes or config.run.device == "cpu"
    rollout = config.rollout
    engines = changes.get("rollout.engines", rollout.engines)
    return bool(
        engines * changes["rollout.tensor_parallel"] == rollout.engines * rollout.tensor_parallel
    )


def _changed(config: Config, changes: Changes) -> Config:
    """Without validation, which is a hundred times slower."""
    updates: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        updates.setdefault(section, {})[name] = value
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in updates.items()
    }
    return config.model_copy(update=sections)


def _allowed(config: Config, spec: ModelSpec) -> bool:
    try:
        allowed = Config.model_validate(config.model_dump())
        check_model(allowed, spec)
    except (ValidationError, ConfigError):
        return False
    return not any(broken_rules(allowed))


def _shown(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
