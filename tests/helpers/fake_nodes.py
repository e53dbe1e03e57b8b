"""Launchers of several nodes in processes of their own, with small fake commands in place of engines and trainers.

Each is forked, because a launcher adopts and kills all its descendants, which must not be another's. What a role does is the
Python code in DIRECTORY/<role>.py at the time it starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.errors import PaNpuError
from pa_npu.launcher.node import NodeReport
from pa_npu.launcher.node_agent import Agent
from pa_npu.launcher.node_head import NodeTree
from pa_npu.launcher.node_link import HeadLink
from pa_npu.launcher.node_messages import PREFIX, Invitation, Joining
from pa_npu.launcher.placement import Placement, free_ports
from pa_npu.launcher.process.commands import Command, Role, Startable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import ProcessTree
from pa_npu.launcher.process.readiness import Awaited, host_store
from pa_npu.launcher.process.recovery import Attempt, Recovery
from pa_npu.launcher.process.supervisor import Supervisor, stop_signals
from pa_npu.telemetry.timeline import Timeline

HOST = "127.0.0.1"
VERSIONS = {"pa_npu": "1"}
GRACE_S = 1.0
_fork = multiprocessing.get_context("fork")


@dataclass
class Cluster:
    """Two nodes: the coordinator and trainer-0 on the head, engine-0 and trainer-1 on node 1."""

    directory: Path
    node_timeout_s: float = 30.0  # after which the head takes a node for lost
    silence_s: float = 30.0  # after which an agent takes the head for lost
    join_timeout_s: float = 20.0
    restarts: int = 0
    launchers: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.port,) = free_ports(HOST, 1)

    def role(self, name: str, code: str) -> None:
        """What `name` does from its next start on. In the code, `up` says that it has started."""
        text = f"import os, time, pathlib\nup = pathlib.Path({str(self.directory)!r}, {name!r} + '.up')\n{code}\n"
        partial = self.directory / f"{name}.partial"
        partial.write_text(text)
        partial.replace(self.directory / f"{name}.py")

    def head(self) -> BaseProcess:
        return self._start("head", lambda: _head(self))

    def agent(self, problem: str = "", versions: dict[str, str] | None = None) -> BaseProcess:
        return self._start("agent", lambda: _agent(self, problem, versions or VERSIONS))

    def output(self, name: str = "launcher") -> str:
        file = self.directory / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.output()}"
            time.sleep(0.01)

    def wait_up(self, *names: str) -> dict[str, int]:
        """Until these roles have started; their process ids. They are forgotten, so that another start can be awaited."""
        files = {name: self.directory / f"{name}.up" for name in names}
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files.values()), f"{names} started")
        pids = {name: int(file.read_text()) for name, file in files.items()}
        for file in files.values():
            file.unlink()
        return pids

    def code_of(self, launcher: BaseProcess, timeout_s: float = 20.0) -> int:
        launcher.join(timeout_s)
        assert launcher.exitcode is not None, f"{launcher.name} still runs\n{self.output()}"
        return launcher.exitcode

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.is_alive():
                launcher.kill()
            launcher.join(5)

    def config(self) -> Config:
        return Config.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": "t"},
                "run": {"dir": str(self.directory), "restarts": self.restarts},
                "trainer": {"devices": 2},
                "placement": {
                    "nnodes": 2,
                    "devices_per_node": 2,
                    "join_timeout_s": self.join_timeout_s,
                },
            }
        )

    def command(self, name: str) -> Command:
        return Command(name, (sys.executable, "-S", "-u", str(self.directory / f"{name}.py")), dict(os.environ))

    def _start(self, name: str, main: Callable[[], int]) -> BaseProcess:
        process = _fork.Process(target=_run, args=(main,), name=name)
        process.start()
        self.launchers.append(process)
        return process


UP_AND_SLEEP = "up.write_text(str(os.getpid())); time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _run(main: Callable[[], int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except PaNpuError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    sys.stdout.flush()
    os._exit(code)


def _head(cluster: Cluster) -> int:
    config = cluster.config()
    server = host_store(HOST, cluster.port)
    store = connect(HOST, server.port, 5.0)
    logs = cluster.directory / "logs"
    own = Joining(NodeReport(0, "head", "model"), HOST, VERSIONS, [])
    shares = [Placement((), (0,), (), ((),), (), (0,)), Placement(((0,),), (1,), ((),), ((),), (0,), (1,))]
    with (
        Console(logs / "launcher.log") as console,
        stop_signals() as signals,
        ProcessTree(logs, GRACE_S, signals.insisted) as local,
        NodeTree(
            config.placement.model_copy(update={"node_timeout_s": cluster.node_timeout_s}),
            shares,
            local,
            logs,
            StoreChannel(store, PREFIX),
            own,
            console,
            signals,
        ) as tree,
    ):
        tree.invite(Invitation({}, VERSIONS, "token"))
        if not tree.gather():
            return 128 + signals.received[0]

        def attempt(number: int) -> Attempt:
            if number:
                tree.await_lost()
            commands: list[Startable] = [cluster.command("coordinator"), cluster.command("trainer-0")]
            ready = Awaited("trainers", (cluster.directory / "ready").exists, 20.0, "trainer", "trainer-0")
            return Attempt([*commands, Role(1, "trainer", 1, number)], [ready])

        roster = Roster(StoreChannel(store, ROSTER_PREFIX))
        roster.announce(tree.engine_url(0))
        supervisor = Supervisor(
            tree, console, Timeline(None, "launcher"), signals, Recovery(config, tree, console, roster, attempt)
        )
        first = attempt(0)
        code = supervisor.run([Role(1, "engine", 0)], first.commands, first.awaited)
        tree.finish(code, "it is done")
        return code


def _agent(cluster: Cluster, problem: str, versions: dict[str, str]) -> int:
    channel = StoreChannel(connect(HOST, cluster.port, 10.0), PREFIX)
    channel.wait("run", 10.0, "the head")
    generation = channel.add("1/launchers", 1)
    report = NodeReport(1, "other", "model", [problem] if problem else [])
    channel.put_json(
        f"1/{generation}/joining", {"report": report.to_json(), "address": HOST, "versions": versions, "ports": [7]}
    )
    logs = cluster.directory / "logs"
    with (
        Console(logs / "launcher-node1.log") as console,
        stop_signals() as signals,
        ProcessTree(logs, GRACE_S, signals.insisted) as tree,
        HeadLink(channel, 1, generation) as link,
    ):
        build = lambda role: cluster.command(role.name)  # noqa: E731
        return Agent(1, build, link, tree, console, signals, cluster.silence_s).run()
