"""Some iterations of a configuration in virtual time, under the schedules that its coordinator would choose.

Prompts and lengths are drawn, a schedule is chosen and its flow predicted by the code of a run
(iteration_model), with costs in place of what a run learns. A large cluster is represented by a
part of it, with as many groups and as much training per engine.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.dispatch.roles import Rest, decoding_units, units_of
from pa_npu.dispatch.schedule import EngineSpeed, Schedule
from pa_npu.families.spec import ModelSpec
from pa_npu.planning import amounts
from pa_npu.planning.iteration_model.flow import Flow
from pa_npu.planning.iteration_model.schedules import choose, flow_of
from pa_npu.planning.iteration_model.subjects import (
    Cluster,
    GroupOutlook,
    IterationOutlook,
    Rules,
    VirtualGroup,
    expected_lengths,
)
from pa_npu.planning.prediction.costs import (
    Costs,
    EngineCost,
    GroupSeconds,
    TrainerCost,
    computed_prompt_tokens,
)
from pa_npu.planning.prediction.workload import Shape, Workload, assumed_workload, mean_context
from pa_npu.platform.typical import TypicalSpeed

_ITERATIONS = 3
# Of a cluster, the largest part that is predicted: all of it takes within some 5% of what its parts
# take.
_MOST_ENGINES, _MOST_GROUPS, _MOST_DRAWN = 64, 512, 2048
# What engines on one device cost each other beyond taking turns. Measured with two on a core: 1.16
# to 1.9, the median 1.3, in the first two judgements of docs/results/plan.md.
_SHARING = 1.3


@dataclass(frozen=True)
class Predicted:
    """Medians over a configuration's predicted iterations, in seconds. iteration_s: from publish to
    publish, border_s included.

    generate_s, train_s: of an iteration's production, and of its training without waiting for
    groups. *_idle: shares of the iteration, of devices that do neither where they do both. tokens:
    prompt and response of an iteration, as TPSPD counts them.
    window: the most sequences in flight on an engine; waves: an engine's share of an iteration over
    that. schedule: the name of the last one.
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


@dataclass(frozen=True)
class Basis:
    """The basis of a prediction. base: the configuration whose keys are kept.

    groups_per_device: prompts of an iteration, which grow with the devices; None: as many as base
    has.
    """

    base: Config
    spec: ModelSpec
    costs: Costs
    workload: Workload
    typical: TypicalSpeed
    groups_per_device: float | None

    def predicted(
        self, config: Config, *, streams: bool = True, iterations: int | None = None
    ) -> Predicted:
        """Predict iterations of config on such devices.

        streams: periodic, not synchronous; colocated engines and trainers have roles that follow
        the work, or take turns.
        iterations: over which medians are taken; none: as many as a plan shows.
        """
        engine_cost = self.costs.engine_for(config, self.spec, self.typical)
        trainer_cost = self.costs.trainer_for(config, self.spec, self.typical)
        part, responses = _part(config), config.rollout.responses_per_prompt
        engine_cost, trainer_cost = _shared_devices(config, engine_cost, trainer_cost)
        seconds = GroupSeconds(config, self.spec, trainer_cost, self.typical)
        rules = replace(Rules.of(config), replicas=part.replicas)
        units = (
            sum(bool(unit.engines) for unit in units_of(config))
            if streams and config.follows_work
            else 0
        )
        names = tuple(f"engine-{number}" for number in range(part.engines))
        speeds = {
            name: config.rollout.settings_of(number).speed for number, name in enumerate(names)
        }
        mean, longest = self.workload.response_means(config)
        ran: list[_Ran] = []
        for number in range(iterations or _ITERATIONS):
            shapes = _drawn(self.workload, config, number, part.groups)
            groups = [
                _virtual_group(index, shape, mean, engine_cost, seconds, part)
                for index, shape in enumerate(shapes)
            ]
            stages = config.trainer.pipeline_parallel
            # until a pipeline's last stage has work
            fill_s = (
                (stages - 1) * statistics.mean(group.train_s for group in groups)
                if stages > 1
                else 0.0
            )
            speed = engine_cost.speed(mean_context(shapes)).scaled(part.engine_scale)
            cluster = Cluster(
                {name: speed.scaled(1.0 / speeds[name]) for name in names},
                config.rollout.max_num_seqs,
                part.replicas,
                config.schedule.order,
                rules.updates,
                trainer_cost.step_s + fill_s,
                self.costs.delivery_s,
            )
            # all prompts are different, as in a first epoch: of none more is known than of the
            # others
            lengths = expected_lengths(longest, mean, responses)
            usual = _virtual_group(
                0,
                Shape(shapes[0].prompt, tuple(map(round, lengths))),
                mean,
                engine_cost,
                seconds,
                part,
            )
            expected = [replace(usual, index=index) for index in range(part.groups)]
            outlook = IterationOutlook(
                [GroupOutlook(shape.prompt, longest, mean) for shape in shapes],
                names,
                streams and not config.placement.colocate,
            )
            varies = len({length for shape in shapes for length in shape.lengths}) > 1
            chosen = choose(rules, cluster, outlook, expected, [groups], varies=varies).schedule
            flow = flow_of(cluster, groups, chosen, streams=outlook.streams)
            end_s = flow.end_s - _gained_s(cluster, groups, flow, chosen, units, config.mesh.data)
            train_s = (
                sum(group.train_s for group in groups) / part.replicas
                + cluster.updates * cluster.step_s
            )
            ran.append(_Ran(flow, end_s, train_s, chosen, sum(shape.tokens for shape in shapes)))
        return _predicted(config, ran, trainer_cost.border_s, part)


def assumed_basis(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Basis:
    """Before anything ran: published figures and assumed lengths, with as many prompts as config
    has.
    """
    return Basis(config, spec, Costs(), assumed_workload(config), typical, None)


@dataclass(frozen=True)
class _Ran:
    """An iteration without border. end_s: with roles that follow the work."""

    flow: Flow
    end_s: float
    train_s: float
    schedule: Schedule
    tokens: int


@dataclass(frozen=True)
class _Part:
    """The part of a cluster that is simulated. train_scale, engine_scale: factors of costs, where
    numbers do not divide evenly.
    """

    engines: int
    replicas: int
    groups: int
    train_scale: float = 1.0
    engine_scale: float = 1.0


def _part(config: Config) -> _Part:
    engines, replicas = config.rollout.engines, config.mesh.data
    groups, updates = config.schedule.prompts_per_iteration, amounts.work(config).updates
    parts = max(math.ceil(engines / _MOST_ENGINES), groups / _MOST_GROUPS)
    if parts <= 1:
        return _Part(engines, replicas, groups)
    some_engines, some_replicas = max(1, round(engines / parts)), max(1, round(replicas / parts))
    unit = some_replicas * updates
    # more waves than the largest part has would change little
    some_groups = (
        max(1, min(_MOST_GROUPS // unit, round(groups * some_engines / engines / unit))) * unit
    )
    return _Part(
        some_engines,
        some_replicas,
        some_groups,
        (groups / replicas) / (some_groups / some_replicas),
        (groups / engines) / (some_groups / some_engines),
    )


def _drawn(workload: Workload, config: Config, seed: int, groups: int) -> list[Shape]:
    """As many groups as are simulated: of every length as large a share as in the whole iteration,
    and its longest group.
    """
    total = min(config.schedule.prompts_per_iteration, _MOST_DRAWN)
    shapes = workload.draw(config, seed, max(total, groups))
    if len(shapes) == groups:
        return shapes
    ranked = sorted(range(len(shapes)), key=lambda index: max(shapes[index].lengths))
    picked = [
        ranked[int((number + 0.5) * len(ranked) / groups)] for number in range(groups - 1)
    ] + [ranked[-1]]
    return [shapes[index] for index in sorted(picked)]


def _shared_devices(
    config: Config, engine: EngineCost, trainer: TrainerCost
) -> tuple[EngineCost, TrainerCost]:
    """Processes that were placed on one device (a core, say) have a part of it each."""
    of_engines = Counter(config.engine_devices or ())
    of_trainers = Counter(config.trainer_devices or ())
    together = max(of_engines.values(), default=1)
    on_engine = together * (_SHARING if together > 1 else 1.0)
    on_trainer = max(of_trainers.values(), default=1)
    seconds = ("step_s", "sequence_s", "context_s", "prompt_token_s")
    slower = replace(engine, **{name: on_engine * getattr(engine, name) for name in seconds})
    return slower, replace(
        trainer,
        microbatch_s=trainer.microbatch_s * on_trainer,
        operation_s=trainer.operation_s * on_trainer,
    )


def _virtual_group(
    index: int, shape: Shape, mean: float, engine: EngineCost, seconds: GroupSeconds, part: _Part
) -> VirtualGroup:
    """mean: tokens that are expected of a response."""
    computed = computed_prompt_tokens(shape.prompt, len(shape.lengths), engine.prefix_block)
    train_s = part.train_scale * seconds(*shape.trained)
    expected = len(shape.lengths) * (shape.prompt + mean)
    return VirtualGroup(index, computed, tuple(map(float, shape.lengths)), train_s, expected)


def _gained_s(
    cluster: Cluster,
    groups: Sequence[VirtualGroup],
    flow: Flow,
    schedule: Schedule,
    units: int,
    replicas: int,
) -> float:
    """Seconds by which the iteration ends earlier where units change their roles, as
    dispatch/roles.py would decide once all groups have been dispatched. flow: in turns. What a
    change itself takes is left out.

    units: of so many replicas; the cluster may be a part of that.
    """
    units = round(units * cluster.replicas / replicas)
    if units < 2:
        return 0.0
    begin_s = flow.dispatched_s
    remaining, numbers, written = [np.zeros(0)], [np.zeros(0, np.int64)], [np.zeros(0)]
    trains_s: list[float] = []
    ready_s: list[float] = []
    for index, start_s, end_s in zip(schedule.order, flow.starts_s, flow.ends_s, strict=True):
        group = groups[index]
        if end_s <= begin_s:
            ready_s.append(group.train_s)
            continue
        steps = group.longest * max(0.0, begin_s - start_s) / (end_s - start_s)
        left = np.asarray([length - steps for length in group.lengths if length > steps])
        remaining.append(left)
        numbers.append(np.full(len(left), len(trains_s)))
        written.append(np.full(len(left), steps + group.prompt_tokens))
        trains_s.append(group.train_s)
    rest = Rest(
        np.concatenate(remaining),
        np.concatenate(numbers),
        np.concatenate(written),
        decoding=units,
        engines=len(cluster.engines) / units,
        replicas=cluster.replicas / units,
        trains_s=np.asarray(trains_s),
        ready_s=ready_s,
        free_s=[],
        most=cluster.max_num_seqs,
    )
    engines = [
        (speed.step_s, speed.sequence_s, speed.prompt_token_s) for speed in cluster.engines.values()
    ]
    _, roles_s, turns_s = decoding_units(rest, EngineSpeed(*np.mean(engines, axis=0).tolist()))
    return turns_s - roles_s


def _predicted(config: Config, ran: Sequence[_Ran], border_s: float, part: _Part) -> Predicted:
    median = statistics.median
    iteration_s = border_s + median(one.end_s for one in ran)
    train_s, busy_s = median(one.train_s for one in ran), median(one.flow.busy_s for one in ran)
    # a device that has both waits for nothing while it does either
    decodes_s, trains_s = (busy_s, train_s) if config.placement.colocate else (0.0, 0.0)
    window = min(ran[-1].schedule.largest_window, config.rollout.max_num_seqs)
    sequences = amounts.work(config).sequences / config.rollout.engines
    return Predicted(
        iteration_s,
        median(one.flow.generated_s for one in ran),
        train_s,
        border_s,
        max(0.0, 1.0 - (busy_s + trains_s) / iteration_s),
        max(0.0, 1.0 - (train_s + decodes_s) / iteration_s),
        median(one.tokens for one in ran) * config.schedule.prompts_per_iteration / part.groups,
        config.num_devices,
        window,
        max(1.0, sequences / window),
        ran[-1].schedule.name,
    )
