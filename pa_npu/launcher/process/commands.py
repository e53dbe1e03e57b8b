"""The commands and environments of a run's processes: engines, coordinator, trainer ranks."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import TEACHER_KEY_VARIABLE
from pa_npu.control.channel import ADDRESS_VARIABLE, attempt_prefix
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import Placement, engine_ports, teacher_ports, visible_devices
from pa_npu.planning.teachers import teacher_engine_config
from pa_npu.platform.base import Platform
from pa_npu.weight_transfer import collectives


@dataclass(frozen=True)
class Command:
    """scratch_env: the variable in which it finds a directory of its own, which is removed when it
    has ended.

    own_tmpdir: that directory is its TMPDIR too.
    scratch_parent: where that is made; None is the usual directory for temporary files.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cores: tuple[int, ...] = ()
    scratch_env: str | None = None
    own_tmpdir: bool = False
    scratch_parent: str | None = None


@dataclass(frozen=True)
class Role:
    """A process for a node of a cluster, whose host builds its command itself. index: engine index,
    trainer rank, or number of a teacher's engine among all of these.
    """

    node: int
    kind: Literal["engine", "trainer", "teacher"]
    index: int
    attempt: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}"


Startable = Command | Role


@dataclass(frozen=True)
class Store:
    """The address of the run's c10d store, and the attempt of the run that a process belongs to."""

    host: str
    port: int
    attempt: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def prefix(self) -> str:
        """The prefix of the attempt's keys."""
        return attempt_prefix(self.attempt)

    def env(self) -> dict[str, str]:
        return {"PA_NPU_STORE": self.address, "PA_NPU_ATTEMPT": str(self.attempt)}


def engine_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def engine_command(
    config: Config,
    spec: ModelSpec,
    platform: Platform,
    placement: Placement,
    index: int,
    port: int,
    key: str,
) -> Command:
    """Engine `index` of the run, which `placement` has on this node."""
    local = placement.engines.index(index)
    command = engine_kind(config.rollout.backend).command(config, spec, index, port)
    env = _common_env(config, platform) | {KEY_VARIABLE: key}
    env |= visible_devices(
        platform.visible_devices_env, placement.engine_devices[local], os.environ
    )
    env |= command.env
    return Command(
        f"engine-{index}",
        command.argv,
        env,
        placement.engine_cores[local],
        scratch_env=command.scratch_env,
        own_tmpdir=command.own_tmpdir,
        scratch_parent=command.scratch_parent,
    )


def teacher_command(
    config: Config, platform: Platform, placement: Placement, index: int, port: int, key: str
) -> Command:
    """Engine `index` of those that the run starts for teachers (Config.teacher_engines)."""
    names = config.teacher_engines
    name = names[index]
    of_teacher = teacher_engine_config(config, name)
    spec = ModelSpec.from_config(of_teacher)
    kind = engine_kind(of_teacher.rollout.backend)
    command = kind.command(of_teacher, spec, index - names.index(name), port)
    local = placement.teachers.index(index)
    env = _common_env(config, platform) | {KEY_VARIABLE: key}
    env |= visible_devices(
        platform.visible_devices_env, placement.teacher_devices[local], os.environ
    )
    env |= command.env
    return Command(
        f"teacher-{index}",
        command.argv,
        env,
        placement.teacher_cores[local],
        scratch_env=command.scratch_env,
        own_tmpdir=command.own_tmpdir,
        scratch_parent=command.scratch_parent,
    )


def coordinator_command(config: Config, platform: Platform, store: Store, key: str) -> Command:
    argv = (sys.executable, "-m", "pa_npu.coordinator.main", "--config", _config_file(config))
    env = (
        _common_env(config, platform)
        | store.env()
        | platform.environment("coordinator")
        | ({KEY_VARIABLE: key} if key else {})
    )
    if teacher_key := os.environ.get(TEACHER_KEY_VARIABLE):
        env[TEACHER_KEY_VARIABLE] = teacher_key
    return Command("coordinator", argv, env)


def trainer_command(
    config: Config, platform: Platform, placement: Placement, store: Store, rank: int, node: int = 0
) -> Command:
    """Rank `rank`, on node `node`.

    Ranks see all trainer devices of it and take theirs by LOCAL_RANK, as torchrun has it.
    """
    local = placement.ranks.index(rank)
    env = _common_env(config, platform) | store.env() | platform.environment("trainer")
    env |= platform.collective_environment(
        config.deadlines.longest_collective_s, config.devices.deterministic_collectives
    )
    env |= visible_devices(platform.visible_devices_env, placement.trainer_devices, os.environ)
    env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(config.trainer.devices)}
    env |= {"LOCAL_WORLD_SIZE": str(len(placement.ranks)), "GROUP_RANK": str(node)}
    env |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    env[ADDRESS_VARIABLE] = config.placement.address  # this node's; config.yaml has the launcher's
    argv = (sys.executable, "-m", "pa_npu.trainer.main", "--config", _config_file(config))
    return Command(f"trainer-{rank}", argv, env, placement.trainer_cores[local])


class NodeCommands:
    """The commands of the roles that a node has. ports: of its engines, by index. key: asked for
    when an engine starts.
    """

    def __init__(
        self,
        config: Config,
        platform: Platform,
        share: Placement,
        store: Store,
        node: int,
        key: Callable[[], str],
    ) -> None:
        self.ports = (
            {}
            if config.rollout.attach
            else dict(zip(share.engines, engine_ports(config, share.engines), strict=True))
        )
        of_teachers = teacher_ports(config, share.teachers, list(self.ports.values()))
        self.teacher_ports = dict(zip(share.teachers, of_teachers, strict=True))
        self._config = config
        self._platform = platform
        self._share = share
        self._store = store
        self._node = node
        self._key = key

    def __call__(self, role: Role) -> Command:
        """Raises UserError for a role that this node does not have, or without the engines' key."""
        here = (self._config, self._platform, self._share)
        if role.kind == "trainer" and role.index in self._share.ranks:
            command = trainer_command(
                *here, replace(self._store, attempt=role.attempt), role.index, self._node
            )
        elif role.kind == "engine" and role.index in self.ports:
            spec = ModelSpec.from_config(self._config)
            command = engine_command(
                self._config, spec, *here[1:], role.index, self.ports[role.index], self._key()
            )
        elif role.kind == "teacher" and role.index in self.teacher_ports:
            port = self.teacher_ports[role.index]
            command = teacher_command(*here, role.index, port, self._key())
        else:
            raise UserError(f"{role.name} is not of node {self._node}")
        # a process that finds Ray's variables would take itself for one of its workers
        return replace(
            command,
            env={name: value for name, value in command.env.items() if not name.startswith("RAY_")},
        )


def _config_file(config: Config) -> str:
    return str(Path(config.run.dir) / "config.yaml")


def _common_env(config: Config, platform: Platform) -> dict[str, str]:
    env = dict(os.environ)
    env.pop(KEY_VARIABLE, None)  # for engines and coordinator alone
    env.pop(TEACHER_KEY_VARIABLE, None)  # for the coordinator alone
    env |= {
        "PA_NPU_RUN_DIR": str(Path(config.run.dir).resolve()),
        "PYTHONUNBUFFERED": "1",  # log lines appear when they are written
    }
    for name in collectives.rules(platform.comm_backend).refused:
        env.pop(name, None)
    env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code leaves a stack in the log
    address = config.placement.address
    interface = interface_of(address)
    if interface is None:
        return env
    # without it gloo resolves the machine's name, which fails on machines that do not know their
    # own
    env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env if is_loopback(address) else env | platform.network_environment(address, interface)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(address: str) -> str | None:
    """Returns the network interface of this machine that has `address`; None if none is known."""
    if is_loopback(address):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(
            address, None, type=socket.SOCK_STREAM
        )[0]
        interfaces = psutil.net_if_addrs().items()
    except (ValueError, OSError):
        return None
    # a link-local address of IPv6 has its interface behind a percent sign
    wanted = str(socket_address[0]).partition("%")[0]
    for name, candidates in interfaces:
        for candidate in candidates:
            if candidate.family == family and candidate.address.partition("%")[0] == wanted:
                return name
    return None
