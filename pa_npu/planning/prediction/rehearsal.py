"""The rehearsal of a configuration before anything runs: who would wait for whom, and what would make iterations shorter.

Costs are the published figures of a usual device of its kind (pa_npu/platform/typical.py), lengths are assumed. Seconds are good to
a factor of two, and for comparing: which side waits, whether an iteration has enough groups, which split is better. A run
measures, and says all of it in its records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.calibration import published
from pa_npu.planning.prediction.changed import changed
from pa_npu.planning.prediction.virtual_run import predict
from pa_npu.planning.prediction.workload import assumed_workload
from pa_npu.platform.typical import TypicalSpeed

# A controller has learned speeds and lengths after two iterations.
_ITERATIONS, _MOST_GROUPS = 3, 64
# Seconds per group before over those after, from which on a change is worth naming: below is what two draws differ by.
_WORTH = 1.05
_ENOUGH = 0.9
_MOST_SEQUENCES = 8192


@dataclass(frozen=True)
class Rehearsal:
    """Seconds of an iteration without border. generate_s, train_s: Tg, Tt of a synchronous one without engines on the trainers'
    devices. waves: an engine's sequences over those that it has in flight at most. devices_idle: of devices for
    both."""

    waves: float
    generate_s: float
    train_s: float
    iteration_s: float
    devices_idle: float | None = None

    @property
    def bound(self) -> float:
        """The most that overlapping can gain over a synchronous iteration."""
        return (self.generate_s + self.train_s) / max(self.generate_s, self.train_s)

    @property
    def of_bound(self) -> float:
        """The share reached of the bound (Tg + Tt) / max(Tg, Tt) of overlapping; engines on the trainers' devices go beyond it."""
        return max(self.generate_s, self.train_s) / self.iteration_s

    @property
    def idle(self) -> str:
        """Who is idle for which part of the time."""
        if self.devices_idle is not None:
            return f"devices idle {self.devices_idle:.0%}"
        return f"engines idle {self.engines_idle:.0%}, trainers {self.trainers_idle:.0%}"

    @property
    def engines_idle(self) -> float:
        return max(0.0, 1.0 - self.generate_s / self.iteration_s)

    @property
    def trainers_idle(self) -> float:
        return max(0.0, 1.0 - self.train_s / self.iteration_s)


def rehearse(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Rehearsal:
    """Predict a synchronous and a periodic iteration of config, or, of colocated engines and trainers, one with roles that follow
    the work."""
    costs, workload = published(config, spec, typical), assumed_workload(config)
    synchronous = predict(
        config, spec, costs, workload, typical, streams=False, iterations=_ITERATIONS, most_groups=_MOST_GROUPS
    )
    best = predict(config, spec, costs, workload, typical, iterations=_ITERATIONS, most_groups=_MOST_GROUPS)
    iteration_s = best.iteration_s - best.border_s
    idle = best.engines_idle if config.trainer.devices == config.num_devices else None  # each device does both
    return Rehearsal(best.waves, synchronous.generate_s, synchronous.train_s, iteration_s, idle)


def can_rehearse(config: Config) -> bool:
    """Whether an iteration has so few sequences that simulating it takes no more than some seconds."""
    return config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt <= _MOST_SEQUENCES


def advice(config: Config, spec: ModelSpec, typical: TypicalSpeed, found: Rehearsal) -> list[tuple[str, Rehearsal]]:
    """Find changes that make an iteration's groups cheaper by _WORTH or more, best first, each with what then is predicted.

    Engines and trainers have devices of their own. Tried alone: two and four times the groups where less than _ENOUGH of the
    bound is reached, and a replica's devices more for either side.
    """
    schedule, rollout, trainer = config.schedule, config.rollout, config.trainer
    moved = math.lcm(config.mesh.replica_size, rollout.tensor_parallel)
    factors = (2, 4) if found.of_bound < _ENOUGH else ()
    changes: list[dict[str, Mapping[str, Any]]] = [
        {"schedule": {"prompts_per_iteration": factor * schedule.prompts_per_iteration}} for factor in factors
    ]
    for devices in (moved, -moved):
        engines = rollout.engines + devices // rollout.tensor_parallel
        changes.append({"rollout": {"engines": engines}, "trainer": {"devices": trainer.devices - devices}})
    tried = []
    for change in changes:
        other = changed(config, change)
        if other is None or not can_rehearse(other):
            continue
        predicted = rehearse(other, spec, typical)
        gain = found.iteration_s / schedule.prompts_per_iteration
        gain /= predicted.iteration_s / other.schedule.prompts_per_iteration
        if gain >= _WORTH:
            keys = [f"{section}.{key}={value}" for section, values in change.items() for key, value in values.items()]
            tried.append((gain, " ".join(keys), predicted))
    return [(text, predicted) for _, text, predicted in sorted(tried, key=lambda each: -each[0])]
