"""Predicts iterations of a configuration in virtual time, with its coordinator's schedules.

Prompts and lengths are drawn. A schedule is chosen and its flow predicted by the code of a run
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

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.dispatch.roles import Owned, Owners, Rest, decoding_units, role_units
from pa_npu.dispatch.schedule import EngineSpeed, Schedule
from pa_npu.families.spec import ModelSpec
from pa_npu.planning import amounts
from pa_npu.planning.iteration_model.flow import Flow
from pa_npu.planning.iteration_model.schedules import choose, predict_schedule
from pa_npu.planning.iteration_model.subjects import (
    GroupOutlook,
    IterationOutlook,
    Rules,
    VirtualCluster,
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
from pa_npu.planning.prediction.workload import (
    Shape,
    Workload,
    assumed_workload,
    mean_context,
    recorded_share,
)
from pa_npu.platform.typical import TypicalSpeed

_ITERATIONS = 3
# The largest part of a cluster that is simulated. The whole takes within some 5% of what its parts
# take.
_MAX_ENGINES = 64
_MAX_GROUPS = 512
_MAX_DRAWN = 2048
# The factor that engines on one device cost each other beyond taking turns. Measured with two on a
# core: 1.16 to 1.9, the median 1.3, in the first two judgements of docs/results/plan.md.
_SHARING = 1.3


@dataclass(frozen=True)
class Predicted:
    """Medians over a configuration's predicted iterations, in seconds.

    iteration_s: from publish to publish, border_s included.
    generate_s, train_s: duration of generation, and of training without waiting for groups.
    engines_idle, trainers_idle: shares of the iteration. Where devices do both, a device is idle
        while it does neither.
    tokens: prompt and response tokens of an iteration, as TPSPD counts them.
    window: the largest number of sequences in flight on an engine.
    waves: an engine's share of an iteration's sequences over the window.
    schedule: name of the last iteration's schedule.
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
    """The basis of a prediction.

    base: the configuration whose keys are kept.
    groups_per_device: prompts of an iteration for each device; None for as many prompts as `base`
        has, whatever the number of devices.
    """

    base: Config
    spec: ModelSpec
    costs: Costs
    workload: Workload
    typical: TypicalSpeed
    groups_per_device: float | None

    def predict(
        self, config: Config, *, streams: bool = True, iterations: int | None = None
    ) -> Predicted:
        """Predicts iterations of `config` on such devices.

        Args:
            streams: whether the run is periodic rather than synchronous. Colocated engines and
                trainers then have roles that follow the work; otherwise they take turns.
            iterations: over how many medians are taken; None for as many as a plan shows.
        """
        engine_cost, trainer_cost = _shared_devices(
            config,
            self.costs.engine_for(config, self.spec, self.typical),
            self.costs.trainer_for(config, self.spec, self.typical),
        )
        seconds = GroupSeconds(config, self.spec, trainer_cost, self.typical)
        part = _part(config)
        rules = replace(Rules.from_config(config), replicas=part.replicas)
        num_units = 0  # that change roles
        if streams and config.devices.follows_work:
            num_units = sum(bool(unit.engines) for unit in role_units(config))
        names = tuple(f"engine-{number}" for number in range(part.engines))
        mean, longest = self.workload.response_means(config)
        lengths = expected_lengths(longest, mean, config.rollout.responses_per_prompt)

        simulated: list[_Simulated] = []
        for seed in range(iterations or _ITERATIONS):
            shapes = _drawn(self.workload, config, seed, part.groups)
            groups = [
                _virtual_group(index, shape, mean, engine_cost, seconds, part)
                for index, shape in enumerate(shapes)
            ]
            fill_s = 0.0  # until a pipeline's last stage has work
            stages = config.trainer.pipeline_parallel
            if stages > 1:
                fill_s = (stages - 1) * statistics.mean(group.train_s for group in groups)
            speed = engine_cost.speed(mean_context(shapes)).scaled(part.engine_scale)
            cluster = VirtualCluster(
                engines={
                    name: speed.scaled(1.0 / config.rollout.settings_of(number).speed)
                    for number, name in enumerate(names)
                },
                max_num_seqs=config.rollout.max_num_seqs,
                replicas=part.replicas,
                order=config.schedule.order,
                updates=rules.updates,
                step_s=trainer_cost.step_s + fill_s,
                delivery_s=self.costs.delivery_s,
            )
            # All prompts are new, as in a first epoch, so the same is expected of each.
            shape = Shape(shapes[0].prompt, tuple(round(length) for length in lengths))
            usual = _virtual_group(0, shape, mean, engine_cost, seconds, part)
            usual = replace(usual, train_s=(1.0 - self.workload.by_rule) * usual.train_s)
            expected = [replace(usual, index=index) for index in range(part.groups)]
            outlook = IterationOutlook(
                groups=[GroupOutlook(shape.prompt, longest, mean) for shape in shapes],
                engines=names,
                streams=streams and not config.placement.colocate,
            )
            schedule = choose(
                rules, cluster, outlook, expected, [groups], varies=_lengths_vary(shapes)
            ).schedule
            flow = predict_schedule(cluster, groups, schedule, streams=outlook.streams)
            gained_s = _gained_s(cluster, groups, flow, schedule, num_units, config.mesh.data)
            groups_s = sum(group.train_s for group in groups) / part.replicas
            simulated.append(
                _Simulated(
                    flow=flow,
                    end_s=flow.end_s - gained_s,
                    train_s=groups_s + cluster.updates * cluster.step_s,
                    schedule=schedule,
                    tokens=sum(shape.tokens for shape in shapes),
                )
            )
        return _medians(config, simulated, trainer_cost.border_s, part)


def assumed_basis(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Basis:
    """Returns the basis without records of a run: published figures and assumed lengths, with as
    many prompts as `config` has.
    """
    return Basis(
        base=config,
        spec=spec,
        costs=Costs(),
        workload=assumed_workload(config),
        typical=typical,
        groups_per_device=None,
    )


def planned_basis(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Basis:
    """Returns the assumed basis, with the share of groups without a gradient that the records in
    run.dir have, if there are any and such groups are trained by rule; otherwise with none.
    """
    basis = assumed_basis(config, spec, typical)
    share = None
    if build_algorithm(config).trains_by_rule:
        share = recorded_share(config.run.dir)
    return replace(basis, workload=replace(basis.workload, by_rule=share or 0.0))


@dataclass(frozen=True)
class _Simulated:
    """An iteration without border. end_s: its end, with roles that follow the work."""

    flow: Flow
    end_s: float
    train_s: float
    schedule: Schedule
    tokens: int


@dataclass(frozen=True)
class _Part:
    """The part of a cluster that is simulated.

    train_scale, engine_scale: factors of costs, where numbers do not divide evenly.
    """

    engines: int
    replicas: int
    groups: int
    train_scale: float = 1.0
    engine_scale: float = 1.0


def _part(config: Config) -> _Part:
    all_engines = config.rollout.engines
    all_replicas = config.mesh.data
    all_groups = config.schedule.prompts_per_iteration
    num_parts = max(math.ceil(all_engines / _MAX_ENGINES), all_groups / _MAX_GROUPS)
    if num_parts <= 1:
        return _Part(all_engines, all_replicas, all_groups)
    engines = max(1, round(all_engines / num_parts))
    replicas = max(1, round(all_replicas / num_parts))
    # More waves than _MAX_GROUPS allow would change little.
    unit = replicas * amounts.work(config).updates
    num_units = min(_MAX_GROUPS // unit, round(all_groups * engines / all_engines / unit))
    groups = max(1, num_units) * unit
    return _Part(
        engines=engines,
        replicas=replicas,
        groups=groups,
        train_scale=(all_groups / all_replicas) / (groups / replicas),
        engine_scale=(all_groups / all_engines) / (groups / engines),
    )


def _drawn(workload: Workload, config: Config, seed: int, groups: int) -> list[Shape]:
    """Returns `groups` shapes: the same share of every length as in the whole iteration, and its
    longest group.
    """
    total = min(config.schedule.prompts_per_iteration, _MAX_DRAWN)
    shapes = workload.draw(config, seed, max(total, groups))
    if len(shapes) == groups:
        return shapes
    ranked = sorted(range(len(shapes)), key=lambda index: max(shapes[index].lengths))
    picked = [ranked[int((number + 0.5) * len(ranked) / groups)] for number in range(groups - 1)]
    picked.append(ranked[-1])
    return [shapes[index] for index in sorted(picked)]


def _lengths_vary(shapes: Sequence[Shape]) -> bool:
    lengths: set[int] = set()
    for shape in shapes:
        lengths.update(shape.lengths)
    return len(lengths) > 1


def _shared_devices(
    config: Config, engine: EngineCost, trainer: TrainerCost
) -> tuple[EngineCost, TrainerCost]:
    """Returns the costs of processes that share a device (a core, for instance): each has a part of
    it.
    """
    num_engines = max(Counter(config.devices.engine_devices or ()).values(), default=1)
    num_trainers = max(Counter(config.devices.trainer_devices or ()).values(), default=1)
    factor = num_engines * _SHARING if num_engines > 1 else 1.0
    slower_engine = replace(
        engine,
        step_s=factor * engine.step_s,
        sequence_s=factor * engine.sequence_s,
        context_s=factor * engine.context_s,
        prompt_token_s=factor * engine.prompt_token_s,
    )
    slower_trainer = replace(
        trainer,
        microbatch_s=trainer.microbatch_s * num_trainers,
        operation_s=trainer.operation_s * num_trainers,
    )
    return slower_engine, slower_trainer


def _virtual_group(
    index: int,
    shape: Shape,
    mean_response: float,
    engine: EngineCost,
    seconds: GroupSeconds,
    part: _Part,
) -> VirtualGroup:
    """Returns the group of this shape. `mean_response`: tokens that are expected of a response."""
    responses = len(shape.lengths)
    return VirtualGroup(
        index=index,
        prompt_tokens=computed_prompt_tokens(shape.prompt, responses, engine.prefix_block),
        lengths=tuple(float(length) for length in shape.lengths),
        train_s=part.train_scale * shape.train_s(seconds),
        expected_tokens=responses * (shape.prompt + mean_response),
    )


def _gained_s(
    cluster: VirtualCluster,
    groups: Sequence[VirtualGroup],
    flow: Flow,
    schedule: Schedule,
    num_units: int,
    num_replicas: int,
) -> float:
    """Returns the seconds by which the iteration ends earlier when units change their roles, as
    dispatch/roles.py would decide once all groups have been dispatched.

    The cost of a change is left out.

    Args:
        flow: the iteration in turns.
        num_units: units of the whole run.
        num_replicas: replicas of the whole run; `cluster` may be a part of it.
    """
    units = round(num_units * cluster.replicas / num_replicas)
    if units < 2:
        return 0.0
    begin_s = flow.dispatched_s
    remaining = [np.zeros(0)]
    numbers = [np.zeros(0, np.int64)]
    written = [np.zeros(0)]
    trains_s: list[float] = []
    ready_s: list[float] = []
    living: list[Owned] = []
    ready: list[Owned] = []
    in_turn = Mesh(data=cluster.replicas)
    for index, start_s, end_s in zip(schedule.order, flow.starts_s, flow.ends_s, strict=True):
        group = groups[index]
        replica, _ = in_turn.slot_of(index)
        owned = Owned(replica, index)
        if end_s <= begin_s:
            ready_s.append(group.train_s)
            ready.append(owned)
            continue
        living.append(owned)
        steps = group.longest * max(0.0, begin_s - start_s) / (end_s - start_s)
        left = np.asarray([length - steps for length in group.lengths if length > steps])
        remaining.append(left)
        numbers.append(np.full(len(left), len(trains_s)))
        written.append(np.full(len(left), steps + group.prompt_tokens))
        trains_s.append(group.train_s)
    owners = None
    if cluster.order == "prompt":
        changing = np.array_split(np.arange(cluster.replicas), units)
        owners = Owners(
            living=living, ready=ready, free=[], changing=[part.tolist() for part in changing]
        )
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
        max_sequences=cluster.max_num_seqs,
        owners=owners,
    )
    decision = decoding_units(rest, _mean_speed(list(cluster.engines.values())))
    return decision.turns_s - decision.end_s


def _mean_speed(speeds: Sequence[EngineSpeed]) -> EngineSpeed:
    return EngineSpeed(
        step_s=statistics.fmean(speed.step_s for speed in speeds),
        sequence_s=statistics.fmean(speed.sequence_s for speed in speeds),
        prompt_token_s=statistics.fmean(speed.prompt_token_s for speed in speeds),
    )


def _medians(
    config: Config, simulated: Sequence[_Simulated], border_s: float, part: _Part
) -> Predicted:
    iteration_s = border_s + statistics.median(each.end_s for each in simulated)
    generate_s = statistics.median(each.flow.generated_s for each in simulated)
    train_s = statistics.median(each.train_s for each in simulated)
    busy_s = statistics.median(each.flow.busy_s for each in simulated)
    tokens = statistics.median(each.tokens for each in simulated)
    engine_busy_s = busy_s
    trainer_busy_s = train_s
    if config.placement.colocate:  # a device that does both is busy with either
        engine_busy_s = trainer_busy_s = busy_s + train_s

    schedule = simulated[-1].schedule
    window = min(schedule.largest_window, config.rollout.max_num_seqs)
    sequences = amounts.work(config).sequences / config.rollout.engines
    return Predicted(
        iteration_s=iteration_s,
        generate_s=generate_s,
        train_s=train_s,
        border_s=border_s,
        engines_idle=max(0.0, 1.0 - engine_busy_s / iteration_s),
        trainers_idle=max(0.0, 1.0 - trainer_busy_s / iteration_s),
        tokens=tokens * config.schedule.prompts_per_iteration / part.groups,
        devices=config.devices.num_devices,
        window=window,
        waves=max(1.0, sequences / window),
        schedule=schedule.name,
    )
