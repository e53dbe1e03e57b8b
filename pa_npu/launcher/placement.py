"""Which node, device, cores and port every process gets: pure arithmetic, except for asking the kernel for free ports."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError

# Outside of the kernel's range for outgoing connections (from 32768 on Linux): an engine binds its
# port half a minute after it was chosen, and meanwhile a connection of another process could take a
# port of that range.
_FREE_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class Placement:
    """Devices and cores of one node's processes. An engine has rollout.tensor_parallel devices.
    cores: empty if unpinned.

    Shared engines (placement.colocate) have devices of trainers. engines, ranks, teachers: which
    engines, trainer ranks and teachers' engines of the run these are, in the order of the other
    fields.
    shared_cores: how many cores all processes share, on a node with too few of them; else 0.
    """

    engine_devices: tuple[tuple[int, ...], ...]
    trainer_devices: tuple[int, ...]
    engine_cores: tuple[tuple[int, ...], ...]
    trainer_cores: tuple[tuple[int, ...], ...]
    engines: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    teacher_devices: tuple[tuple[int, ...], ...] = ()
    teacher_cores: tuple[tuple[int, ...], ...] = ()
    teachers: tuple[int, ...] = ()
    shared_cores: int = 0

    @property
    def used(self) -> tuple[int, ...]:
        """The devices of all processes."""
        units = (*self.engine_devices, *self.teacher_devices)
        return (*(index for unit in units for index in unit), *self.trainer_devices)

    def lines(self) -> list[str]:
        """Returns lines that say who runs where."""
        if self.shared_cores:
            names = [f"engine-{index}" for index in self.engines]
            names += [f"trainer-{rank}" for rank in self.ranks]
            names += [f"teacher-{index}" for index in self.teachers]
            cores = "core" if self.shared_cores == 1 else f"{self.shared_cores} cores"
            return [f"{', '.join(names)} on the same {cores}"]
        kind = "core" if any(self.trainer_cores) else "device"
        engines = self.engine_cores if any(self.engine_cores) else self.engine_devices
        trainers = (
            self.trainer_cores
            if any(self.trainer_cores)
            else tuple((device,) for device in self.trainer_devices)
        )
        named = [
            (f"engine-{index}", where) for index, where in zip(self.engines, engines, strict=True)
        ]
        named += [
            (f"trainer-{rank}", where) for rank, where in zip(self.ranks, trainers, strict=True)
        ]
        teachers = self.teacher_cores if any(self.teacher_cores) else self.teacher_devices
        named += [
            (f"teacher-{index}", where)
            for index, where in zip(self.teachers, teachers, strict=True)
        ]
        shared = [
            f"engine-{i}"
            for i, of in zip(self.engines, self.engine_devices, strict=True)
            if self._is_shared(of)
        ]
        beside = dict.fromkeys(shared, ", shared with trainers")
        return [
            f"{name} on {kind} {','.join(map(str, where))}{beside.get(name, '')}"
            for name, where in named
        ]

    def _is_shared(self, devices: Sequence[int]) -> bool:
        return not set(devices).isdisjoint(self.trainer_devices)


def placement_lines(placements: Sequence[Placement]) -> list[str]:
    """Returns lines that say who runs where, on all nodes."""
    if len(placements) == 1:
        return placements[0].lines()
    return [
        f"node {node}: {', '.join(share.lines()) or 'nothing'}"
        for node, share in enumerate(placements)
    ]


def place(config: Config, num_devices: int | None, cores: Sequence[int]) -> Placement:
    """Assign the devices of the only node: engines, then teachers' engines, then trainers.

    num_devices: how many devices with memory of their own there are; None on cpu, where a device is
    one of `cores` and, without placement.devices, processes share cores unpinned when there are too
    few.
    Raises ConfigError when an index does not exist or is used twice.
    """
    available = len(cores) if num_devices is None else num_devices
    devices = config.placement.devices or range(config.devices.num_devices)
    highest = max(devices)
    if highest >= available and (num_devices is not None or config.placement.devices is not None):
        kind = "cores" if num_devices is None else "devices"
        raise ConfigError(
            f"placement: the run needs {config.devices.num_devices} {kind}, the highest index is "
            f"{highest}, but {available} {kind} are here; lower rollout.engines or "
            "trainer.devices, or correct placement.devices"
        )
    if len(set(devices)) < config.devices.num_devices and num_devices is not None:
        dedicated = config.devices.num_devices - config.trainer.devices
        raise ConfigError(
            f"placement: engines {list(devices[:dedicated])} and trainers {list(devices[dedicated:])} "
            "share a device; give each its own"
        )
    (share,) = _shares(config, 1, highest + 1)
    return settle_on_node(config, share, num_devices, cores)


def place_nodes(config: Config) -> list[Placement]:
    """Assign the devices of several nodes, engines first; every node computes the same. Cores are
    not assigned yet.

    An engine and a tensor-parallel group of trainers stay on one node. In placement.devices, device
    d of node n has the index n x devices per node + d. Raises ConfigError when that is impossible.
    """
    per_node = config.devices.devices_per_node
    placement = config.placement
    num_devices = placement.nnodes * per_node
    listed = placement.devices or ()
    if len(set(listed)) < len(listed) or any(not 0 <= index < num_devices for index in listed):
        raise ConfigError(
            f"placement.devices: {list(listed)} names a device twice or one beyond the "
            f"{num_devices} of {placement.nnodes} nodes of {per_node}; correct it"
        )
    return _shares(config, placement.nnodes, per_node)


def _shares(config: Config, num_nodes: int, per_node: int) -> list[Placement]:
    """Devices for every process, by node: those of placement.devices, else the first that are free."""
    listed = config.placement.devices or ()
    free = [
        [i for i in range(n * per_node, (n + 1) * per_node) if i not in listed]
        for n in range(num_nodes)
    ]
    dedicated = config.rollout.engines - config.devices.num_shared_engines
    engines = _units(
        "rollout", config.rollout.tensor_parallel, dedicated, config.devices.engine_devices, free
    )
    teachers = _teacher_units(config, free)
    together = len(config.mesh.groups("tensor"))
    trainers = _units("trainer", config.mesh.tensor, together, config.devices.trainer_devices, free)
    devices = [index for unit in trainers for index in unit]
    engines += _shared_units(config, devices)
    for unit in (*engines, *trainers):
        if len({index // per_node for index in unit}) > 1:
            raise ConfigError(
                f"placement.devices: {list(unit)} are tensor-parallel peers on "
                f"several nodes of {per_node} devices; give them devices of one node"
            )
    placements = []
    for node in range(num_nodes):
        here = [index for index, unit in enumerate(engines) if unit[0] // per_node == node]
        ranks = [rank for rank, index in enumerate(devices) if index // per_node == node]
        placements.append(
            Placement(
                engine_devices=tuple(tuple(i % per_node for i in engines[index]) for index in here),
                trainer_devices=tuple(
                    index % per_node for index in devices if index // per_node == node
                ),
                engine_cores=((),) * len(here),
                trainer_cores=((),) * len(ranks),
                engines=tuple(here),
                ranks=tuple(ranks),
                # they are started on one machine only
                teacher_devices=tuple(teachers),
                teacher_cores=((),) * len(teachers),
                teachers=tuple(range(len(teachers))),
            )
        )
    return placements


def _teacher_units(config: Config, free: list[list[int]]) -> list[tuple[int, ...]]:
    """Devices of each engine of a teacher, whose numbers of devices may differ."""
    listed = config.devices.teacher_devices
    units: list[tuple[int, ...]] = []
    begin = 0
    for name, size in zip(config.teacher_engines, config.devices.teacher_sizes, strict=True):
        devices = None if listed is None else listed[begin : begin + size]
        units += _units(f"teacher.{name}", size, 1, devices, free)
        begin += size
    return units


def _shared_units(config: Config, trainers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Devices of shared engines: those of the trainer ranks beside each. trainers: of all ranks."""
    shared = range(
        config.rollout.engines - config.devices.num_shared_engines, config.rollout.engines
    )
    return tuple(
        tuple(trainers[rank] for rank in config.devices.ranks_beside(index)) for index in shared
    )


def place_extra_engine(config: Config, index: int) -> Placement:
    """Engine `index` by itself, on the first of whatever devices it is given."""
    return Placement(
        (tuple(range(config.rollout.tensor_parallel)),), (), ((),), (), engines=(index,)
    )


def _units(
    section: str, size: int, count: int, listed: Sequence[int] | None, free: list[list[int]]
) -> list[tuple[int, ...]]:
    """`count` units of `size` devices each: as given, else the first that are free together on a
    node.
    """
    if listed:
        return [tuple(listed[at : at + size]) for at in range(0, size * count, size)]
    units: list[tuple[int, ...]] = []
    for _ in range(count):
        node = next((devices for devices in free if len(devices) >= size), None)
        if node is None:
            left = ", ".join(str(len(devices)) for devices in free)
            raise ConfigError(
                f"{section}.tensor_parallel: {size} peers must share a node, but after "
                f"{len(units)} of {count} groups the nodes have {left} devices left; change it, "
                "rollout.engines, trainer.devices or placement.devices_per_node"
            )
        units.append(tuple(node.pop(0) for _ in range(size)))
    return units


def settle_on_node(
    config: Config, placement: Placement, num_devices: int | None, cores: Sequence[int]
) -> Placement:
    """Returns a node's share with its cores. num_devices and cores: what the node has, as for
    `place`.

    Raises ConfigError when the node has fewer devices than its share needs.
    """
    used = placement.used
    available = len(cores) if num_devices is None else num_devices
    enough = max(used, default=-1) < available
    if not enough and num_devices is not None:
        raise ConfigError(
            f"placement.devices_per_node: the run uses {config.devices.devices_per_node} devices of each "
            f"node, but {available} are here; lower rollout.engines or trainer.devices, or set "
            "placement.devices_per_node"
        )
    if num_devices is not None:
        return placement
    if not enough:
        return replace(placement, shared_cores=len(cores))
    return replace(
        placement,
        engine_cores=tuple(tuple(cores[i] for i in engine) for engine in placement.engine_devices),
        trainer_cores=tuple((cores[i],) for i in placement.trainer_devices),
        teacher_cores=tuple(
            tuple(cores[i] for i in teacher) for teacher in placement.teacher_devices
        ),
    )


def visible_devices(
    variable: str | None, indices: Sequence[int], environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment that shows a process just these devices; indices count within what
    the user made visible.
    """
    if variable is None:
        return {}
    outer = environment.get(variable)
    names = outer.split(",") if outer else None
    return {variable: ",".join(names[index].strip() if names else str(index) for index in indices)}


def available_cores() -> list[int]:
    """Cores this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def engine_ports(config: Config, engines: Sequence[int]) -> list[int]:
    """One port for each of these engines of this node: by their index behind placement.port, the
    store's, or free ones.
    """
    if config.placement.port:
        return [config.placement.port + 1 + index for index in engines]
    return free_ports(config.placement.address, len(engines))


def teacher_ports(config: Config, teachers: Sequence[int], taken: Sequence[int]) -> list[int]:
    """One port for each engine of a teacher: behind those of the engines, or free ones that are not
    `taken`.
    """
    if config.placement.port:
        first = config.placement.port + 1 + config.rollout.engines * (not config.rollout.attach)
        return [first + index for index in teachers]
    ports = free_ports(config.placement.address, len(teachers) + len(taken))
    return [port for port in ports if port not in taken][: len(teachers)]


def free_ports(host: str, count: int) -> list[int]:
    """Different ports nobody listens on. Raises UserError when there are not enough."""
    ports: list[int] = []
    for port in random.sample(_FREE_PORTS, len(_FREE_PORTS)):
        if len(ports) == count:
            break
        if port_problem(host, port) is None:
            ports.append(port)
    if len(ports) < count:
        raise UserError(
            f"placement.port: no {count} free ports in {_FREE_PORTS.start} to "
            f"{_FREE_PORTS.stop - 1}"
        )
    return ports


def port_problem(host: str, port: int) -> str | None:
    """Why one cannot listen on host:port; None when one can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
