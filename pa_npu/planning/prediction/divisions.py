"""Divides a number of devices between engines and trainers, and predicts the best divisions.

1. Trainers get one to seven eighths of the devices.
2. For each share, parallel sizes of a replica and of an engine with which both fit into memory.
3. The divisions that look best by throughput alone are predicted in virtual time.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pa_npu.algorithm.rules import broken_rules
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.amounts import work
from pa_npu.planning.engine_memory import engine_memory, kv_bytes_per_token
from pa_npu.planning.memory import GIB, USABLE, trainer_memory
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.prediction.costs import EngineCost, GroupSeconds, computed_prompt_tokens
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import Shape, mean_context
from pa_npu.platform.typical import TypicalSpeed

_SIZES = (1, 2, 4, 8)
_STAGES = (1, 2, 4, 8)
MIN_SEQUENCES = 32
"""An engine with room for fewer sequences of mean length decodes far below the device's speed."""
MAX_SEQUENCES = 1024
"""With more sequences a decode step is arithmetic alone, and decodes them no faster."""
NUM_SHAPES = 48
"""Groups that are drawn from a workload for an estimate."""
# The share of the faster side's seconds that does not overlap with the slower side.
_NOT_OVERLAPPED = 0.2


@dataclass(frozen=True)
class DivisionChoices:
    """Parallel sizes that a division may have; `shards` are an engine's."""

    tensor: Sequence[int] = _SIZES
    stages: Sequence[int] = _STAGES
    shards: Sequence[int] = _SIZES


def best_divisions(
    basis: Basis,
    devices: int,
    choices: DivisionChoices,
    max_predicted: int,
    limited_s: Callable[[Config, Predicted], float] = lambda _, prediction: prediction.iteration_s,
) -> list[tuple[float, Config, Predicted]]:
    """Predicts the `max_predicted` divisions that look best by throughput alone.

    Returns (seconds of an iteration, configuration, prediction) of each, the fastest per prompt
    first. `limited_s` returns the seconds of an iteration with everything else that limits it.

    Raises UserError where the model fits on no division.
    """
    candidates = sorted(_divisions(basis, devices, choices), key=lambda candidate: candidate[0])
    if not candidates:
        raise UserError(
            f"plan: {basis.spec.num_parameters / 1e9:.1f} billion parameters do not fit on "
            f"{devices} x {basis.typical.name}, in no division between engines and trainers that "
            "may be chosen; give more devices"
        )
    tried = []
    for _, config in candidates[:max_predicted]:
        prediction = basis.predict(config)
        tried.append((limited_s(config, prediction), config, prediction))
    return sorted(tried, key=lambda item: item[0] / item[1].schedule.prompts_per_iteration)


def device_bytes(typical: TypicalSpeed) -> int | None:
    """Returns the memory of a device; None where devices share the host's."""
    return None if typical.memory_gib is None else typical.memory_gib * GIB


def eighths(devices: int) -> list[int]:
    """Returns one to seven eighths of `devices`, each at least one and leaving at least one."""
    shares = {max(1, min(devices - 1, round(devices * n / 8))) for n in range(1, 8)}
    return sorted(shares)


def _divisions(
    basis: Basis, devices: int, choices: DivisionChoices
) -> Iterator[tuple[float, Config]]:
    """Yields (seconds per group by throughput alone, configuration) of each division that fits."""
    for trainers, stages, tensor in itertools.product(
        eighths(devices), choices.stages, choices.tensor
    ):
        mesh = Mesh.for_devices(trainers, tensor, stages, context=basis.base.mesh.context)
        if mesh.size != trainers:
            continue
        config = _fitting(basis, devices, trainers, tensor, stages, choices)
        if config is not None:
            yield _throughput_s(basis, config), config


def _fitting(
    basis: Basis, devices: int, trainers: int, tensor: int, stages: int, choices: DivisionChoices
) -> Config | None:
    """Returns the division with the smallest engines that hold enough sequences.

    None where it does not fit, or a rule forbids it.
    """
    memory_bytes = device_bytes(basis.typical)
    decoding = devices - trainers
    for shards in choices.shards:
        if decoding % shards:
            continue
        config = _config(
            basis,
            devices=devices,
            engines=decoding // shards,
            shards=shards,
            trainers=trainers,
            tensor=tensor,
            stages=stages,
        )
        if config is None:
            continue
        if memory_bytes is None:
            return config
        if trainer_memory(config, basis.spec).total > USABLE * memory_bytes:
            return None
        memory = engine_memory(config, basis.spec, memory_bytes)
        tokens = dict(memory.parts)["KV cache"] / kv_bytes_per_token(config, basis.spec)
        sequences = tokens / _mean_held(basis, config)
        if sequences >= MIN_SEQUENCES:
            max_num_seqs = min(MAX_SEQUENCES, 2 ** int(math.log2(sequences)))
            return with_changes(config, {"rollout": {"max_num_seqs": max_num_seqs}})
    return None


def _config(
    basis: Basis,
    *,
    devices: int,
    engines: int,
    shards: int,
    trainers: int,
    tensor: int,
    stages: int,
) -> Config | None:
    """Returns the configuration of a division, with a number of prompts that replicas and updates
    divide; None where a rule forbids it.
    """
    mesh = Mesh.for_devices(trainers, tensor, stages, context=basis.base.mesh.context)
    unit = mesh.data * work(basis.base).updates
    prompts = basis.base.schedule.prompts_per_iteration
    if basis.groups_per_device is not None:
        prompts = max(1, round(basis.groups_per_device * devices))
    changes: dict[str, dict[str, Any]] = {
        "rollout": {"engines": engines, "tensor_parallel": shards},
        "trainer": {
            "devices": trainers,
            "tensor_parallel": tensor,
            "pipeline_parallel": stages,
        },
        "schedule": {"prompts_per_iteration": max(1, round(prompts / unit)) * unit},
    }
    return with_changes(basis.base, changes, basis.spec)


def mean_response(basis: Basis, config: Config) -> float:
    """Returns the mean tokens of a response, over some groups that are drawn."""
    lengths: list[int] = []
    for shape in basis.workload.draw(config, 0, NUM_SHAPES):
        lengths += shape.lengths
    return statistics.mean(lengths)


def _mean_held(basis: Basis, config: Config) -> float:
    """Returns the tokens of cache that a sequence has on average near its end: a response, and its
    part of the prompt.
    """
    prompt = basis.workload.prompt_mean / config.rollout.responses_per_prompt
    return mean_response(basis, config) + prompt


def _throughput_s(basis: Basis, config: Config) -> float:
    """Returns the seconds per group of the slower side, plus the part of the faster side's that
    does not overlap.
    """
    generate_s, train_s = sides_s(basis, config)
    iteration_s = max(generate_s, train_s) + _NOT_OVERLAPPED * min(generate_s, train_s)
    return iteration_s / config.schedule.prompts_per_iteration


def sides_s(basis: Basis, config: Config) -> tuple[float, float]:
    """Returns the seconds that engines and trainers take for an iteration without any waiting:
    engines as full as they can be, replicas equally loaded.
    """
    groups = config.schedule.prompts_per_iteration
    shapes = basis.workload.draw(config, 0, NUM_SHAPES)
    engine = basis.costs.engine_for(config, basis.spec, basis.typical)
    trainer = basis.costs.trainer_for(config, basis.spec, basis.typical)
    group_s = decode_group_s(config, engine, shapes)
    seconds = GroupSeconds(config, basis.spec, trainer, basis.typical)
    train_s = statistics.mean(shape.train_s(seconds) for shape in shapes)
    return groups * group_s / config.rollout.engines, groups * train_s / config.mesh.data


def decode_group_s(config: Config, engine: EngineCost, shapes: Sequence[Shape]) -> float:
    """Returns the mean seconds of an engine for a group, when it is as full as it can be."""
    rollout = config.rollout
    tokens = statistics.mean(sum(shape.lengths) for shape in shapes)
    prompt_tokens = statistics.mean(
        computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block)
        for shape in shapes
    )
    speed = engine.speed(mean_context(shapes))
    sequences = config.schedule.prompts_per_iteration * rollout.responses_per_prompt
    together = max(1.0, min(rollout.max_num_seqs, sequences / rollout.engines))
    token_s = speed.step_s / together + speed.sequence_s
    return tokens * token_s + prompt_tokens * speed.prompt_token_s


def with_changes(
    config: Config, changes: Mapping[str, Mapping[str, Any]], spec: ModelSpec | None = None
) -> Config | None:
    """Returns the configuration with `changes`, by section and key.

    None where the rules between keys forbid it, or those of the model where `spec` is given.
    """
    tree = config.model_dump(exclude_unset=True)
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    try:
        changed = Config.model_validate(tree)
        if any(broken_rules(changed)):
            return None
        if spec is not None:
            check_model(changed, spec)
    except (ValidationError, ConfigError):
        return None
    return changed
