"""Some iterations of a configuration in virtual time, as its coordinator would run them.

    workload ──prompts──> ResponseLengths ──outlook──> ScheduleController ──schedule──> simulate ──timings, times──> both learn

Lengths are learned, schedules chosen, groups dispatched and assigned by the code of a run; only engines, trainers and the clock are
virtual. A large cluster is represented by a part of it, with as many groups and as much training per engine.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.lengths import ResponseLengths
from pa_npu.dispatch.schedule import Schedule
from pa_npu.dispatch.work import GroupWork
from pa_npu.families.spec import ModelSpec
from pa_npu.planning import amounts
from pa_npu.planning.iteration_model.changes import gain_s
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.messages import GroupOutlook, IterationOutlook, IterationTimes, Rules
from pa_npu.planning.iteration_model.simulate import Outcome, simulate
from pa_npu.planning.prediction.calibration import Calibration
from pa_npu.planning.prediction.costs import EngineCost, GroupSeconds, TrainerCost, computed_prompt_tokens
from pa_npu.planning.prediction.workload import Shape, Workload
from pa_npu.platform.typical import TypicalSpeed

# The first iterations are those in which a controller learns.
_ITERATIONS, _LEARNING = 6, 3
# Of a cluster, the largest part that is simulated: all of it takes within some 5% of what its parts take.
_MOST_ENGINES, _MOST_GROUPS, _MOST_DRAWN = 16, 128, 2048
# What engines on one device cost each other beyond taking turns. Measured with two on a core: 1.16 to 1.9, the median 1.3, in the
# first two judgements of docs/results/plan.md.
_SHARING = 1.3


@dataclass(frozen=True)
class Predicted:
    """Medians over a configuration's predicted iterations, in seconds. iteration_s: from publish to publish, border_s included.

    generate_s, train_s: of an iteration's production, and of its training without waiting for groups. *_idle: shares of the
    iteration, of devices that do neither where they do both. tokens: prompt and response of an iteration, as TPSPD counts them.
    window: the most sequences in flight on an engine; waves: an engine's share of an iteration over that. schedule: the
    controller's name for the last one.
    """

    iteration_s: float
    generate_s: float
    train_s: float
    border_s: float
    engines_idle: float
    trainers_idle: float
    tokens: float
    devices: int
    window: int
    waves: float
    schedule: str

    @property
    def tpspd(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.iteration_s / self.devices


def predict(
    config: Config,
    spec: ModelSpec,
    calibration: Calibration,
    workload: Workload,
    typical: TypicalSpeed,
    *,
    streams: bool = True,
    iterations: int = _ITERATIONS,
    most_groups: int | None = None,
) -> Predicted:
    """Predict iterations of config on such devices.

    streams: periodic, not synchronous; colocated engines and trainers have roles that follow the work, or take turns. most_groups:
    of an iteration that are simulated.
    """
    engine_cost = calibration.engine_for(config, spec, typical)
    trainer_cost = calibration.trainer_for(config, spec, typical)
    part = _part(config, most_groups or _MOST_GROUPS)
    engine_cost, trainer_cost = _shared_devices(config, engine_cost, trainer_cost)
    seconds = GroupSeconds(config, spec, trainer_cost, typical)
    work = GroupWork(spec, config)
    rules = Rules.of(config)
    units = rules.units if streams else 0
    rules = replace(rules, replicas=part.replicas, units=round(units * part.replicas / config.data_parallel))
    streams = streams and not config.placement.colocate
    controller, lengths = ScheduleController(rules, work), ResponseLengths(config.rollout.max_response_tokens)
    fill_s = 0.0  # of a pipeline, before its last stage has work
    ran: list[tuple[Outcome, Schedule, float, int]] = []
    names = tuple(f"engine-{number}" for number in range(part.engines))
    expected = {name: config.rollout.settings_of(number).speed for number, name in enumerate(names)}
    speeds = {name: speed for name, speed in expected.items() if speed != 1.0}
    for number in range(iterations):
        shapes = _drawn(workload, config, number, part.groups)
        # all different, as in a first epoch
        prompts = [
            Prompt(number * part.groups + index, np.zeros(shape.prompt, np.int32), "", "", {})
            for index, shape in enumerate(shapes)
        ]
        outlooks = [GroupOutlook(len(p.tokens), lengths.longest(p), lengths.mean(p)) for p in prompts]
        groups = _virtual_groups(shapes, outlooks, engine_cost, seconds, part.train_scale)
        stages = config.trainer.pipeline_parallel
        fill_s = (stages - 1) * statistics.mean(group.train_s for group in groups) if stages > 1 else 0.0
        step_s = trainer_cost.step_s + fill_s
        speed = engine_cost.speed(_context(shapes)).scaled(part.engine_scale)
        cluster = Cluster(
            {name: speed.scaled(1.0 / expected[name]) for name in names},
            config.rollout.max_num_seqs,
            part.replicas,
            config.schedule.order,
            amounts.work(config).updates,
            step_s,
            calibration.delivery_s,
        )
        schedule = controller.begin_iteration(IterationOutlook(outlooks, names, streams, speeds=speeds))
        outcome = simulate(cluster, groups, schedule, streams=streams)
        gained_s = gain_s(cluster, groups, outcome, units if number else 0, config.data_parallel)
        outcome = replace(outcome, end_s=outcome.end_s - gained_s)
        # as a coordinator sees them: prompts whole, whatever an engine has cached of them
        for timing in outcome.timings:
            controller.observe(replace(timing, prompt_tokens=shapes[timing.index].prompt))
        times = IterationTimes(
            outcome.end_s + trainer_cost.border_s,
            trainer_cost.border_s,
            outcome.train_s,
            step_s * amounts.work(config).updates,
        )
        controller.end_iteration(times)
        lengths.observe([(prompt, shape.lengths) for prompt, shape in zip(prompts, shapes, strict=True)])
        ran.append((outcome, schedule, _busy_s(outcome, names), sum(_tokens(shape) for shape in shapes)))
    return _predicted(config, ran[min(_LEARNING, iterations - 1) :], trainer_cost.border_s, part)


@dataclass(frozen=True)
class _Part:
    """The part of a cluster that is simulated. train_scale, engine_scale: factors of costs, where numbers do not divide evenly."""

    engines: int
    replicas: int
    groups: int
    train_scale: float = 1.0
    engine_scale: float = 1.0


def _part(config: Config, most_groups: int) -> _Part:
    engines, replicas = config.rollout.engines, config.data_parallel
    groups, updates = config.schedule.prompts_per_iteration, amounts.work(config).updates
    parts = max(math.ceil(engines / _MOST_ENGINES), groups / most_groups)
    if parts <= 1:
        return _Part(engines, replicas, groups)
    some_engines, some_replicas = max(1, round(engines / parts)), max(1, round(replicas / parts))
    unit = some_replicas * updates
    some_groups = max(1, round(groups * some_engines / engines / unit)) * unit
    return _Part(
        some_engines,
        some_replicas,
        some_groups,
        (groups / replicas) / (some_groups / some_replicas),
        (groups / engines) / (some_groups / some_engines),
    )


def _drawn(workload: Workload, config: Config, seed: int, groups: int) -> list[Shape]:
    """As many groups as are simulated: of every length as large a share as in the whole iteration, and its longest group."""
    total = min(config.schedule.prompts_per_iteration, _MOST_DRAWN)
    shapes = workload.draw(config, seed, max(total, groups))
    if len(shapes) == groups:
        return shapes
    ranked = sorted(range(len(shapes)), key=lambda index: max(shapes[index].lengths))
    picked = [ranked[int((number + 0.5) * len(ranked) / groups)] for number in range(groups - 1)] + [ranked[-1]]
    return [shapes[index] for index in sorted(picked)]


def _shared_devices(config: Config, engine: EngineCost, trainer: TrainerCost) -> tuple[EngineCost, TrainerCost]:
    """Processes that were placed on one device (a core, say) have a part of it each."""
    of_engines = Counter(config.engine_devices or ())
    of_trainers = Counter(config.trainer_devices or ())
    together = max(of_engines.values(), default=1)
    on_engine = together * (_SHARING if together > 1 else 1.0)
    on_trainer = max(of_trainers.values(), default=1)
    seconds = ("step_s", "sequence_s", "context_s", "prompt_token_s")
    slower = replace(engine, **{name: on_engine * getattr(engine, name) for name in seconds})
    return slower, replace(
        trainer, microbatch_s=trainer.microbatch_s * on_trainer, operation_s=trainer.operation_s * on_trainer
    )


def _virtual_groups(
    shapes: Sequence[Shape],
    outlooks: Sequence[GroupOutlook],
    engine: EngineCost,
    seconds: GroupSeconds,
    train_scale: float,
) -> list[VirtualGroup]:
    groups = []
    for index, (shape, outlook) in enumerate(zip(shapes, outlooks, strict=True)):
        computed = computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block)
        train_s = train_scale * seconds(*shape.trained)
        expected = len(shape.lengths) * (shape.prompt + outlook.mean)
        groups.append(VirtualGroup(index, computed, tuple(map(float, shape.lengths)), train_s, expected))
    return groups


def _context(shapes: Sequence[Shape]) -> float:
    """Tokens before the one that a sequence decodes, a mean over all that are decoded."""
    tokens = sum(sum(shape.lengths) for shape in shapes)
    return sum(length * (shape.prompt + 0.5 * length) for shape in shapes for length in shape.lengths) / tokens


def _tokens(shape: Shape) -> int:
    return len(shape.lengths) * shape.prompt + sum(shape.lengths)


def _busy_s(outcome: Outcome, names: Sequence[str]) -> float:
    """Mean over engines of the time in which they have something in flight."""
    total_s = 0.0
    for name in names:
        until_s = 0.0
        for timing in sorted(outcome.timings, key=lambda timing: timing.start_s):
            if timing.engine == name:
                total_s += max(0.0, timing.end_s - max(timing.start_s, until_s))
                until_s = max(until_s, timing.end_s)
    return total_s / len(names)


def _predicted(
    config: Config, ran: Sequence[tuple[Outcome, Schedule, float, int]], border_s: float, part: _Part
) -> Predicted:
    median = statistics.median
    iteration_s = border_s + median(outcome.end_s for outcome, _, _, _ in ran)
    train_s = median(outcome.train_s for outcome, _, _, _ in ran)
    busy_s = median(busy_s for _, _, busy_s, _ in ran)
    # a device that has both waits for nothing while it does either
    decodes_s, trains_s = (busy_s, train_s) if config.placement.colocate else (0.0, 0.0)
    window = min(ran[-1][1].largest_window, config.rollout.max_num_seqs)
    sequences = part.groups * config.rollout.responses_per_prompt / part.engines
    return Predicted(
        iteration_s,
        median(outcome.generated_s for outcome, _, _, _ in ran),
        train_s,
        border_s,
        max(0.0, 1.0 - (busy_s + trains_s) / iteration_s),
        max(0.0, 1.0 - (train_s + decodes_s) / iteration_s),
        median(tokens for _, _, _, tokens in ran) * config.schedule.prompts_per_iteration / part.groups,
        config.num_devices,
        window,
        max(1.0, sequences / window),
        ran[-1][1].name,
    )
