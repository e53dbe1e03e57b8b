"""A launcher on a Ray cluster in a process of its own, with small stand-in commands in place of engines and trainers.

What a role does is the Python code in DIRECTORY/<role>.py at the time it starts. Run it with
`python -m tests.helpers.ray_launcher SETTINGS`; a process of its own, because a launcher adopts and
kills all its descendants, which must not be another's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pa_npu.launcher.cluster.host import HostActor, NodeReport
from pa_npu.launcher.process.commands import Command

ROOT = Path(__file__).parents[2]
GRACE_S = 1.0
# longer than any test; its end kills it
UP_AND_SLEEP = "up.write_text(f'{os.getpid()} {where}'); time.sleep(900)"


class StandInHost(HostActor):
    """A host whose roles are the stand-ins, and which checks nothing."""

    def __init__(self) -> None:
        super().__init__(GRACE_S)

    def prepare(self, order: dict[str, Any], address: str) -> NodeReport:
        directory = Path(order["config"]["run"]["dir"])
        self.make_ready(directory / "logs", lambda role: command(directory, role.name, address))
        report = NodeReport(address, address, versions=dict(order["versions"]), ports=[7])
        problem = directory / "problem"
        return (
            NodeReport(address, address, problem=problem.read_text())
            if problem.exists()
            else report
        )


def command(directory: Path, name: str, address: str) -> Command:
    env = {**os.environ, "WHERE": address}
    return Command(name, (sys.executable, "-S", "-u", str(directory / f"{name}.py")), env)


@dataclass
class RayLauncher:
    """From the test's side.

    By default: engine-0 and trainer-1 on the second node, the coordinator beside the launcher.
    """

    directory: Path
    address: str
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None

    def role(self, name: str, code: str) -> None:
        """Sets the work of `name` from its next start on.

        In the code, `up` says that it has started, and `where` is its node.
        """
        up = str(self.directory / f"{name}.up")
        text = (
            "import os, time, pathlib\nwhere = os.environ['WHERE']\nup = "
            f"pathlib.Path({up!r})\n{code}\n"
        )
        partial = self.directory / f"{name}.partial"
        partial.write_text(text)
        partial.replace(self.directory / f"{name}.py")

    def start(self, **sections: dict[str, Any]) -> RayLauncher:
        tree: dict[str, dict[str, Any]] = {
            "run": {
                "dir": str(self.directory),
                "device": "cpu",
                "restarts": 0,
                "startup_timeout_s": 60.0,
            },
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"engines": 1},
            "trainer": {"devices": 2},
            "placement": {
                "cluster": "ray",
                "nnodes": 2,
                "devices_per_node": 2,
                "devices": [2, 0, 3],
            },
        }
        for section, keys in sections.items():
            tree[section] |= keys
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.address}
        with (self.directory / "out").open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.ray_launcher", json.dumps(tree)],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    @property
    def output(self) -> str:
        return (self.directory / "out").read_text()

    def wait_for(
        self, condition: Callable[[], bool], description: str, timeout_s: float = 90.0
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {timeout_s} s: {description}\n{self.output}"
            )
            time.sleep(0.02)

    def wait_up(self, *names: str) -> dict[str, tuple[int, str]]:
        """Until these roles have started: (process id, node).

        They are forgotten, so that another start can be awaited.
        """
        files = {name: self.directory / f"{name}.up" for name in names}
        self.wait_for(
            lambda: all(file.exists() and file.read_text() for file in files.values()),
            f"{names} started",
        )
        actual = {}
        for name, file in files.items():
            pid, where = file.read_text().split()
            actual[name] = int(pid), where
            file.unlink()
        return actual

    def code(self, timeout_s: float = 120.0) -> int:
        assert self.popen
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher still runs\n{self.output}") from None

    def close(self) -> None:
        if self.popen and self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(arguments: Sequence[str]) -> int:
    from pa_npu import platform as platforms
    from pa_npu.config.schema import Config
    from pa_npu.control.channel import StoreChannel, connect, host_store
    from pa_npu.control.roster import PREFIX, Roster
    from pa_npu.errors import PaNpuError
    from pa_npu.launcher.cluster.ray_cluster import ray_cluster
    from pa_npu.launcher.cluster.ray_connection import connected
    from pa_npu.launcher.process import supervisor as supervision
    from pa_npu.launcher.process.commands import Startable, Store
    from pa_npu.launcher.process.console import Console
    from pa_npu.launcher.process.process_tree import ProcessTree
    from pa_npu.launcher.process.processes import Awaited
    from pa_npu.launcher.process.recovery import Attempt, Recovery
    from pa_npu.telemetry.timeline import Timeline

    supervision._AFTERMATH_S = 0.05
    config = Config.model_validate(json.loads(arguments[0]))
    directory = Path(config.run.dir)
    logs = directory / "logs"
    try:
        with (
            connected(StandInHost) as connection,
            Console(logs / "launcher.log") as console,
            supervision.stop_signals() as signals,
            ProcessTree(logs, GRACE_S, signals.insisted) as local,
        ):
            server = host_store(connection.address, 0)
            store = Store(connection.address, server.port)
            with ray_cluster(
                config, platforms.get("cpu"), connection, local, store, console, signals
            ) as cluster:
                if cluster is None:
                    return 128 + signals.received[0]

                def attempt(number: int) -> Attempt:
                    if number:
                        cluster.await_nodes()
                    commands: list[Startable] = [
                        command(directory, "coordinator", "launcher"),
                        *cluster.trainers(number),
                    ]
                    ready = Awaited("trainers", (directory / "ready").exists, 60.0, "trainer-0")
                    return Attempt(commands, [ready])

                roster = Roster(StoreChannel(connect(store.host, store.port, 5.0), PREFIX), "")
                for engine in cluster.engines():
                    roster.announce(cluster.engine_url(engine))
                recovery = Recovery(
                    config, cluster.processes, console, roster, attempt, cluster.engine_url
                )
                for engine in cluster.extra_engines():
                    recovery.expect(engine)
                supervisor = supervision.Supervisor(
                    cluster.processes, console, Timeline(None, "launcher"), signals, recovery
                )
                first = attempt(0)
                return supervisor.run(cluster.engines(), first.commands, first.awaited)
    except PaNpuError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
