"""The commands and environments of a run's processes: engines, coordinator, trainer ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pa_npu.buffer.store import attempt_prefix
from pa_npu.config.model_spec import ModelSpec
from pa_npu.config.schema import Config
from pa_npu.launcher.placement import Placement, visible_devices
from pa_npu.platform.base import Platform
from pa_npu.rollout.engine import server_command
from pa_npu.rollout.engine_guard import KEY_VARIABLE


@dataclass(frozen=True)
class Command:
    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Store:
    """Where the run's c10d store listens, and which attempt of the run a process belongs to."""

    host: str
    port: int
    attempt: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def prefix(self) -> str:
        """Of the attempt's keys."""
        return attempt_prefix(self.attempt)

    def env(self) -> dict[str, str]:
        return {"PA_NPU_STORE": self.address, "PA_NPU_ATTEMPT": str(self.attempt)}


def engine_url(config: Config, port: int) -> str:
    host = config.placement.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def engine_commands(
    config: Config, spec: ModelSpec, platform: Platform, placement: Placement, ports: Sequence[int], key: str
) -> Iterator[Command]:
    for index, port in enumerate(ports):
        command = server_command(config, spec, index, port)
        env = _common_env(config) | {KEY_VARIABLE: key}
        env |= visible_devices(platform.visible_devices_env, placement.engine_devices[index], os.environ)
        yield Command(f"engine-{index}", command.argv, env | command.env, placement.engine_cores[index])


def coordinator_command(config: Config, platform: Platform, store: Store, key: str) -> Command:
    argv = (sys.executable, "-m", "pa_npu.rollout.coordinator", "--config", _config_file(config))
    env = _common_env(config) | store.env() | platform.environment("coordinator") | ({KEY_VARIABLE: key} if key else {})
    return Command("coordinator", argv, env)


def trainer_commands(config: Config, platform: Platform, placement: Placement, store: Store) -> Iterator[Command]:
    """One rank per trainer device. Ranks see all trainer devices and take theirs by LOCAL_RANK, as torchrun has it."""
    world_size = config.trainer.devices
    for rank in range(world_size):
        env = _common_env(config) | store.env() | platform.environment("trainer")
        env |= visible_devices(platform.visible_devices_env, placement.trainer_devices, os.environ)
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
        argv = (sys.executable, "-m", "pa_npu.trainer.main", "--config", _config_file(config))
        yield Command(f"trainer-{rank}", argv, env, placement.trainer_cores[rank])


def _config_file(config: Config) -> str:
    return str(Path(config.run.dir) / "config.yaml")


def _common_env(config: Config) -> dict[str, str]:
    env = dict(os.environ)
    env.pop(KEY_VARIABLE, None)  # for engines and coordinator alone
    env |= {
        "PA_NPU_RUN_DIR": str(Path(config.run.dir).resolve()),
        "PYTHONUNBUFFERED": "1",  # log lines appear when they are written
    }
    env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code leaves a stack in the log
    loopback = _loopback_interface()
    if config.placement.host.startswith("127.") and loopback:
        # without it gloo resolves the machine's name, which fails on machines that do not know their own
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
    return env


def _loopback_interface() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
