"""What ends is started again: an engine by itself, coordinator and trainers together from the newest checkpoint.

Engines outlive the coordinator and the trainers: they hold no state of the run but weights, which every attempt of it publishes
anew. The coordinator notices by its own probe what hangs, and asks here for a replacement through the roster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.control.roster import Roster
from pa_npu.errors import BAD_INPUT, MUST_NOT_CONTINUE
from pa_npu.launcher.process.commands import Startable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.processes import Process, Processes
from pa_npu.launcher.process.readiness import Awaited

_LOOK_EVERY_S = 0.5
_LOG_LINES = 5


@dataclass
class Failure(Exception):
    """The run must end: in words, with the process to show the log of, if one is to blame."""

    reason: str
    process: Process | None = None


@dataclass(frozen=True)
class Attempt:
    """Coordinator and trainers of one attempt of the run, and what to wait for until they work."""

    commands: Sequence[Startable]
    awaited: Sequence[Awaited]


@dataclass
class _Engine:
    command: Startable
    index: int
    process: Process
    generation: int = 0


class Recovery:
    """Of one run. attempt: prepares the n-th attempt, from the newest checkpoint; called while no worker runs."""

    def __init__(
        self, config: Config, tree: Processes, console: Console, roster: Roster, attempt: Callable[[int], Attempt]
    ) -> None:
        self._engine_restarts = config.rollout.restarts
        self._run_restarts = config.run.restarts
        self._tree = tree
        self._console = console
        self._roster = roster
        self._attempt = attempt
        self._attempts = 0
        self._engines: list[_Engine] = []
        self._looked_s = time.monotonic()

    def watch(self, command: Startable, index: int, process: Process) -> None:
        """This engine has been started; index: its place in the roster."""
        self._engines.append(_Engine(command, index, process))

    def restart_engines(self) -> None:
        """Start again the engines that ended and those whose replacement is wanted. Raises Failure when one did so too often."""
        for engine in self._engines:
            if engine.process.exit_code is not None:
                self._restart(engine, engine.process.describe_end())
        if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        for engine in self._engines:
            if reason := self._roster.replacement_wanted(engine.index, engine.generation):
                self._restart(engine, reason)

    def next_attempt(self, ended: Sequence[Process]) -> Attempt | None:
        """Stop coordinator and trainers and prepare another attempt, after some of them ended; None when the run must end."""
        hopeless = any(process.exit_code in (BAD_INPUT, MUST_NOT_CONTINUE) for process in ended)
        if hopeless or self._attempts >= self._run_restarts:
            return None
        self._attempts += 1
        failed = ended[0]
        self._console.complain(
            f"{failed.name} ended: {failed.describe_end()}; starting coordinator and trainers again from the newest checkpoint "
            f"({self._attempts} of run.restarts = {self._run_restarts})"
        )
        for line in failed.last_lines(_LOG_LINES):
            self._console.complain(f"    {line}")
        engines = [engine.process for engine in self._engines]
        workers = [process for process in self._tree.processes if process not in engines]
        self._tree.stop(workers)
        self._tree.forget(workers)
        return self._attempt(self._attempts)

    def _restart(self, engine: _Engine, reason: str) -> None:
        name = engine.command.name
        if engine.generation >= self._engine_restarts:
            raise Failure(
                f"{name} ended {engine.generation + 1} times (rollout.restarts), at last: {reason}", engine.process
            )
        self._tree.kill_one(engine.process)
        self._tree.forget([engine.process])
        engine.process = self._tree.launch(engine.command)
        engine.generation += 1
        self._roster.renew(engine.index, engine.generation)
        self._console.complain(
            f"{name}: {reason}; started again ({engine.generation} of rollout.restarts = {self._engine_restarts})"
        )
