"""`pa-npu join`: add an engine to a running job, keep it until it is asked to leave, and let it finish what it has in flight then.

    pa-npu join HOST:PORT      (the address that the run's launcher prints)

checks     the run's configuration comes from its store; model, interpreter, devices, port and API
           key are checked here
starting   the server loads the model; a signal ends it at once
joined     the roster has it; it gets weights at the next publish and serves from then on
leaving    SIGTERM or SIGINT: the coordinator gives it nothing more and says when nothing is in
           flight (once more: at once)
ended      0: it has left, or the run has ended; 1: the server died, or the coordinator has removed
           it; 2: bad input
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pa_npu import platform as platforms
from pa_npu.config.load import load_tree
from pa_npu.config.schema import Config
from pa_npu.control.channel import BoundedCalls, NoAnswer, StoreChannel, StoreError, connect
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster, Unsigned, claimed_config
from pa_npu.engines.http_server import KEY_FILE, KEY_VARIABLE
from pa_npu.engines.registry import engine_kind
from pa_npu.errors import FAILED, ConfigError, DataError, DeadlineExceeded, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.checks.machine import device_notes
from pa_npu.launcher.checks.model import check_model_files
from pa_npu.launcher.engine_key import checked_key, read_key
from pa_npu.launcher.placement import Placement, available_cores, free_ports, port_problem
from pa_npu.launcher.process.commands import engine_command, engine_url
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import ProcessTree, TreeProcess
from pa_npu.launcher.process.processes import engine_answers
from pa_npu.launcher.process.supervisor import StopSignals, stop_signals
from pa_npu.platform.base import Platform
from pa_npu.telemetry.secrets import HIDDEN

_CONNECT_TIMEOUT_S = 10.0
# The store answers in a millisecond. A host that vanished without a word leaves its clients waiting
# for minutes.
_STORE_TIMEOUT_S = 30.0
_TICK_S = 0.2
_PROBE_EVERY_S = 0.5
_GRACE_S = 5.0
_LOG_LINES = 20
_LOGS = "pa_npu-engines"  # here, if the run directory is not
_KEY_REMEDY = f"export {KEY_VARIABLE} with what the api_key in the directory of {{}} holds"


def join(
    address: tuple[str, int],
    host: str | None,
    devices: tuple[int, ...] | None,
    python: str | None,
) -> int:
    """Checks, starts an engine, joins, stays and leaves; returns the exit code.

    Args:
        address: host and port of the run's store.
        host: address to listen on; None for the one that reaches the store.
        devices: indices of devices, on cpu of cores; None for no choice.
        python: interpreter that has the engine; None for the run's.

    Raises UserError before anything starts.
    """
    run_name = f"the run at {address[0]}:{address[1]}"
    asked = BoundedCalls("store calls", _STORE_TIMEOUT_S)
    roster, config, key = find_run(address, run_name, asked)
    host = host or local_address(*address)
    site = check_site(config, host, devices, python, run_name)
    name = f"joined-{host.replace(':', '_')}-{site.port}"
    command = engine_command(
        site.config, site.spec, site.platform, site.placement, 0, site.port, key
    )
    with (
        Console(site.log_dir / f"{name}.launcher.log") as console,
        stop_signals() as signals,
        ProcessTree(site.log_dir, _GRACE_S, signals.insisted) as tree,
    ):
        for note in site.notes:
            console.print_error(f"note: {note}")
        process = tree.launch(replace(command, name=name))
        url = engine_url(host, site.port)
        return JoinedEngine(
            site.config, roster, process, url, run_name, console, signals, asked
        ).serve()


def find_run(
    address: tuple[str, int], run_name: str, asked: BoundedCalls
) -> tuple[Roster, Config, str]:
    """Roster and configuration of the run whose store is there, and its API key, with which both
    are signed.
    """
    where = ""
    try:
        with _without_traces():
            # whoever listens there may be no store, and say nothing
            store = asked(lambda: connect(*address, _CONNECT_TIMEOUT_S))
            channel = StoreChannel(store, ROSTER_PREFIX)
            key, where = find_key(
                asked(lambda: claimed_config(channel, _CONNECT_TIMEOUT_S)), run_name
            )
            roster = Roster(channel, key)
            tree = with_environment(asked(lambda: roster.wait_config(_CONNECT_TIMEOUT_S)), run_name)
    except Unsigned:
        raise UserError(
            f"{where}: is not the API key of {run_name}, whose configuration is signed with "
            f"another; {_KEY_REMEDY.format(run_name)}"
        ) from None
    except (DeadlineExceeded, NoAnswer, StoreError) as error:
        raise UserError(
            f"join {address[0]}:{address[1]}: no run of pa_npu answers there ({error}); give the "
            "address that the run's launcher prints"
        ) from None
    config = load_tree(
        tree, f"configuration of {run_name} (is its version of pa_npu another than here?)"
    )
    return roster, config, key


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keeps the C++ stack traces of torch's store off the terminal: what goes wrong with it is said
    in one line of ours.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


@dataclass(frozen=True)
class Site:
    """A place for an engine. config: the run's, with this machine's address, interpreter and
    directory in it.
    """

    config: Config
    spec: ModelSpec
    platform: Platform
    placement: Placement
    port: int
    log_dir: Path
    notes: list[str] = field(default_factory=list)


def check_site(
    config: Config, host: str, devices: tuple[int, ...] | None, python: str | None, run_name: str
) -> Site:
    """Model, interpreter, device, address and port; raises UserError at the first that is wrong.
    python: None is the run's.
    """
    if not config.rollout.has_engines:
        raise ConfigError(
            f"rollout.engines: 0: {run_name} trains rows of data, and no engine can join it"
        )
    model = Path(config.model.path)
    if not model.is_dir():
        raise DataError(
            f"model.path: {model} of {run_name} is not a directory on this machine; put the model "
            "there, or mount the file system that has it"
        )
    run_dir = Path(config.run.dir)
    log_dir = run_dir / "logs" if run_dir.is_dir() else Path(_LOGS).resolve()
    config = config.model_copy(
        update={
            "run": config.run.model_copy(
                update={"dir": str(run_dir if run_dir.is_dir() else log_dir)}
            ),
            "placement": config.placement.model_copy(update={"host": host}),
            "rollout": config.rollout.model_copy(
                update={"python": python or config.rollout.python}
            ),
        }
    )
    platform = platforms.get(config.run.device)
    spec = check_model_files(config)
    try:
        engine_kind(config.rollout.backend).check(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (here with --python)") from None
    placement = _place(config, platform, devices)
    return Site(
        config,
        spec,
        platform,
        placement,
        _free_port(host),
        log_dir,
        device_notes(platform, placement),
    )


def _place(config: Config, platform: Platform, devices: tuple[int, ...] | None) -> Placement:
    wanted = config.rollout.tensor_parallel
    cores: Sequence[int] | None = (
        available_cores() if platform.visible_devices_env is None else None
    )
    if devices is None and cores is None:
        raise UserError(
            f"--devices: an engine on {platform.name} needs {wanted} (rollout.tensor_parallel) "
            "that nobody uses; name them, for example --devices "
            f"{','.join(map(str, range(wanted)))}"
        )
    if devices is None:
        return Placement((tuple(range(wanted)),), (), ((),), (), engines=(0,))
    available = platform.device_count() if cores is None else len(cores)
    if len(set(devices)) != wanted or len(devices) != wanted:
        raise UserError(
            f"--devices: {','.join(map(str, devices))} are not {wanted} different ones; give "
            "rollout.tensor_parallel of them"
        )
    if max(devices) >= available:
        raise UserError(
            f"--devices: {max(devices)} is not here; there are {available}, numbered from 0"
        )
    pinned = tuple(cores[index] for index in devices) if cores is not None else ()
    return Placement((devices,), (), (pinned,), (), engines=(0,))


def _free_port(host: str) -> int:
    if problem := port_problem(host, 0):
        raise UserError(
            f"--host: cannot listen on {host} ({problem}); use an address of this machine"
        )
    if host in ("0.0.0.0", "::"):
        raise UserError(
            f"--host: {host} is no address that the coordinator can reach; use one of this machine"
        )
    return free_ports(host, 1)[0]


def local_address(host: str, port: int) -> str:
    """Returns the address of this machine from which the store's is reached."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"join: {host}:{port} is not reachable any more ({error.strerror or error})"
        ) from None


def find_key(claimed: Mapping[str, Any], run_name: str) -> tuple[str, str]:
    """Returns the run's API key, and where it was found. claimed: a configuration that nobody has
    vouched for yet.
    """
    remedy = _KEY_REMEDY.format(run_name)
    if key := os.environ.get(KEY_VARIABLE, ""):
        return checked_key(key, KEY_VARIABLE), KEY_VARIABLE
    run = section if isinstance(section := claimed.get("run"), dict) else {}
    file = Path(str(run.get("dir") or "")) / KEY_FILE
    if not file.is_file():
        raise UserError(f"API key: it is neither in {KEY_VARIABLE} nor in {file}; {remedy}")
    if file.stat().st_uid not in (os.geteuid(), 0):
        raise UserError(f"API key: {file}, which {run_name} names, is another user's; {remedy}")
    return read_key(file, "API key", remedy), str(file)


def with_environment(tree: dict[str, Any], run_name: str) -> dict[str, Any]:
    """Returns the tree with the engines' environment and secret arguments.

    The run's store does not hold these. They come from the run directory if it is on this machine;
    otherwise the variables come from this process's environment. Raises UserError without either.
    """
    rollout = tree["rollout"]
    if not any(HIDDEN in value for value in (*rollout["env"].values(), *rollout["extra_args"])):
        return tree
    file = Path(tree["run"]["dir"]) / "config.yaml"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        whole = yaml.safe_load(file.read_text(encoding="utf-8"))["rollout"]
        return {
            **tree,
            "rollout": {
                **rollout,
                "env": dict(whole["env"]),
                "extra_args": list(whole["extra_args"]),
            },
        }
    missing = [name for name in rollout["env"] if name not in os.environ]
    if missing or any(HIDDEN in argument for argument in rollout["extra_args"]):
        unknown = "what is secret in rollout.extra_args"
        remedy = "mount"
        if missing:
            names = ", ".join(missing)
            unknown = f"{names} of rollout.env"
            remedy = f"export {names} here, or mount"
        raise UserError(
            f"join: the store of {run_name} does not hold {unknown}, and {file} cannot be read here; "
            f"{remedy} it"
        )
    return {
        **tree,
        "rollout": {**rollout, "env": {name: os.environ[name] for name in rollout["env"]}},
    }


@dataclass
class JoinedEngine:
    """One engine that has been started here, from its start to its end."""

    config: Config
    roster: Roster
    process: TreeProcess
    url: str
    run_name: str
    console: Console
    signals: StopSignals
    asked: BoundedCalls

    def serve(self) -> int:
        """Returns the exit code; the server still runs then, unless it has died."""
        try:
            self._until_ready()
            return self._until_asked()
        except _Ended as end:
            return end.code
        except StoreError:
            self.console.print_line(f"{self.run_name} has ended; stopping {self.url}")
            return 0
        except NoAnswer as error:
            self.console.print_error(
                f"failed: the store of {self.run_name}: {error}; stopping {self.url}"
            )
            return FAILED

    def _until_ready(self) -> None:
        began = time.monotonic()
        timeout_s = self.config.run.startup_timeout_s
        self.console.print_line(
            f"starting an engine for {self.run_name} at {self.url}; log: {self.process.log}"
        )
        while not engine_answers(self.url):
            self._check_server()
            self.asked(self.roster.is_open)
            if self.signals.received:
                self.console.print_line("stopped before it has joined")
                raise _Ended(0)
            if time.monotonic() - began > timeout_s:
                self._show_log(
                    f"the engine is not ready after {timeout_s:g} s (run.startup_timeout_s)"
                )
                raise _Ended(FAILED)
            time.sleep(_PROBE_EVERY_S)
        self.console.print_line(f"ready after {time.monotonic() - began:.0f} s")

    def _until_asked(self) -> int:
        index = self.asked(lambda: self.roster.announce(self.url, restarts=False))
        self.console.print_line(
            f"joined as engine {index}: it serves from the next publish on; SIGTERM or Ctrl-C lets "
            "it leave"
        )
        while not self.signals.received:
            time.sleep(_TICK_S)
            self._check_server(index)
            if self._has_left(index):
                self._check_server(index)  # whose death the coordinator may have found first
                self._show_log(
                    "the coordinator has removed this engine, which died, hung or did not answer"
                )
                return FAILED
        return self._leave(index)

    def _leave(self, index: int) -> int:
        began = time.monotonic()
        deadline_s = self.config.deadlines.request_limit_s + self.config.publish.timeout_s
        number = self.signals.received[0]
        self.console.print_line(
            f"{signal.Signals(number).name}: leaving after what is in flight, within "
            f"{deadline_s:g} s (once more: at once)"
        )
        self.asked(lambda: self.roster.ask_leave(index))
        while not self._has_left(index):
            self._check_server(index)
            if self.signals.insisted():
                self.console.print_line(
                    "stopping at once; other engines generate what was in flight here"
                )
                return 128 + number
            if time.monotonic() - began > deadline_s:
                self.console.print_error(
                    f"failed: the coordinator has not let this engine go within {deadline_s:g} s "
                    "(rollout.request_timeout_s + publish.timeout_s); stopping it all the same"
                )
                return FAILED
            time.sleep(_TICK_S)
        self.console.print_line(
            f"has left after {time.monotonic() - began:.1f} s; stopping {self.url}"
        )
        return 0

    def _check_server(self, index: int | None = None) -> None:
        if self.process.exit_code is None:
            return
        if index is not None:  # the coordinator need not find out by itself
            self.asked(lambda: self.roster.ask_leave(index))
        self._show_log(f"the engine's server ended: {self.process.describe_end()}")
        raise _Ended(FAILED)

    def _show_log(self, reason: str) -> None:
        self.console.print_error(f"failed: {reason}; last lines of {self.process.log}:")
        for line in self.process.last_lines(_LOG_LINES):
            self.console.print_error(f"    {line}")

    def _has_left(self, index: int) -> bool:
        return self.asked(lambda: self.roster.has_left(index))


@dataclass
class _Ended(Exception):
    """The engine's life is over, and why has been said."""

    code: int
