"""A configuration's iterations in virtual time, before anything runs: with typical speeds, under schedules that it chooses among.

What a device computes and reads per second is that of a usual one of its kind (pa_npu/platform/typical.py); lengths are assumed,
heavy-tailed about a share of the limit. Seconds are good to a factor of two, and for comparing: which side
waits, whether an iteration has enough groups, which split is better. A run measures, and says all of it in its records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.dispatch.schedule import Schedule, same_windows
from pa_npu.dispatch.work import GroupWork
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.iteration_model.backwards import backwards_turns
from pa_npu.planning.iteration_model.candidates import SLACKS, begin_on_shared, place_levels, shared_levels
from pa_npu.planning.iteration_model.cluster import Cluster, EngineSpeed, VirtualGroup
from pa_npu.planning.iteration_model.simulate import simulate
from pa_npu.planning.memory import kv_bytes_per_token
from pa_npu.platform.typical import TypicalSpeed

# Spread of a logarithm of lengths, by prompt and by response, and their mean over the limit: reasoning models are trained with
# limits of some three times what they usually need. Short answers leave less room.
PROMPT_SIGMA, RESPONSE_SIGMA, MEAN_OF_LIMIT = 0.6, 0.4, 0.3
_SHORT_LIMIT, _SHORT_SIGMA, _SHORT_MEAN = 64, 0.1, 0.8
_PROMPT_OF_LIMIT = 0.4
_BYTES = {"fp32": 4, "bf16": 2}
# Of the arithmetic of decoding, what is not hidden behind reading the weights.
_NOT_HIDDEN = 0.5
_MOST_SEQUENCES = 8192
# Seconds per group before over those after, from which on a change is worth naming: below is what two draws differ by.
_WORTH = 1.05
_ENOUGH = 0.9
# Of the numbers of groups that may begin on an engine on a trainer's device, every so manieth is tried.
_SHARED_STEP = 3


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of an iteration without border. generate_s, train_s: Tg, Tt of a synchronous one, Tg under the window that generates
    fastest, without engines on the trainers' devices. waves: an engine's sequences over those that it has in flight at most."""

    waves: float
    generate_s: float
    train_s: float
    iteration_s: float

    @property
    def bound(self) -> float:
        """What overlapping can gain over a synchronous iteration at most."""
        return (self.generate_s + self.train_s) / max(self.generate_s, self.train_s)

    @property
    def of_bound(self) -> float:
        """What is reached of the bound (Tg + Tt) / max(Tg, Tt) of overlapping; engines on the trainers' devices go beyond it."""
        return max(self.generate_s, self.train_s) / self.iteration_s

    @property
    def engines_idle(self) -> float:
        return max(0.0, 1.0 - self.generate_s / self.iteration_s)

    @property
    def trainers_idle(self) -> float:
        return max(0.0, 1.0 - self.train_s / self.iteration_s)


def rehearse(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Rehearsal:
    """The schedule that is best on one draw of lengths, on another. Colocated, training follows generation."""
    cluster = _cluster(config, spec, typical)
    known, unknown = (_groups(config, spec, typical, number) for number in (0, 1))
    apart = _schedules(config, cluster, known)
    schedules = [*apart, *_with_shared(config, cluster, known, apart)]
    best = min(schedules, key=lambda schedule: simulate(cluster, known, schedule).end_s)
    outcome = simulate(cluster, unknown, best)
    generate_s = min(simulate(cluster, unknown, schedule).generated_s for schedule in apart)
    in_flight = min(best.largest_window, cluster.max_num_seqs)
    sequences = len(unknown) * config.rollout.responses_per_prompt / len(cluster.dedicated)
    end_s = generate_s + outcome.train_s if config.placement.colocate else outcome.end_s
    return Rehearsal(max(1.0, sequences / in_flight), generate_s, outcome.train_s, end_s)


def advice(config: Config, spec: ModelSpec, typical: TypicalSpeed, found: Rehearsal) -> list[tuple[str, Rehearsal]]:
    """Changes that make an iteration's groups cheaper by _WORTH or more, best first, and what then is predicted.

    None where engines and trainers are colocated. Tried alone: two and four times the groups where less than _ENOUGH of the bound
    is reached, and a replica's devices more for either side.
    """
    schedule, rollout, trainer = config.schedule, config.rollout, config.trainer
    if config.placement.colocate:  # each side has all devices already, and neither waits for the other's groups
        return []
    moved = math.lcm(config.mesh.replica_size, rollout.tensor_parallel)
    factors = (2, 4) if found.of_bound < _ENOUGH else ()
    changes = [{"schedule.prompts_per_iteration": factor * schedule.prompts_per_iteration} for factor in factors]
    for devices in (moved, -moved):
        engines = rollout.engines + devices // rollout.tensor_parallel
        changes.append({"rollout.engines": engines, "trainer.devices": trainer.devices - devices})
    tried = []
    for change in changes:
        other = _changed(config, change)
        if other is None:
            continue
        predicted = rehearse(other, spec, typical)
        gain = found.iteration_s / schedule.prompts_per_iteration
        gain /= predicted.iteration_s / other.schedule.prompts_per_iteration
        if gain >= _WORTH:
            tried.append((gain, " ".join(f"{key}={value}" for key, value in change.items()), predicted))
    return [(text, predicted) for _, text, predicted in sorted(tried, key=lambda each: -each[0])]


def _changed(config: Config, change: dict[str, int]) -> Config | None:
    """None where the keys' rules forbid it, or it is too large to simulate."""
    tree = config.model_dump(exclude_unset=True)
    for key, value in change.items():
        section, name = key.split(".")
        tree[section] = {**tree.get(section, {}), name: value}
    try:
        other = Config.model_validate(tree)
    except ValueError:
        return None
    return other if can_rehearse(other) else None


def can_rehearse(config: Config) -> bool:
    """Whether an iteration has so few sequences that simulating it takes no more than some seconds."""
    return config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt <= _MOST_SEQUENCES


def _schedules(config: Config, cluster: Cluster, groups: Sequence[VirtualGroup]) -> list[Schedule]:
    """Prompts come in order: nothing is known of them when they come for the first time."""
    responses, names = config.rollout.responses_per_prompt, tuple(cluster.dedicated)
    share = math.ceil(len(groups) / len(names))
    most = max(1, min(share, 2 * cluster.max_num_seqs // responses))
    window = config.rollout.window
    levels = place_levels(share, most) if window == "auto" else [max(1, window // responses)]
    order = tuple(range(len(groups)))
    schedules = [Schedule("", order, (same_windows(names, places * responses),)) for places in levels]
    if window == "auto" and config.schedule.updates_per_iteration == 1:
        places = max(1, min(share, cluster.max_num_seqs // responses))
        for slack in SLACKS:
            order, turns = backwards_turns(cluster, groups, places * len(names), slack)
            schedules.append(Schedule("", order, (same_windows(names, places * responses),), turns))
    return schedules


def _with_shared(
    config: Config, cluster: Cluster, groups: Sequence[VirtualGroup], schedules: Sequence[Schedule]
) -> list[Schedule]:
    """These, with groups that begin on the trainers' devices."""
    updates, most = config.schedule.updates_per_iteration, cluster.max_num_seqs // config.rollout.responses_per_prompt
    levels = shared_levels(len(groups) // updates, len(cluster.dedicated), len(cluster.shared), most)
    found = []
    for each in levels[::_SHARED_STEP] if cluster.shared else ():
        constant = (schedule for schedule in schedules if not schedule.turns)
        found += [begin_on_shared(schedule, cluster.shared, each, (), updates) for schedule in constant]
        for schedule in schedules:
            if schedule.turns:
                places = schedule.largest_window // config.rollout.responses_per_prompt * len(cluster.dedicated)
                shared = cluster.shared * each
                order, turns = backwards_turns(cluster, groups, places, 1.0, shared)
                found.append(Schedule("", order, schedule.windows, turns, shared))
                break
    return found


def _cluster(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Cluster:
    rollout = config.rollout
    shards, element = rollout.tensor_parallel, _BYTES[config.model.dtype]
    weights_s = spec.num_parameters * element / shards / typical.memory_bytes
    context = _PROMPT_OF_LIMIT * config.data.max_prompt_tokens + 0.5 * _mean_length(config)
    cache_s = context * kv_bytes_per_token(config, spec) / typical.memory_bytes
    arithmetic_s = 2.0 * spec.num_parameters / shards / typical.flops
    speed = EngineSpeed(
        typical.decode_step_s + weights_s,
        typical.sequence_s + cache_s + _NOT_HIDDEN * arithmetic_s,
        arithmetic_s / _NOT_HIDDEN,
    )
    names = [f"engine-{number}" for number in range(config.num_engines)]
    schedule = config.schedule
    return Cluster(
        {name: speed.scaled(1.0 / rollout.settings_of(number).speed) for number, name in enumerate(names)},
        rollout.max_num_seqs,
        config.data_parallel,
        schedule.order,
        schedule.updates_per_iteration,
        shared=tuple(names[rollout.engines :]),
    )


def _groups(config: Config, spec: ModelSpec, typical: TypicalSpeed, number: int) -> list[VirtualGroup]:
    """Of an iteration, with lengths drawn at random."""
    rng = np.random.default_rng([5, number])
    responses, limit, mean = (
        config.rollout.responses_per_prompt,
        config.rollout.max_response_tokens,
        _mean_length(config),
    )
    work, seconds = GroupWork(spec, config), _seconds_per_operation(config, typical)
    prompt = max(1, round(_PROMPT_OF_LIMIT * config.data.max_prompt_tokens))
    short = limit <= _SHORT_LIMIT
    of_prompt, of_response = (_SHORT_SIGMA, _SHORT_SIGMA) if short else (PROMPT_SIGMA, RESPONSE_SIGMA)
    if config.rollout.ignore_eos:
        of_prompt = of_response = 0.0
    groups = []
    for index in range(config.schedule.prompts_per_iteration):
        shape = of_prompt * rng.standard_normal() + of_response * rng.standard_normal(responses)
        drawn = mean * np.exp(shape - 0.5 * (of_prompt**2 + of_response**2))
        lengths = [int(n) for n in np.clip(np.round(drawn), 1, limit)]
        train_s = seconds * work(prompt, lengths) + typical.group_s
        groups.append(VirtualGroup(index, prompt, tuple(map(float, lengths)), train_s, responses * (prompt + mean)))
    return groups


def _mean_length(config: Config) -> float:
    limit = config.rollout.max_response_tokens
    share = 1.0 if config.rollout.ignore_eos else _SHORT_MEAN if limit <= _SHORT_LIMIT else MEAN_OF_LIMIT
    return max(1.0, share * limit)


def _seconds_per_operation(config: Config, typical: TypicalSpeed) -> float:
    """Of a replica. Full recomputation is another forward pass, and so is each frozen model: a third of forward and backward."""
    passes = 1.0 + (len(config.frozen_models) + (config.trainer.recompute == "full")) / 3.0
    return passes / (config.mesh.replica_size * typical.flops * typical.training)
