"""Checks this machine before an engine starts here for a run that was started elsewhere: one clear line each."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pa_npu import platform as platforms
from pa_npu.config.schema import Config
from pa_npu.control.roster import Roster
from pa_npu.engines.client import KeyRefused
from pa_npu.engines.http_server import KEY_FILE, KEY_VARIABLE
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import ConfigError, DataError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.engine_key import checked_key, read_key
from pa_npu.launcher.placement import Placement, available_cores, free_ports, port_problem
from pa_npu.launcher.run_checks import check_engine_interpreter, check_model_files, device_notes
from pa_npu.platform.base import Platform
from pa_npu.telemetry.secrets import HIDDEN

_CONNECT_TIMEOUT_S = 10.0
_ENGINES_TO_ASK = 3
_LOGS = "pa_npu-engines"
KEY_REMEDY = f"export {KEY_VARIABLE} with what the api_key in the directory of {{}} holds"


@dataclass(frozen=True)
class Choices:
    """The user's choices for this engine. python: None is the run's."""

    host: str
    devices: tuple[int, ...] | None
    python: str | None


@dataclass(frozen=True)
class Site:
    """A place for an engine. config: the run's, with this machine's address, interpreter and directory in it."""

    config: Config
    spec: ModelSpec
    platform: Platform
    placement: Placement
    port: int
    log_dir: Path
    notes: list[str] = field(default_factory=list)


def check_site(config: Config, choices: Choices, run_name: str) -> Site:
    """Model, interpreter, device, address and port; raises UserError at the first that is wrong."""
    model = Path(config.model.path)
    if not model.is_dir():
        raise DataError(
            f"model.path: {model} of {run_name} is not a directory on this machine; put the model there, or mount the file "
            f"system that has it"
        )
    run_dir = Path(config.run.dir)
    log_dir = run_dir / "logs" if run_dir.is_dir() else Path(_LOGS).resolve()
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(run_dir if run_dir.is_dir() else log_dir)}),
            "placement": config.placement.model_copy(update={"host": choices.host}),
            "rollout": config.rollout.model_copy(update={"python": choices.python or config.rollout.python}),
        }
    )
    platform = platforms.get(config.run.device)
    spec = check_model_files(config)
    try:
        check_engine_interpreter(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (here with --python)") from None
    placement = _place(config, platform, choices.devices)
    return Site(config, spec, platform, placement, _free_port(choices.host), log_dir, device_notes(platform, placement))


def _place(config: Config, platform: Platform, devices: tuple[int, ...] | None) -> Placement:
    wanted = config.rollout.tensor_parallel
    cores: Sequence[int] | None = available_cores() if platform.visible_devices_env is None else None
    if devices is None and cores is None:
        raise UserError(
            f"--devices: an engine on {platform.name} needs {wanted} (rollout.tensor_parallel) that nobody uses; name them, for "
            f"example --devices {','.join(map(str, range(wanted)))}"
        )
    if devices is None:
        return Placement((tuple(range(wanted)),), (), ((),), (), engines=(0,))
    available = platform.device_count() if cores is None else len(cores)
    if len(set(devices)) != wanted or len(devices) != wanted:
        raise UserError(
            f"--devices: {','.join(map(str, devices))} are not {wanted} different ones; give rollout.tensor_parallel of them"
        )
    if max(devices) >= available:
        raise UserError(f"--devices: {max(devices)} is not here; there are {available}, numbered from 0")
    pinned = tuple(cores[index] for index in devices) if cores is not None else ()
    return Placement((devices,), (), (pinned,), (), engines=(0,))


def _free_port(host: str) -> int:
    if problem := port_problem(host, 0):
        raise UserError(f"--host: cannot listen on {host} ({problem}); use an address of this machine")
    if host in ("0.0.0.0", "::"):
        raise UserError(f"--host: {host} is no address that the coordinator can reach; use one of this machine")
    return free_ports(host, 1)[0]


def local_address(host: str, port: int) -> str:
    """The address of this machine from which the store's is reached."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UserError(f"join: {host}:{port} is not reachable any more ({error.strerror or error})") from None


def find_key(claimed: Mapping[str, Any], run_name: str) -> tuple[str, str]:
    """The run's API key, and where it was found. claimed: a configuration that nobody has vouched for yet."""
    remedy = KEY_REMEDY.format(run_name)
    if key := os.environ.get(KEY_VARIABLE, ""):
        return checked_key(key, KEY_VARIABLE), KEY_VARIABLE
    run = section if isinstance(section := claimed.get("run"), dict) else {}
    file = Path(str(run.get("dir") or "")) / KEY_FILE
    if not file.is_file():
        raise UserError(f"API key: it is neither in {KEY_VARIABLE} nor in {file}; {remedy}")
    if file.stat().st_uid not in (os.geteuid(), 0):
        raise UserError(f"API key: {file}, which {run_name} names, is another user's; {remedy}")
    return read_key(file, "API key", remedy), str(file)


def check_key(config: Config, roster: Roster, key: str, where: str, run_name: str) -> None:
    """Raises UserError where an engine of the run refuses the API key."""
    for entry in roster.entries()[:_ENGINES_TO_ASK]:
        try:
            engine_kind(config.rollout.backend).served_model(entry.url, key)
        except KeyRefused:
            raise UserError(
                f"{where}: the engine {entry.url} of {run_name} refuses this API key; {KEY_REMEDY.format(run_name)}"
            ) from None
        except (OSError, ValueError, LookupError, TypeError):
            continue  # it is starting, or has gone: another one may answer
        break


def with_environment(tree: dict[str, Any], run_name: str) -> dict[str, Any]:
    """The tree with what the run's store does not hold: the environment of engines, and secret arguments of theirs.

    They come from the run directory where it is on this machine, else the variables from this process's environment.
    """
    rollout = tree["rollout"]
    if not any(HIDDEN in value for value in (*rollout["env"].values(), *rollout["extra_args"])):
        return tree
    file = Path(tree["run"]["dir"]) / "config.yaml"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        found = yaml.safe_load(file.read_text(encoding="utf-8"))["rollout"]
        return {**tree, "rollout": {**rollout, "env": dict(found["env"]), "extra_args": list(found["extra_args"])}}
    missing = [name for name in rollout["env"] if name not in os.environ]
    if missing or any(HIDDEN in argument for argument in rollout["extra_args"]):
        what = f"{', '.join(missing)} of rollout.env" if missing else "what is secret in rollout.extra_args"
        remedy = f"export {', '.join(missing)} here, or mount" if missing else "mount"
        raise UserError(
            f"join: the store of {run_name} does not hold {what}, and {file} cannot be read here; {remedy} it"
        )
    return {**tree, "rollout": {**rollout, "env": {name: os.environ[name] for name in rollout["env"]}}}
