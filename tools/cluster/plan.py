"""The plan of a cluster: the best division of its devices, its bounds, and how far each figure is to be believed.

bounds      the same devices without overlap in time (colocated), with perfect overlap, and shared
            perfectly
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.planning.engine_memory import engine_memory
from pa_npu.planning.memory import Memory, trainer_memory
from pa_npu.planning.prediction.divisions import (
    DivisionChoices,
    best_divisions,
    device_bytes,
    mean_response,
    sides_s,
    with_changes,
)
from pa_npu.planning.prediction.virtual_run import Basis, Predicted
from pa_npu.planning.prediction.workload import Origin
from tools.cluster.calibration import Calibration
from tools.cluster.figures import Figure, figure, weakest
from tools.cluster.limits import Limit, limited_s, limits

# Of what goes over to another model, layout or device on published figures' shape.
TRANSFER_ERROR = 0.25
_PREDICTED = 3


@dataclass(frozen=True)
class KnownBasis(Basis):
    """The basis of a plan whose errors are known. error: of the model of an iteration, relative."""

    costs: Calibration
    error: float

    @property
    def origin(self) -> Origin:
        return weakest(
            self.costs.origin, "calibrated", "calibrated" if self._same_device else "estimated"
        )

    @property
    def _same_device(self) -> bool:
        return self.costs.typical.name == self.typical.name

    @property
    def relative_error(self) -> float:
        """Relative error of predicted times: of the costs, of carrying them over, and of the model
        of an iteration.
        """
        known = max(self.costs.engine_error, self.costs.trainer_error)
        same = self._same_device and self.costs.spec.num_parameters == self.spec.num_parameters
        carried = 0.0 if same or self.costs.origin == "estimated" else TRANSFER_ERROR
        return math.sqrt(known**2 + carried**2 + self.error**2)


@dataclass(frozen=True)
class ClusterPlan:
    """The best division of some devices that was found. Seconds per iteration, with intervals.

    colocated_s: engines and trainers on all devices in turn. separate_bound_s: the longer side
    alone and the border, no schedule on separate devices ends before. perfect_s: all work at its
    least cost, spread evenly over all devices. alternatives: of other divisions, (engines, trainer
    devices, seconds), the best first.
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
        updates = self.config.schedule.updates_per_iteration
        return self.iteration_s.map(
            lambda seconds: 1000.0 / updates * seconds * self.devices / 3600.0
        )

    @property
    def first_limit(self) -> Limit:
        return first_to_break(list(self.limits), self.iteration_s.value)


def plan_cluster(basis: KnownBasis, devices: int) -> ClusterPlan:
    """Raises UserError where the model fits on no division of them."""

    def around(config: Config, predicted: Predicted) -> list[Limit]:
        return limits(config, predicted, mean_response(basis, config), basis.typical)

    tried = best_divisions(
        basis,
        devices,
        DivisionChoices(),
        _PREDICTED,
        lambda config, prediction: limited_s(prediction.iteration_s, around(config, prediction)),
    )
    seconds, config, best = tried[0]
    error = basis.relative_error
    origin = basis.origin
    others = [(c.rollout.engines, c.trainer.devices, s) for s, c, _ in tried[1:]]
    return ClusterPlan(
        config,
        devices,
        best,
        figure(seconds, error, origin),
        figure(_colocated_s(basis, config, devices), error, origin),
        figure(_separate_bound_s(basis, config, best), error, origin),
        figure(_perfect_s(basis, config, devices), error, origin),
        trainer_memory(config, basis.spec),
        engine_memory(config, basis.spec, device_bytes(basis.typical)),
        device_bytes(basis.typical),
        around(config, best),
        others,
    )


def planning_base(config: Config, kind: str) -> Config:
    """Returns a configuration without what ties it to the devices it was made for. kind: of the
    devices that are planned with.
    """
    tree = config.model_dump(exclude_unset=True)
    tree.pop("placement", None)
    tree["run"] = {**tree.get("run", {}), "device": kind}
    rollout = tree.get("rollout", {})
    tree["rollout"] = {
        key: value
        for key, value in rollout.items()
        if key not in ("attach", "max_engines", "engine_settings")
    }
    if "telemetry" in tree:
        telemetry = tree["telemetry"]
        tree["telemetry"] = {
            key: value for key, value in telemetry.items() if not key.startswith("profile")
        }
    return Config.model_validate(tree)


def _colocated_s(basis: KnownBasis, config: Config, devices: int) -> float:
    """Predicts turns, in which all devices generate, then all train: the sum, the step and the
    border; moving weights in and out of memory is left out.
    """
    mesh = Mesh.for_devices(
        devices, config.mesh.tensor, config.mesh.pipeline, context=config.mesh.context
    )
    changes = {
        "rollout": {"engines": max(1, devices // config.rollout.tensor_parallel)},
        "trainer": {"devices": mesh.size},
    }
    unit = mesh.data * config.schedule.updates_per_iteration
    groups = config.schedule.prompts_per_iteration
    whole = max(1, round(groups / unit)) * unit
    together = with_changes(config, {**changes, "schedule": {"prompts_per_iteration": whole}})
    if together is None:
        return math.inf
    predicted = basis.predict(together, streams=False)
    return predicted.iteration_s * groups / whole


def _separate_bound_s(basis: KnownBasis, config: Config, best: Predicted) -> float:
    generate_s, _ = sides_s(basis, config)
    return max(min(generate_s, best.generate_s), best.train_s) + best.border_s


def _perfect_s(basis: KnownBasis, config: Config, devices: int) -> float:
    """Device-seconds of both sides with engines full, over the devices."""
    generate_s, train_s = sides_s(basis, config)
    of_engines = generate_s * config.rollout.engines * config.rollout.tensor_parallel
    return (of_engines + train_s * config.trainer.devices) / devices


def first_to_break(limits: list[Limit], iteration_s: float) -> Limit:
    """Returns the one that takes the largest share: of an iteration, or, in the border, of a tenth
    of it.
    """
    return max(
        limits, key=lambda limit: limit.share(iteration_s) * (10.0 if limit.in_border else 1.0)
    )
