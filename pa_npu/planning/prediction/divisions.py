"""For a number of devices: how to divide them between engines and trainers, and what iterations then take.

layouts     parallel sizes of a replica and of an engine with which both fit into a device's memory
divisions   shares of the devices for trainers, by eighths, each with the layouts that look best by
            throughput alone
predict     iterations of the best few in virtual time
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
from pa_npu.planning.memory import GIB, USABLE, engine_memory, kv_bytes_per_token, trainer_memory
from pa_npu.planning.model_rules import check_model
from pa_npu.planning.prediction.costs import GroupSeconds, computed_prompt_tokens
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import mean_context
from pa_npu.platform.typical import TypicalSpeed

_SIZES = (1, 2, 4, 8)
_STAGES = (1, 2, 4, 8)
# An engine that holds fewer sequences of mean length than this decodes far below what the device
# can.
LEAST_SEQUENCES = 32
SAMPLE = 48
# Beyond it a decode step is arithmetic alone, and more sequences in it decode no faster.
MOST_SEQS = 1024


@dataclass(frozen=True)
class Choices:
    """Sizes that a division may have."""

    tensor: Sequence[int] = _SIZES
    stages: Sequence[int] = _STAGES
    shards: Sequence[int] = _SIZES


def best_divisions(
    basis: Basis,
    devices: int,
    choices: Choices,
    most: int,
    limited_s: Callable[[Config, Predicted], float] = lambda _, found: found.iteration_s,
) -> list[tuple[float, Config, Predicted]]:
    """Predict the `most` that look best by throughput alone; returns (seconds of an iteration,
    ...), the fastest per prompt first.

    limited_s: seconds of a predicted iteration with what else limits it. Raises UserError where the
    model fits on no division.
    """
    candidates = sorted(_divisions(basis, devices, choices), key=lambda found: found[0])
    if not candidates:
        raise UserError(
            f"plan: {basis.spec.num_parameters / 1e9:.1f} billion parameters do not fit on "
            f"{devices} x {basis.typical.name}, in no division between engines and trainers that "
            "may be chosen; give more devices"
        )
    tried = []
    for _, config in candidates[:most]:
        found = basis.predicted(config)
        tried.append((limited_s(config, found), config, found))
    return sorted(tried, key=lambda item: item[0] / item[1].schedule.prompts_per_iteration)


def device_bytes(typical: TypicalSpeed) -> int | None:
    """Memory of a device; None where it is not a device's own."""
    return None if typical.memory_gib is None else typical.memory_gib * GIB


def _divisions(basis: Basis, devices: int, choices: Choices) -> Iterator[tuple[float, Config]]:
    """(seconds per group by throughput alone, configuration) of what fits."""
    eighths = {max(1, min(devices - 1, round(devices * eighth / 8))) for eighth in range(1, 8)}
    for for_trainers, stages, tensor in itertools.product(
        sorted(eighths), choices.stages, choices.tensor
    ):
        if Mesh.of(for_trainers, tensor, stages).size != for_trainers:
            continue
        config = _fitting(basis, devices, for_trainers, tensor, stages, choices)
        if config is not None:
            yield _throughput_s(basis, config), config


def _fitting(
    basis: Basis, devices: int, for_trainers: int, tensor: int, stages: int, choices: Choices
) -> Config | None:
    """With the smallest engines that hold enough; None where it does not fit, or a rule forbids it."""
    bytes_of_device, for_engines = device_bytes(basis.typical), devices - for_trainers
    for shards in choices.shards:
        if for_engines % shards:
            continue
        config = _config(
            basis, for_engines // shards, shards, for_trainers, tensor, stages, devices
        )
        if config is None:
            continue
        if bytes_of_device is None:
            return config
        if trainer_memory(config, basis.spec).total > USABLE * bytes_of_device:
            return None
        memory = engine_memory(config, basis.spec, bytes_of_device)
        held = (
            dict(memory.parts)["KV cache"]
            / kv_bytes_per_token(config, basis.spec)
            / _mean_held(basis, config)
        )
        if held >= LEAST_SEQUENCES:
            return changed(
                config, {"rollout": {"max_num_seqs": min(MOST_SEQS, 2 ** int(math.log2(held)))}}
            )
    return None


def _config(
    basis: Basis,
    engines: int,
    shards: int,
    for_trainers: int,
    tensor: int,
    stages: int,
    devices: int,
) -> Config | None:
    unit = Mesh.of(for_trainers, tensor, stages).data * work(basis.base).updates
    wanted = basis.base.schedule.prompts_per_iteration
    if basis.groups_per_device is not None:
        wanted = max(1, round(basis.groups_per_device * devices))
    changes: dict[str, dict[str, Any]] = {
        "rollout": {"engines": engines, "tensor_parallel": shards},
        "trainer": {
            "devices": for_trainers,
            "tensor_parallel": tensor,
            "pipeline_parallel": stages,
        },
        "schedule": {"prompts_per_iteration": max(1, round(wanted / unit)) * unit},
    }
    return changed(basis.base, changes, basis.spec)


def mean_response(basis: Basis, config: Config) -> float:
    """Mean tokens of a response, of some that are drawn."""
    shapes = basis.workload.draw(config, 0, SAMPLE)
    return statistics.mean(length for shape in shapes for length in shape.lengths)


def _mean_held(basis: Basis, config: Config) -> float:
    """Tokens of cache that a sequence has on average near its end: a response, and its part of the
    prompt.
    """
    return (
        mean_response(basis, config)
        + basis.workload.prompt_mean / config.rollout.responses_per_prompt
    )


def _throughput_s(basis: Basis, config: Config) -> float:
    """Seconds per group of the slower side, and a part of the faster one's, for what does not
    overlap.
    """
    generate_s, train_s = sides_s(basis, config)
    return (
        max(generate_s, train_s) + 0.2 * min(generate_s, train_s)
    ) / config.schedule.prompts_per_iteration


def sides_s(basis: Basis, config: Config) -> tuple[float, float]:
    """Seconds that engines and trainers take for an iteration, without any waiting: engines as full
    as they can be, replicas equally loaded."""
    rollout, groups = config.rollout, config.schedule.prompts_per_iteration
    shapes = basis.workload.draw(config, 0, SAMPLE)
    engine = basis.costs.engine_for(config, basis.spec, basis.typical)
    seconds = GroupSeconds(
        config,
        basis.spec,
        basis.costs.trainer_for(config, basis.spec, basis.typical),
        basis.typical,
    )
    tokens = statistics.mean(sum(shape.lengths) for shape in shapes)
    computed = statistics.mean(
        computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block)
        for shape in shapes
    )
    speed = engine.speed(mean_context(shapes))
    together = max(
        1.0, min(rollout.max_num_seqs, groups * rollout.responses_per_prompt / rollout.engines)
    )
    group_s = (
        tokens * (speed.step_s / together + speed.sequence_s) + computed * speed.prompt_token_s
    )
    train_s = statistics.mean(seconds(*shape.trained) for shape in shapes)
    return groups * group_s / rollout.engines, groups * train_s / config.mesh.data


def changed(
    config: Config, changes: Mapping[str, Mapping[str, Any]], spec: ModelSpec | None = None
) -> Config | None:
    """The configuration with `changes`, by section and key; None where the rules between keys, or
    those of the model, forbid it.
    """
    tree = config.model_dump(exclude_unset=True)
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    try:
        found = Config.model_validate(tree)
        if any(broken_rules(found)):
            return None
        if spec is not None:
            check_model(found, spec)
    except (ValidationError, ConfigError):
        return None
    return found
