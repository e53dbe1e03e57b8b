"""Mesh: the layout of trainer ranks, and all arithmetic on ranks, groups and leaders.

    config.mesh                                  the mesh that section trainer describes
    mesh.place(rank), mesh.at(tensor=1, data=2)  one rank's Place: its coordinates, its groups, its
                                                 duties
    mesh.groups("tensor")                        every group of ranks along an axis, or several
    mesh.slot_of(number), mesh.number_of(...)    which replica reads which group of an iteration,
                                                 where they take turns

Rank order is Megatron's tp-cp-ep-dp-pp: tensor varies fastest, then context, data, pipeline. A
replica is one value of data, a stage one value of pipeline. Experts divide the ranks of a stage
another way: expert_tensor fastest, then expert, then expert_data, so that tensor x context x data =
expert_tensor x expert x expert_data.

A mesh is plain data; a backend looks up its process group for an axis. It is in this room because
the rules of the configuration need it too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pa_npu.config.sections.learning import TrainerConfig
from pa_npu.config.sections.operation import Senders

Axis = Literal["tensor", "context", "data", "pipeline", "expert_tensor", "expert", "expert_data"]

_DENSE: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")
_EXPERTS: tuple[Axis, ...] = ("expert_tensor", "expert", "expert_data", "pipeline")


def nodes_of(ranks: Iterable[int], devices_per_node: int) -> set[int]:
    """Returns the nodes of these ranks; ranks fill one node after another."""
    return {rank // devices_per_node for rank in ranks}


@dataclass(frozen=True)
class Mesh:
    """Number of ranks along each axis.

    experts_tensor: ranks that share one expert; None means as many as `tensor`.
    shards: number of consecutive replicas that each hold a part of the weights.
    context_shards: whether the ranks along the context axis hold parts of the weights too; otherwise
        they hold copies.

    Raises ValueError if experts do not divide a stage, or shards the replicas.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    experts_tensor: int | None = None
    shards: int = 1
    context_shards: bool = False

    def __post_init__(self) -> None:
        if self.stage_size % (self.expert_tensor * self.expert):
            raise ValueError(
                f"expert: {self.expert} x {self.expert_tensor} ranks do not divide the "
                f"{self.stage_size} ranks of a stage (tensor x context x data); set it to a divisor"
            )

        if self.data % self.shards:
            raise ValueError(
                f"shards: {self.shards} do not divide {self.data} replicas; set it to a divisor"
            )

    @classmethod
    def for_devices(
        cls, devices: int, tensor: int, pipeline: int, expert: int = 1, context: int = 1
    ) -> Mesh:
        """Returns the mesh with as many whole replicas as fit on `devices`, at least one.

        Its `size` equals `devices` if these divide evenly. Each expert is whole on one rank. If
        `expert` divides no stage, the mesh has expert=1.
        """
        data = max(1, devices // (tensor * pipeline * context))
        return cls(
            tensor,
            pipeline,
            data,
            context,
            expert=expert if tensor * context * data % expert == 0 else 1,
            experts_tensor=1,
        )

    @classmethod
    def of_trainer(cls, trainer: TrainerConfig) -> Mesh:
        """Returns the mesh that section trainer describes."""
        mesh = cls.for_devices(
            trainer.devices,
            trainer.tensor_parallel,
            trainer.pipeline_parallel,
            trainer.expert_parallel,
            trainer.context_parallel,
        )
        if trainer.backend != "fsdp":
            return mesh
        shards = mesh.data if trainer.shards is None else trainer.shards // mesh.context
        if not shards or mesh.data % shards:  # a rule refuses it
            shards = mesh.data
        return replace(mesh, shards=shards, context_shards=True)

    @property
    def expert_tensor(self) -> int:
        return self.tensor if self.experts_tensor is None else self.experts_tensor

    @property
    def expert_data(self) -> int:
        return self.stage_size // (self.expert_tensor * self.expert)

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.stage_size * self.pipeline

    @property
    def replica_size(self) -> int:
        """Number of ranks of one replica."""
        return self.tensor * self.context * self.pipeline

    @property
    def weight_shards(self) -> int:
        """Number of ranks that each hold a part of the same weights, beside tensor parallelism."""
        return self.shards * self.context if self.context_shards else self.shards

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage, over all replicas."""
        return self.tensor * self.context * self.data

    def place(self, rank: int) -> Place:
        """Returns the rank's place. Raises ValueError for a rank that is not on the mesh."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: {rank} is not one of the {self.size} ranks of {self}")
        return Place(self, rank)

    def at(self, **coordinates: int) -> Place:
        """Returns the place at these coordinates (tensor, context, data, pipeline); default 0."""
        return self.place(sum(self._stride(axis) * coordinates.get(axis, 0) for axis in _DENSE))

    def groups(self, *axes: Axis) -> list[tuple[int, ...]]:
        """Returns all groups of ranks that differ along `axes` alone, ordered by their first rank.
        Ranks inside a group are in rising order.
        """
        return list(dict.fromkeys(self.place(rank).group(*axes) for rank in range(self.size)))

    def replica(self, number: int) -> tuple[int, ...]:
        """Returns the ranks of a replica, stage after stage. The first reads the replica's groups."""
        return self.at(data=number).group("tensor", "context", "pipeline")

    def senders(self) -> tuple[int, ...]:
        """Returns the ranks whose weights together are the policy: those of replica 0 without copies
        along the context axis, and each expert once.
        """
        return tuple(rank for rank in range(self.size) if self.place(rank).sends)

    def publishers(self, senders: Senders) -> tuple[int, ...]:
        """Returns the ranks that send weights to engines (publish.senders), stage after stage."""
        return tuple(rank for rank in range(self.size) if self.place(rank).is_publisher(senders))

    def contributors(self, senders: Senders) -> tuple[int, ...]:
        """Returns the ranks that send weights, or give theirs to a rank that does."""
        return self.senders() if senders == "leader" else self.publishers(senders)

    def shard_groups(self) -> list[tuple[int, ...]]:
        """Returns all groups of ranks whose shards together are one copy of the weights."""
        return list(dict.fromkeys(self.place(rank).shard_group for rank in range(self.size)))

    def slot_of(self, number: int) -> tuple[int, int]:
        """Returns (replica, slot) of an iteration's group `number` when replicas take turns."""
        slot, replica = divmod(number, self.data)
        return replica, slot

    def number_of(self, replica: int, slot: int) -> int:
        """Returns the group that `slot_of` puts there."""
        return slot * self.data + replica

    def turns_of(self, replica: int, number: int) -> slice:
        """Returns the slice of `number` things that a replica takes when replicas take turns. If
        there are more replicas than things, several take the same one.
        """
        takers = min(self.data, number)
        return slice(replica % takers, None, takers)

    def numbers_of(self, replica: int, groups: int) -> range:
        """Returns the numbers of the groups that a replica has when replicas take turns: those that
        `slot_of` gives it, which are none if there are too few.
        """
        return range(replica, groups, self.data)

    def per_replica(self, groups: int) -> int:
        """Returns how many of `groups` each replica reads."""
        return groups // self.data

    def shares(self, groups: int) -> bool:
        """True if `groups` can be divided equally among replicas."""
        return groups % self.data == 0

    def _stride(self, axis: Axis) -> int:
        layout = _DENSE if axis in _DENSE else _EXPERTS
        return math.prod(getattr(self, before) for before in layout[: layout.index(axis)])


LONE_RANK = Mesh()


@dataclass(frozen=True)
class Place:
    """One rank's place on a mesh."""

    mesh: Mesh
    rank: int

    def coordinate(self, axis: Axis) -> int:
        size: int = getattr(self.mesh, axis)
        return self.rank // self.mesh._stride(axis) % size

    @property
    def tensor(self) -> int:
        return self.coordinate("tensor")

    @property
    def stage(self) -> int:
        return self.coordinate("pipeline")

    @property
    def replica(self) -> int:
        return self.coordinate("data")

    @property
    def is_last_stage(self) -> bool:
        """True if the rank holds the LM head and computes the loss."""
        return self.stage == self.mesh.pipeline - 1

    @property
    def is_tensor_leader(self) -> bool:
        """True if the rank leads its tensor-parallel group."""
        return self.tensor == 0

    @property
    def speaks_for_stage(self) -> bool:
        """True for one rank of a replica's stage: what all of its ranks know, such as log-probs, is
        recorded and counted there.
        """
        return self.tensor == 0 and self.coordinate("context") == 0

    @property
    def publishes(self) -> bool:
        """True if the rank leads its stage in a publish and an export: one rank per stage."""
        return (
            self.coordinate("tensor") == self.coordinate("context") == self.coordinate("data") == 0
        )

    @property
    def sends(self) -> bool:
        """True if the rank's weights are part of what is published. Other ranks hold copies."""
        is_copy = self.coordinate("context") > 0 and not self.mesh.context_shards
        dense = self.coordinate("data") < self.mesh.shards and not is_copy
        return dense or (self.mesh.expert > 1 and self.coordinate("expert_data") == 0)

    def is_publisher(self, senders: Senders) -> bool:
        """Returns whether the rank sends weights to engines (publish.senders)."""
        if senders == "leader":
            return self.publishes
        return senders == "all" or self.sends

    @property
    def shard_group(self) -> tuple[int, ...]:
        """Returns the ranks, itself included and in rising order, whose shards together are the
        weights of its stage. The first one publishes.
        """
        mesh = self.mesh
        size = max(mesh.tensor * mesh.weight_shards, mesh.expert_tensor * mesh.expert)
        first = self.rank - self.rank % mesh.stage_size % size
        return tuple(range(first, first + size))

    def group(self, *axes: Axis) -> tuple[int, ...]:
        """Returns the ranks, itself included and in rising order, that differ from this one along
        `axes` alone. The first one leads.

        Raises ValueError if `axes` mixes axes of experts with axes of dense layers.
        """
        layouts = [layout for layout in (_DENSE, _EXPERTS) if set(axes) <= set(layout)]
        layout = layouts[0] if layouts else None
        if layout is None:
            raise ValueError(
                f"axes: {', '.join(axes)} divide a stage in different ways; take those of {_DENSE} "
                f"or {_EXPERTS}"
            )
        strides = [self.mesh._stride(axis) for axis in layout]
        choices = [
            range(getattr(self.mesh, axis)) if axis in axes else (self.coordinate(axis),)
            for axis in layout
        ]
        return tuple(
            sum(stride * index for stride, index in zip(strides, reversed(chosen), strict=True))
            for chosen in itertools.product(*reversed(choices))
        )
