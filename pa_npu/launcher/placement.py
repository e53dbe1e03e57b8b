"""Which device, cores and port every process gets: pure arithmetic, except for asking the kernel for free ports."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, UserError

# Outside of the kernel's range for outgoing connections (from 32768 on Linux): an engine binds its port half a minute
# after it was chosen, and meanwhile a connection of another process could take a port of that range.
_FREE_PORTS = range(20000, 32000)


@dataclass(frozen=True)
class Placement:
    """devices: indices per process, engines with rollout.tensor_parallel of them. cores: empty where nothing is pinned."""

    engine_devices: tuple[tuple[int, ...], ...]
    trainer_devices: tuple[int, ...]
    engine_cores: tuple[tuple[int, ...], ...]
    trainer_cores: tuple[tuple[int, ...], ...]

    def lines(self) -> list[str]:
        """For people: who runs where."""
        kind = "core" if any(self.trainer_cores) else "device"
        engines = self.engine_cores if any(self.engine_cores) else self.engine_devices
        trainers = (
            self.trainer_cores if any(self.trainer_cores) else tuple((device,) for device in self.trainer_devices)
        )
        named = [(f"engine-{index}", where) for index, where in enumerate(engines)]
        named += [(f"trainer-{rank}", where) for rank, where in enumerate(trainers)]
        return [f"{name} on {kind} {','.join(map(str, where))}" for name, where in named]


def place(config: Config, num_devices: int | None, cores: Sequence[int]) -> Placement:
    """Assign devices, engines first.

    num_devices: how many devices with memory of their own there are; None on cpu, where a device is one of `cores` and,
    without a list in placement.*, processes share cores unpinned when there are too few.
    Raises ConfigError when an index does not exist or is used twice.
    """
    per_engine = config.rollout.tensor_parallel
    num_engine_devices = config.rollout.engines * per_engine
    given = config.placement
    engines = given.engine_devices
    trainers = given.trainer_devices
    taken = set(engines or ()) | set(trainers or ())
    free = (index for index in range(config.num_devices + len(taken)) if index not in taken)
    engines = engines or tuple(next(free) for _ in range(num_engine_devices))
    trainers = trainers or tuple(next(free) for _ in range(config.trainer.devices))
    available = len(cores) if num_devices is None else num_devices
    enough = max(*engines, *trainers) < available
    listed = given.engine_devices is not None or given.trainer_devices is not None
    if not enough and (num_devices is not None or listed):
        kind = "cores" if num_devices is None else "devices"
        raise ConfigError(
            f"placement: the run needs {config.num_devices} {kind}, the highest index is {max(*engines, *trainers)}, "
            f"but {available} {kind} are here; lower rollout.engines or trainer.devices, or correct placement.*_devices"
        )
    if len(set(engines) | set(trainers)) < config.num_devices and num_devices is not None:
        raise ConfigError(
            f"placement: engines {list(engines)} and trainers {list(trainers)} share a device; give each its own"
        )
    grouped = tuple(engines[at : at + per_engine] for at in range(0, num_engine_devices, per_engine))
    pin = num_devices is None and given.pin_cores and enough
    return Placement(
        engine_devices=grouped,
        trainer_devices=trainers,
        engine_cores=tuple(tuple(cores[i] for i in group) if pin else () for group in grouped),
        trainer_cores=tuple((cores[i],) if pin else () for i in trainers),
    )


def visible_devices(variable: str | None, indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that shows a process just these devices; indices count within what the user made visible."""
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


def engine_ports(config: Config) -> list[int]:
    """One port per engine: placement.engine_port and the following ones, or free ones."""
    first, count = config.placement.engine_port, config.rollout.engines
    if first:
        return list(range(first, first + count))
    return free_ports(config.placement.host, count)


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
            f"placement.engine_port: no {count} free ports in {_FREE_PORTS.start} to {_FREE_PORTS.stop - 1}"
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
