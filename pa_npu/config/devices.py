"""Devices: which devices of a run decode, which train, and which do both."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.mesh import Mesh
from pa_npu.config.sections.inputs import RunConfig
from pa_npu.config.sections.learning import TrainerConfig
from pa_npu.config.sections.operation import PlacementConfig, ScheduleConfig
from pa_npu.config.sections.rollout import RolloutConfig

# The rest of a device is for graphs, communication and weights on their way in.
MEMORY_FRACTION = 0.85
# For an engine beside a trainer that keeps its memory while the device decodes.
SHARED_MEMORY_FRACTION = 0.3


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The use of a run's devices, as it follows from these sections."""

    run: RunConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    schedule: ScheduleConfig
    placement: PlacementConfig
    teacher_sizes: tuple[int, ...] = ()
    """Devices of each engine that is a teacher's."""

    @property
    def num_shared_engines(self) -> int:
        """The number of engines on trainers' devices: all of them with placement.colocate."""
        return self.rollout.engines if self.placement.colocate else 0

    def is_shared(self, index: int) -> bool:
        """Returns whether engine `index` is on a trainer's device.

        Engines that join the run have devices of their own.
        """
        return index < self.num_shared_engines

    def ranks_beside(self, index: int) -> tuple[int, ...]:
        """Returns the trainer ranks on whose devices shared engine `index` is.

        Engines are laid on the replicas' devices in the order of the replicas.
        """
        mesh = Mesh.of_trainer(self.trainer)
        first = index * self.rollout.tensor_parallel
        ranks = [rank for replica in range(mesh.data) for rank in mesh.replica(replica)]
        return tuple(ranks[first : first + self.rollout.tensor_parallel])

    @property
    def follows_work(self) -> bool:
        """Returns whether devices decode and train inside one iteration."""
        return self.placement.colocate and self.schedule.stream

    @property
    def unequal_groups(self) -> bool:
        """Returns whether replicas may train different numbers of an iteration's groups."""
        mesh = Mesh.of_trainer(self.trainer)
        replicas_step_together = (
            mesh.pipeline > 1 or mesh.weight_shards > 1 or self.schedule.updates_per_iteration > 1
        )
        by_arrival = self.schedule.order == "completion"
        return self.follows_work and by_arrival and not replicas_step_together

    @property
    def reduces_in_buckets(self) -> bool:
        """Returns whether gradients are reduced during the last backward, because it is known
        beforehand which one that is. Where groups are trained by rule (Algorithm.trains_by_rule) it
        is not.
        """
        return self.schedule.trained_groups is not None and not self.unequal_groups

    @property
    def engines_sleep(self) -> bool:
        """Returns whether engines on trainers' devices give their memory back while these train
        (rollout.sleep).
        """
        if not self.placement.colocate or self.run.device not in ("npu", "cuda"):
            return False
        if self.rollout.sleep is not None:
            return self.rollout.sleep
        return self.rollout.backend == "vllm" and not self.rollout.attach

    @property
    def memory_fraction(self) -> float:
        """rollout.memory_fraction, resolved by whether a device is an engine's alone or shared with
        a trainer.
        """
        if self.rollout.memory_fraction is not None:
            return self.rollout.memory_fraction
        return SHARED_MEMORY_FRACTION if self.placement.colocate else MEMORY_FRACTION

    @property
    def num_devices(self) -> int:
        """The number of all devices, each counted once: the denominator of TPSPD."""
        num_dedicated_engines = self.rollout.engines - self.num_shared_engines
        num_engine_devices = num_dedicated_engines * self.rollout.tensor_parallel
        return self.trainer.devices + num_engine_devices + self.num_teacher_devices

    @property
    def num_policy_devices(self) -> int:
        """The number of devices that decode or train, teachers' engines left out."""
        return self.num_devices - self.num_teacher_devices

    @property
    def num_teacher_devices(self) -> int:
        """The number of devices of teachers' engines."""
        return sum(self.teacher_sizes)

    @property
    def devices_per_node(self) -> int:
        """placement.devices_per_node, resolved."""
        return self.placement.devices_per_node or self.num_devices // self.placement.nnodes

    @property
    def engine_devices(self) -> tuple[int, ...] | None:
        """The engines' part of placement.devices; empty with placement.colocate."""
        indices = self.placement.devices
        if indices is None:
            return None
        return indices[: len(indices) - self.trainer.devices - self.num_teacher_devices]

    @property
    def teacher_devices(self) -> tuple[int, ...] | None:
        """The part of placement.devices that teachers' engines have."""
        indices = self.placement.devices
        if indices is None:
            return None
        end = len(indices) - self.trainer.devices
        return indices[end - self.num_teacher_devices : end]

    @property
    def trainer_devices(self) -> tuple[int, ...] | None:
        """The trainer ranks' part of placement.devices."""
        indices = self.placement.devices
        return None if indices is None else indices[len(indices) - self.trainer.devices :]

    @property
    def deterministic_collectives(self) -> bool:
        """Returns whether reductions are done in one order; equal on engines and trainers."""
        return self.run.deterministic or self.rollout.batch_invariant
