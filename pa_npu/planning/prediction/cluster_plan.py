"""For a number of devices: how to divide them between engines and trainers, and what iterations then take.

layouts     parallel sizes of a replica and of an engine with which both fit into a device's memory
divisions   shares of the devices for trainers, by eighths, each with the layouts that look best by throughput alone
predict     iterations of the best few in virtual time; the fastest is the plan
bounds      the same devices without overlap in time (colocated), with perfect overlap, and shared perfectly
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning import amounts
from pa_npu.planning.memory import GIB, USABLE, Memory, engine_memory, kv_bytes_per_token, left_share, trainer_memory
from pa_npu.planning.prediction.calibration import TRANSFER_ERROR, Calibration
from pa_npu.planning.prediction.changed import changed
from pa_npu.planning.prediction.costs import GroupSeconds, computed_prompt_tokens
from pa_npu.planning.prediction.figures import Figure, Origin, figure, weakest
from pa_npu.planning.prediction.limits import Limit, first_to_break, limited_s, limits
from pa_npu.planning.prediction.virtual_run import Predicted, predict
from pa_npu.planning.prediction.workload import Workload
from pa_npu.platform.typical import TypicalSpeed

_SIZES = (1, 2, 4, 8)
_STAGES = (1, 2, 4, 8)
# An engine that holds fewer sequences of mean length than this decodes far below what the device can.
_LEAST_SEQUENCES = 32
_SIMULATED = 3
# Of predict: many divisions are simulated.
_ITERATIONS, _MOST_GROUPS = 4, 64
_SAMPLE = 48
_MOST_SEQS = 1024


@dataclass(frozen=True)
class Basis:
    """The basis of a plan. base: the configuration whose keys are kept. error: of what is predicted, relative.

    groups_per_device: prompts of an iteration, which grow with the devices; None: as many as base has.
    """

    base: Config
    spec: ModelSpec
    calibration: Calibration
    workload: Workload
    typical: TypicalSpeed
    error: float
    groups_per_device: float | None

    @property
    def origin(self) -> Origin:
        return weakest(self.calibration.origin, "calibrated", "calibrated" if self._same_device else "estimated")

    @property
    def _same_device(self) -> bool:
        return self.calibration.typical.name == self.typical.name

    @property
    def relative_error(self) -> float:
        """Relative error of predicted times: of the costs, of carrying them over, and of the model of an iteration."""
        known = max(self.calibration.engine_error, self.calibration.trainer_error)
        same = self._same_device and self.calibration.spec.num_parameters == self.spec.num_parameters
        carried = 0.0 if same or self.calibration.origin == "estimated" else TRANSFER_ERROR
        return math.sqrt(known**2 + carried**2 + self.error**2)


@dataclass(frozen=True)
class ClusterPlan:
    """The best division of some devices that was found. Seconds per iteration, with intervals.

    colocated_s: engines and trainers on all devices in turn. separate_bound_s: the longer side alone and the border, no schedule on
    separate devices ends before. perfect_s: all work at its least cost, spread evenly over all devices. alternatives: of
    other divisions, (engines, trainer devices, seconds), the best first.
    """

    config: Config
    devices: int
    predicted: Predicted
    iteration_s: Figure
    colocated_s: Figure
    separate_bound_s: Figure
    perfect_s: Figure
    trainer: Memory
    engine: Memory
    device_bytes: int | None
    limits: Sequence[Limit]
    alternatives: Sequence[tuple[int, int, float]]

    @property
    def tpspd(self) -> Figure:
        """Tokens per second and device."""
        return self.iteration_s.map(lambda seconds: self.predicted.tokens / seconds / self.devices)

    @property
    def device_hours(self) -> Figure:
        """Per thousand optimizer steps."""
        updates = amounts.work(self.config).updates
        return self.iteration_s.map(lambda seconds: 1000.0 / updates * seconds * self.devices / 3600.0)

    @property
    def first_limit(self) -> Limit:
        return first_to_break(list(self.limits), self.iteration_s.value)


@dataclass(frozen=True)
class Choices:
    """Sizes that a division may have. engines, trainers: None for any. same_prompts: of an iteration, as the configuration has."""

    tensor: Sequence[int] = _SIZES
    stages: Sequence[int] = _STAGES
    shards: Sequence[int] = _SIZES
    engines: int | None = None
    trainers: int | None = None
    colocate: Sequence[bool] = (False,)
    same_prompts: bool = False


def plan_cluster(basis: Basis, devices: int) -> ClusterPlan:
    """Raises UserError where the model fits on no division of them."""
    tried = best_divisions(basis, devices, Choices(), _SIMULATED)
    seconds, config, best, around = tried[0]
    error, origin = basis.relative_error, basis.origin
    others = [(c.rollout.engines, c.trainer.devices, s) for s, c, _, _ in tried[1:]]
    return ClusterPlan(
        config,
        devices,
        best,
        figure(seconds, error, origin),
        figure(_colocated_s(basis, config, devices), error, origin),
        figure(_separate_bound_s(basis, config, best), error, origin),
        figure(_perfect_s(basis, config, devices), error, origin),
        trainer_memory(config, basis.spec),
        engine_memory(config, basis.spec, _device_bytes(basis.typical)),
        _device_bytes(basis.typical),
        around,
        others,
    )


def best_divisions(
    basis: Basis, devices: int, choices: Choices, simulated: int
) -> list[tuple[float, Config, Predicted, Sequence[Limit]]]:
    """Simulate those that look best by throughput alone; returns (seconds of an iteration, ...), the fastest per prompt first.

    Raises UserError where the model fits on no division.
    """
    candidates = sorted(_divisions(basis, devices, choices), key=lambda found: found[0])
    if not candidates:
        raise UserError(
            f"plan: {basis.spec.num_parameters / 1e9:.1f} billion parameters do not fit on {devices} x {basis.typical.name}, in no "
            f"division between engines and trainers that may be chosen; give more devices"
        )
    tried = []
    for _, config in candidates[:simulated]:
        found = _simulated(basis, config)
        around = limits(config, found, _mean_response(basis, config), basis.typical)
        tried.append((limited_s(found.iteration_s, around), config, found, around))
    return sorted(tried, key=lambda item: item[0] / item[1].schedule.prompts_per_iteration)


def _simulated(basis: Basis, config: Config, *, streams: bool = True) -> Predicted:
    known = (config, basis.spec, basis.calibration, basis.workload, basis.typical)
    return predict(*known, streams=streams, iterations=_ITERATIONS, most_groups=_MOST_GROUPS)


def _device_bytes(typical: TypicalSpeed) -> int | None:
    return None if typical.memory_gib is None else typical.memory_gib * GIB


def _divisions(basis: Basis, devices: int, choices: Choices) -> Iterator[tuple[float, Config]]:
    """(seconds per group by throughput alone, configuration) of what fits."""
    eighths = {max(1, min(devices - 1, round(devices * eighth / 8))) for eighth in range(1, 8)}
    separate = sorted(eighths) if choices.trainers is None else [choices.trainers]
    shares = [each for colocated in choices.colocate for each in ([devices] if colocated else separate)]
    for for_trainers, stages, tensor in itertools.product(shares, choices.stages, choices.tensor):
        if Mesh.of(for_trainers, tensor, stages).size != for_trainers:
            continue
        config = _fitting(basis, devices, for_trainers, tensor, stages, choices)
        if config is not None:
            yield _throughput_s(basis, config, together=for_trainers == devices), config


def _fitting(
    basis: Basis, devices: int, for_trainers: int, tensor: int, stages: int, choices: Choices
) -> Config | None:
    """With the smallest engines that hold enough; None where it does not fit, or a rule forbids it.

    Trainers that take all devices share them with engines, which get what trainers leave.
    """
    bytes_of_device, colocated = _device_bytes(basis.typical), for_trainers == devices
    for_engines = devices if colocated else devices - for_trainers
    for shards in choices.shards:
        if for_engines % shards or choices.engines not in (None, for_engines // shards):
            continue
        config = _config(basis, for_engines // shards, shards, for_trainers, tensor, stages, devices, choices)
        if config is None:
            continue
        if bytes_of_device is None:
            return config
        if trainer_memory(config, basis.spec).total > USABLE * bytes_of_device:
            return None
        if colocated:
            share = left_share(config, basis.spec, bytes_of_device)
            config = changed(config, {"rollout": {"shared_memory_fraction": share}}) if share > 0 else None
            if config is None:
                return None
        memory = engine_memory(config, basis.spec, bytes_of_device, shared=colocated)
        held = dict(memory.parts)["KV cache"] / kv_bytes_per_token(config, basis.spec) / _mean_held(basis, config)
        if held >= _LEAST_SEQUENCES:
            most = min(_MOST_SEQS, 2 ** int(math.log2(held)))
            if "max_num_seqs" in basis.base.rollout.model_fields_set and choices.same_prompts:
                most = min(most, basis.base.rollout.max_num_seqs)
            return changed(config, {"rollout": {"max_num_seqs": most}})
    return None


def _config(
    basis: Basis, engines: int, shards: int, for_trainers: int, tensor: int, stages: int, devices: int, choices: Choices
) -> Config | None:
    unit = Mesh.of(for_trainers, tensor, stages).data * amounts.work(basis.base).updates
    wanted = basis.base.schedule.prompts_per_iteration
    if basis.groups_per_device is not None:
        wanted = max(1, round(basis.groups_per_device * devices))
    whole = max(1, round(wanted / unit)) * unit
    if choices.same_prompts and whole != wanted:
        return None
    changes: dict[str, dict[str, Any]] = {
        "rollout": {"engines": engines, "tensor_parallel": shards},
        "trainer": {
            "devices": for_trainers,
            "tensor_parallel": tensor,
            "pipeline_parallel": stages,
            "sequence_parallel": tensor > 1,
        },
        "schedule": {"prompts_per_iteration": whole},
    }
    if for_trainers == devices:
        changes["placement"] = {"colocate": True}
    return changed(basis.base, changes, basis.spec)


def planning_base(config: Config, kind: str) -> Config:
    """A configuration without what ties it to the devices it was made for. kind: of the devices that are planned with."""
    tree = config.model_dump(exclude_unset=True)
    tree.pop("placement", None)
    tree["run"] = {**tree.get("run", {}), "device": kind}
    rollout = tree.get("rollout", {})
    tree["rollout"] = {
        key: value
        for key, value in rollout.items()
        if key not in ("attach", "key_file", "max_engines", "engine_settings")
    }
    if "telemetry" in tree:
        telemetry = tree["telemetry"]
        tree["telemetry"] = {key: value for key, value in telemetry.items() if not key.startswith("profile")}
    return Config.model_validate(tree)


def _mean_response(basis: Basis, config: Config) -> float:
    shapes = basis.workload.draw(config, 0, _SAMPLE)
    return statistics.mean(length for shape in shapes for length in shape.lengths)


def _mean_held(basis: Basis, config: Config) -> float:
    """Tokens of cache that a sequence has on average near its end: a response, and its part of the prompt."""
    return _mean_response(basis, config) + basis.workload.prompt_mean / config.rollout.responses_per_prompt


def _throughput_s(basis: Basis, config: Config, *, together: bool) -> float:
    """Seconds per group of the slower side, and a part of the faster one's, for what does not overlap; on the same devices both."""
    generate_s, train_s = _sides_s(basis, config)
    if together:
        return (generate_s + train_s) / config.schedule.prompts_per_iteration
    return (max(generate_s, train_s) + 0.2 * min(generate_s, train_s)) / config.schedule.prompts_per_iteration


def _sides_s(basis: Basis, config: Config) -> tuple[float, float]:
    """Seconds that engines and trainers take for an iteration, without any waiting: engines as full as they can be, replicas
    equally loaded."""
    rollout, groups = config.rollout, config.schedule.prompts_per_iteration
    shapes = basis.workload.draw(config, 0, _SAMPLE)
    engine = basis.calibration.engine_for(config, basis.spec, basis.typical)
    seconds = GroupSeconds(
        config, basis.spec, basis.calibration.trainer_for(config, basis.spec, basis.typical), basis.typical
    )
    tokens = statistics.mean(sum(shape.lengths) for shape in shapes)
    context = sum(n * (shape.prompt + 0.5 * n) for shape in shapes for n in shape.lengths) / (tokens * len(shapes))
    computed = statistics.mean(
        computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block) for shape in shapes
    )
    speed = engine.speed(context)
    together = max(1.0, min(rollout.max_num_seqs, groups * rollout.responses_per_prompt / rollout.engines))
    group_s = tokens * (speed.step_s / together + speed.sequence_s) + computed * speed.prompt_token_s
    train_s = statistics.mean(seconds(shape.prompt, shape.lengths) for shape in shapes)
    return groups * group_s / rollout.engines, groups * train_s / config.data_parallel


def _colocated_s(basis: Basis, config: Config, devices: int) -> float:
    """All devices generate, then all train: the sum, the step and the border; moving weights in and out of memory is left out."""
    mesh = Mesh.of(devices, config.mesh.tensor, config.mesh.pipeline)
    changes = {
        "rollout": {"engines": max(1, devices // config.rollout.tensor_parallel)},
        "trainer": {"devices": mesh.size},
    }
    unit = mesh.data * amounts.work(config).updates
    groups = config.schedule.prompts_per_iteration
    whole = max(1, round(groups / unit)) * unit
    together = changed(config, {**changes, "schedule": {"prompts_per_iteration": whole}})
    if together is None:
        return math.inf
    found = _simulated(basis, together, streams=False)
    return found.iteration_s * groups / whole


def _separate_bound_s(basis: Basis, config: Config, best: Predicted) -> float:
    generate_s, _ = _sides_s(basis, config)
    return max(min(generate_s, best.generate_s), best.train_s) + best.border_s


def _perfect_s(basis: Basis, config: Config, devices: int) -> float:
    """Device-seconds of both sides with engines full, over the devices."""
    generate_s, train_s = _sides_s(basis, config)
    of_engines = generate_s * config.rollout.engines * config.rollout.tensor_parallel
    return (of_engines + train_s * config.trainer.devices) / devices
