"""Starts again what has ended: an engine by itself, coordinator and trainers together from the newest checkpoint.

Engines outlive the coordinator and the trainers: they hold no state of the run but weights, which
every attempt of it publishes anew. The coordinator notices by its own probe what hangs, and asks
here for a replacement through the roster.

    engine runs ──ends, hangs──> started again ──too often (run.restarts), or its node is lost──> left out, others serve
         ^                                                                                                  │
         └────────────── joins as a new one ──the budget allows it, or there is a node again────────────────┘

An engine that comes only when a cluster has free devices (rollout.max_engines) begins as one that
is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pa_npu.config.schema import Config
from pa_npu.control.roster import Roster
from pa_npu.errors import BAD_INPUT, MUST_NOT_CONTINUE
from pa_npu.launcher.process.commands import Startable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.processes import Awaited, Process, Processes

RESTART_WINDOW_S = 3600.0  # starts longer ago no longer count
_LOOK_EVERY_S = 0.5
_LOG_LINES = 5


@dataclass
class Failure(Exception):
    """The run must end: in words, with the process to show the log of, if one is to blame."""

    reason: str
    process: Process | None = None


@dataclass
class RestartBudget:
    """`limit` restarts within `window_s`. A restart that led nowhere counts for longer: until there
    is progress.

    progress: something that changes when the run gets on, the newest checkpoint for example; None
    where time alone counts.
    """

    limit: int
    window_s: float
    progress: Callable[[], object] | None = None
    clock: Callable[[], float] = time.monotonic
    _spent: list[tuple[float, object]] = field(default_factory=list)

    def spent(self) -> int:
        """Restarts that count now."""
        now = self.clock()
        mark = self.progress() if self.progress else None
        self._spent = [
            (when, then)
            for when, then in self._spent
            if now - when < self.window_s or (self.progress is not None and then == mark)
        ]
        return len(self._spent)

    def allows(self) -> bool:
        return self.spent() < self.limit

    def spend(self) -> int:
        """One more restart; returns how many count now."""
        self._spent.append((self.clock(), self.progress() if self.progress else None))
        return self.spent()


@dataclass(frozen=True)
class Attempt:
    """Coordinator and trainers of one attempt of the run, and what to wait for until they work."""

    commands: Sequence[Startable]
    awaited: Sequence[Awaited]


@dataclass(eq=False)
class _EngineProcess:
    """index: its place in the roster, and process: None while it is left out. generation: counts
    its starts at that place.

    last_index: the place that it left, which the coordinator must have let go before the same
    address appears at another.
    shared: it is on a trainer's device. roster: the list that it is in.
    """

    command: Startable
    budget: RestartBudget
    roster: Roster
    shared: bool = False
    index: int | None = None
    process: Process | None = None
    generation: int = 0
    last_index: int | None = None


@dataclass(frozen=True)
class StartedTeacher:
    """An engine of a teacher. roster: of that teacher's engines. index: its place there."""

    command: Startable
    roster: Roster
    index: int


class Recovery:
    """Starts ended processes of a run again. attempt: prepares the n-th attempt, from the newest
    checkpoint; no worker runs then.

    url_of: an engine's URL. progress: changes with every checkpoint that the run writes. damaged:
    whether the n-th attempt was given a checkpoint whose content is damaged, which the next one
    will not take.
    """

    def __init__(
        self,
        config: Config,
        tree: Processes,
        console: Console,
        roster: Roster,
        attempt: Callable[[int], Attempt],
        url_of: Callable[[Startable], str],
        progress: Callable[[], object] = lambda: None,
        damaged: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._config = config
        self._run_budget = RestartBudget(config.run.restarts, RESTART_WINDOW_S, progress)
        self._tree = tree
        self._console = console
        self._roster = roster
        self._attempt = attempt
        self._url_of = url_of
        self._damaged = damaged
        self._attempts = 0
        self._engines: list[_EngineProcess] = []
        self._looked_s = time.monotonic()

    def watch(self, command: Startable, index: int, process: Process) -> None:
        """This engine has been started; index: its place in the roster."""
        shared = self._config.devices.is_shared(index)
        engine = _EngineProcess(
            command, self._engine_budget(), self._roster, shared, index, process
        )
        self._engines.append(engine)

    def watch_teacher(self, teacher: StartedTeacher, process: Process) -> None:
        """This engine of a teacher has been started."""
        engine = _EngineProcess(teacher.command, self._engine_budget(), teacher.roster)
        engine.index = teacher.index
        engine.process = process
        self._engines.append(engine)

    def expect(self, command: Startable) -> None:
        """This engine is started when there is a node for it."""
        self._engines.append(_EngineProcess(command, self._engine_budget(), self._roster))

    def restart_engines(self) -> None:
        """Start again what ended, what the coordinator wants replaced, and what was left out and
        need not be any more.

        Raises Failure when none is left that could serve.
        """
        for engine in self._engines:
            if engine.process is not None and engine.process.exit_code is not None:
                self._restart(engine, engine.process.describe_end())
        if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        for engine in self._engines:
            if engine.index is None:
                self._bring_in(engine)
            elif reason := engine.roster.replacement_wanted(engine.index, engine.generation):
                self._restart(engine, reason)

    def next_attempt(self, ended: Sequence[Process]) -> Attempt | None:
        """Stop coordinator and trainers and prepare another attempt, after some of them ended; None
        when the run must end.
        """
        codes = {process.exit_code for process in ended}
        hopeless = MUST_NOT_CONTINUE in codes or (
            BAD_INPUT in codes and not self._damaged(self._attempts)
        )
        if hopeless or not self._run_budget.allows():
            return None
        count = self._run_budget.spend()
        self._attempts += 1
        failed = ended[0]
        self._console.print_error(
            f"{failed.name} ended: {failed.describe_end()}; starting coordinator and trainers "
            f"again from the newest checkpoint ({count} of run.restarts = {self._run_budget.limit})"
        )
        for line in failed.last_lines(_LOG_LINES):
            self._console.print_error(f"    {line}")
        engines = [engine.process for engine in self._engines]
        workers = [process for process in self._tree.processes if process not in engines]
        self._tree.stop(workers)
        self._tree.forget(workers)
        return self._attempt(self._attempts)

    def _engine_budget(self) -> RestartBudget:
        return RestartBudget(self._config.run.restarts, RESTART_WINDOW_S)

    def _restart(self, engine: _EngineProcess, reason: str) -> None:
        assert engine.process is not None and engine.index is not None
        if engine.roster.is_lent(engine.index):  # its trainer needs the memory until the border
            if engine.process.exit_code is None:
                self._tree.kill_one(engine.process)
            return
        name = engine.command.name
        window_s = engine.budget.window_s
        if not self._tree.can_launch(engine.command):
            if self._others_serve(engine):
                self._leave_out(
                    engine,
                    f"{name}: {reason}; the run goes on without it until there is a node for it",
                )
            return
        if not engine.budget.allows():
            ends = f"ended {engine.budget.spent() + 1} times within {window_s:g} s (run.restarts)"
            if not self._others_serve(engine):
                raise Failure(f"{name} {ends}, at last: {reason}", engine.process)
            self._leave_out(
                engine,
                f"{name} {ends}, at last: {reason}; the others serve without it for some time",
            )
            return
        count = engine.budget.spend()
        self._end(engine)
        engine.process = self._tree.launch(engine.command)
        engine.generation += 1
        engine.roster.renew(engine.index, engine.generation, self._url_of(engine.command))
        self._console.print_error(
            f"{name}: {reason}; started again ({count} of run.restarts = {engine.budget.limit})"
        )

    def _others_serve(self, engine: _EngineProcess) -> bool:
        """Returns whether another engine of the same kind of work runs: one of the launcher's, or
        one that has joined.
        """
        peers = [peer for peer in self._engines if peer.roster is engine.roster]
        local_indices = {peer.index for peer in peers}
        running = any(
            peer.process is not None and peer.process.exit_code is None
            for peer in peers
            if peer is not engine
        )
        return running or any(
            entry.index not in local_indices and not entry.leaving
            for entry in engine.roster.entries()
        )

    def _leave_out(self, engine: _EngineProcess, line: str) -> None:
        assert engine.index is not None
        self._console.print_error(line)
        self._end(engine)
        engine.roster.ask_leave(engine.index)
        engine.last_index = engine.index
        engine.index = None
        engine.process = None
        engine.generation = 0

    def _bring_in(self, engine: _EngineProcess) -> None:
        """At a place of its own in the roster: the coordinator gives it weights at the next
        publish.
        """
        if not self._tree.can_launch(engine.command):
            return
        if engine.last_index is not None and not (
            engine.budget.allows() and engine.roster.has_left(engine.last_index)
        ):
            return
        engine.process = self._tree.launch(engine.command)
        url = self._url_of(engine.command)
        engine.index = engine.roster.announce(url, shared=engine.shared)
        self._console.print_line(
            f"{engine.command.name}: starting at {url}; it serves from a publish on when it is "
            "ready"
        )

    def _end(self, engine: _EngineProcess) -> None:
        assert engine.process is not None
        self._tree.kill_one(engine.process)
        self._tree.forget([engine.process])
