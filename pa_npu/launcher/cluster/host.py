"""A node of a Ray cluster: its report before anything starts there, and its host actor, which runs the node's processes.

    launcher ──Ray calls──> host actor ──process tree──> keeper ──> engine or trainer rank

Each node answers for itself (`inspect_node`), the launcher compares (`node_problem`). The launcher
first leaves a token in the run directory, which every node must find there: that is how a directory
is known to be shared.

The actor is an ordinary object, which asks Ray for its address alone. It is told roles and numbers,
never commands or paths, and builds the commands from the run's configuration itself. When its
process ends, however that happens, its keepers end all it started. Arguments and results are plain
JSON values, so that Ray pickles nothing of this package but the class's name.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pa_npu import __version__
from pa_npu.checkpoints.provenance import model_fingerprint
from pa_npu.config.load import load_tree
from pa_npu.config.schema import Config
from pa_npu.errors import BAD_INPUT, PaNpuError, UserError
from pa_npu.launcher.checks.machine import (
    check_ports,
    check_share,
    device_notes,
    resolve_device,
)
from pa_npu.launcher.engine_key import run_key
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process.commands import Command, NodeCommands, Role, Store
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree, TreeProcess
from pa_npu.launcher.trainer_versions import installed_versions, trainer_problems
from pa_npu.platform.base import Platform

TOKEN_FILE = ".nodes"
_TICK_S = 0.05
_LOG_LINES = 20
_CANNOT_START = 127
# How long a look waits for news. Every look that returns is a sign of life.
_LOOK_S = 0.5

# What the launcher's environment decides on every node: it changes results or ends in hangs where
# nodes differ.
FORWARDED = (
    "PA_NPU_",
    "VLLM_",
    "NCCL_",
    "HCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "TOKENIZERS_",
    "HF_",
)
_NEVER_FORWARDED = ("VLLM_API_KEY",)


@dataclass(frozen=True)
class NodeReport:
    """problem: what keeps this node from taking part. notes: what is unusual. model: a fingerprint
    of model.path's files.

    address: where the node's processes listen. ports: of its engines, in the order of its share;
    empty where there is a problem.
    """

    host: str
    address: str
    model: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.address if self.host == self.address else f"{self.address} ({self.host})"


def leave_token(config: Config) -> str:
    """Writes a fresh token into run.dir and returns it; called on the launcher's machine."""
    directory = Path(config.run.dir)
    token = secrets.token_hex(8)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / TOKEN_FILE).write_text(token, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"run.dir: {directory} cannot be written ({error.strerror}); choose another run.dir"
        ) from None
    return token


def all_versions() -> dict[str, str]:
    """Returns the versions that must be the same on all nodes."""
    return {"pa_npu": __version__, **installed_versions()}


def inspect_node(
    config: Config, platform: Platform, share: Placement, node: int, token: str
) -> NodeReport:
    """Report on this node; `share` is what the run has on it. The config has this node's address.

    Raises PaNpuError with what keeps it from taking part.
    """
    _check_directory(config, node, token)
    check_ports(config, share.engines, has_store=False)
    model = Path(config.model.path)
    return NodeReport(
        host=socket.gethostname(),
        address=config.placement.address,
        model=model_fingerprint(model) if (model / "config.json").is_file() else "",
        versions=all_versions(),
        notes=[*trainer_problems(platform.name), *device_notes(platform, share)],
    )


def node_problem(report: NodeReport, launcher: NodeReport) -> str | None:
    """Why this node cannot take part beside the launcher's machine, whose report is `own`; one
    line.
    """
    who = f"node {report.name}"
    if report.problem:
        return f"{who}: {report.problem}"
    if line := differing_versions(report.versions, launcher.versions):
        return f"{who}: {line}"
    if report.model != launcher.model:
        return (
            f"{who}: model.path: {report.model or 'not there'}, but {launcher.model or 'none'} on the "
            "launcher's machine; give all nodes the same model"
        )
    return None


def differing_versions(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Returns the first package that a node has in another version than the launcher's machine."""
    for name in sorted(there.keys() | here.keys()):
        there_version = there.get(name, "not installed")
        here_version = here.get(name, "not installed")
        if there_version != here_version:
            return (
                f"{name} is {there_version}, but {here_version} on the launcher's machine; "
                "install the same on all nodes"
            )
    return None


def _check_directory(config: Config, node: int, token: str) -> None:
    directory = Path(config.run.dir)
    try:
        seen = (directory / TOKEN_FILE).read_text(encoding="utf-8")
        probe = directory / f".node-{node}"
        probe.write_text(token, encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run.dir: {directory} is not shared or not writable here ({error.strerror}); use a "
            "directory of all nodes"
        ) from None
    if seen != token:
        raise UserError(
            f"run.dir: {directory} is another directory than the launcher's; use one on a shared "
            "file system"
        )


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the launcher's variables that processes of nodes get.

    No secrets: Ray shows and logs what it is given.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and name not in _NEVER_FORWARDED
    }


class HostActor:
    """The processes of one node.

    `join` first; then `start`, `look`, `stop` in any order, from any thread.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        # of the tree's list; `look` goes without it, so that a stop does not look like a death
        self._lock = threading.Lock()
        self._hurry = False
        self._tree: ProcessTree | None = None
        self._processes: dict[int, TreeProcess] = {}
        self._ended: list[tuple[int, int, list[str]]] = []

    def join(self, order: dict[str, Any]) -> dict[str, Any]:
        """Check this node for a run and make ready to start its processes; returns a NodeReport as
        JSON.

        order: config (the launcher's, as a tree), node, engine (an extra engine's index, or None),
        store (host and port), directory (the launcher's working directory), environment, versions,
        token.
        """
        import ray

        address = str(ray.util.get_node_ip_address())
        try:
            return asdict(self.prepare(order, address))
        except PaNpuError as error:
            return asdict(
                NodeReport(
                    os.uname().nodename, address, versions=all_versions(), problem=str(error)
                )
            )

    def prepare(self, order: dict[str, Any], address: str) -> NodeReport:
        """Raises PaNpuError for what makes this node unfit."""
        if line := differing_versions(all_versions(), order["versions"]):
            # before anything is read that another version might read differently
            raise UserError(line)
        _enter(order["directory"])
        # Ray has put the number of CPUs there that this actor reserves
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(order["environment"])
        config, platform = resolve_device(
            load_tree(order["config"], "the launcher's configuration")
        )
        config = config.model_copy(
            update={"placement": config.placement.model_copy(update={"host": address})}
        )
        share = check_share(config, platform, int(order["node"]), order["engine"])
        report = inspect_node(config, platform, share, int(order["node"]), str(order["token"]))
        store = Store(str(order["store"][0]), int(order["store"][1]))
        commands = NodeCommands(
            config, platform, share, store, int(order["node"]), lambda: run_key(config)
        )
        self.make_ready(Path(config.run.dir) / "logs", commands)
        return replace(report, ports=list(commands.ports.values()))

    def make_ready(self, log_dir: Path, build: Callable[[Role], Command]) -> None:
        """Lets roles be started from here on. build: makes the command of a role."""
        self._tree = ProcessTree(log_dir, self._grace_s, lambda: self._hurry)
        self._tree.build = build

    def start(self, number: int, role: dict[str, Any]) -> None:
        """Start a role; `number` is the launcher's name for this start.

        A failure is told as the process's end.
        """
        assert self._tree
        named = Role(**role)
        try:
            with self._lock:
                self._processes[number] = self._tree.launch(named)
        except UserError as error:
            self._ended.append((number, BAD_INPUT, [str(error)]))
        except (PaNpuError, OSError) as error:
            self._ended.append(
                (number, _CANNOT_START, [f"{named.name} cannot be started: {error}"])
            )

    def look(self) -> list[tuple[int, int, list[str]]]:
        """(number, exit code, last log lines) of what has ended since the last look; waits a moment
        for something to end.
        """
        deadline = time.monotonic() + _LOOK_S
        while not (news := self._news()) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        return news

    def _news(self) -> list[tuple[int, int, list[str]]]:
        for number, process in list(self._processes.items()):
            if (code := process.exit_code) is not None:
                del self._processes[number]
                self._ended.append((number, code, process.last_lines(_LOG_LINES)))
        news = self._ended
        self._ended = []
        return news

    def stop(self, numbers: list[int], at_once: bool = False) -> None:
        """Stop these, gracefully at first unless `at_once`; returns when they and all their
        descendants are gone.
        """
        if self._tree is None:
            return
        chosen = [process for number in numbers if (process := self._processes.get(number))]
        with self._lock:
            if not at_once:
                self._tree.stop(chosen)
            for process in chosen if at_once else ():
                self._tree.kill_one(process)
            self._tree.forget([process for process in chosen if process.exit_code is not None])

    def hurry(self) -> None:
        """A stop under way, and every later one, ends its grace at once."""
        self._hurry = True


def _enter(directory: str) -> None:
    """The launcher's working directory: paths of the configuration and the user's own modules count
    from it.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise UserError(
            f"the launcher's working directory {directory} is not there ({error.strerror}); start "
            "the run in a directory that all nodes share"
        ) from None
