"""One run from start to end: store, process tree, readiness, supervision, stop, summary.

engines, coordinator and trainer ranks start together (their imports take half a minute)
ready     all engines answer, all pipeline stages have announced their weights
running   the coordinator's progress lines are relayed
done      coordinator and trainers have ended with 0; engines are stopped, the summary is printed
failed    any process ended otherwise: its name, end and last log lines are printed, everything is stopped
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from pa_npu import __version__
from pa_npu.buffer.store import StoreChannel, connect
from pa_npu.config.model_spec import ModelSpec
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError
from pa_npu.launcher.checks import check_surroundings, resolve_device
from pa_npu.launcher.commands import Command, Store, coordinator_command, engine_commands, engine_url, trainer_commands
from pa_npu.launcher.console import Console
from pa_npu.launcher.log_tail import MarkedLines
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process_tree import Process, ProcessTree
from pa_npu.launcher.readiness import Awaited, engine_answers, host_store, trainers_announced
from pa_npu.launcher.run_directory import own_run_directory
from pa_npu.platform.base import Platform
from pa_npu.telemetry.progress import PREFIX, format_duration
from pa_npu.telemetry.summary import summarise
from pa_npu.telemetry.timeline import Timeline, merge, now

FAILED = 1
BAD_INPUT = 2

# Engines need about 2 s to leave on SIGTERM; the whole stop stays below 10 s.
GRACE_S = 5.0
_TICK_S = 0.1
_PROBE_EVERY_S = 0.5
_WAITING_LINE_EVERY_S = 15.0
_LOG_LINES = 20
# Processes that follow a dead one within this time are mentioned, not blamed.
_AFTERMATH_S = 1.0


def run(config: Config) -> int:
    """Check everything, run, and return the exit code. Raises UserError before anything starts."""
    start_s = time.monotonic()
    config, platform = resolve_device(config)
    findings = check_surroundings(config, platform)
    assert platform and findings.spec and findings.placement
    with own_run_directory(config) as run_dir, Console(run_dir / "logs" / "launcher.log") as console:
        console.say(
            f"pa_npu {__version__}: {config.rollout.engines} engines and {config.trainer.devices} trainer ranks "
            f"on {platform.name}; run directory {run_dir}"
        )
        for line in (*findings.counts, *findings.placement.lines()):
            console.say(line)
        for note in findings.notes:
            console.complain(f"note: {note}")
        timeline = Timeline.for_run(run_dir, "launcher", enabled=config.telemetry.timeline)
        with timeline, stop_signals() as signals, ProcessTree(run_dir / "logs", GRACE_S, signals.insisted) as tree:
            server = _host_store(config)  # lives as long as this name
            store = Store(config.placement.host, server.port)
            commands, awaited = plan(config, findings.spec, platform, findings.placement, store)
            supervisor = Supervisor(config, tree, console, timeline, signals)
            code = supervisor.run(commands, awaited)
        finish(config, run_dir, console, code, time.monotonic() - start_s)
        return code


def plan(
    config: Config, spec: ModelSpec, platform: Platform, placement: Placement, store: Store
) -> tuple[list[Command], list[Awaited]]:
    """The commands to start, and what to wait for afterwards."""
    host, ports = config.placement.host, engine_ports(config)
    commands = [
        *engine_commands(config, spec, platform, placement, ports, store),
        coordinator_command(config, platform, [engine_url(config, port) for port in ports], store),
        *trainer_commands(config, platform, placement, store),
    ]
    rollout, trainer = config.rollout, config.trainer
    awaited = [
        Awaited(command.name, partial(engine_answers, host, port), rollout.startup_timeout_s, "rollout", command.name)
        for command, port in zip(commands[: len(ports)], ports, strict=True)
    ]
    channel = StoreChannel(connect(store.host, store.port, trainer.startup_timeout_s))
    announced = partial(trainers_announced, channel, trainer.pipeline_parallel)
    awaited.append(Awaited("trainers", announced, trainer.startup_timeout_s, "trainer", "trainer-0"))
    return commands, awaited


def _host_store(config: Config) -> dist.TCPStore:
    host, port = config.placement.host, config.placement.store_port
    try:
        return host_store(host, port)
    except OSError as error:
        raise ConfigError(
            f"placement.store_port: port {port} of {host} cannot be used ({error.strerror}); "
            f"choose another, or 0 for a free one"
        ) from None


class StopSignals:
    """SIGINT and SIGTERM as a wish to stop; a second one insists on stopping at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def insisted(self) -> bool:
        return len(self.received) > 1

    def record(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    signals = StopSignals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, signals.record) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@dataclass
class _Failure(Exception):
    """The run must end: in words, with the process to show the log of, if one is to blame."""

    reason: str
    process: Process | None = None


class Supervisor:
    """Starts the commands, waits for readiness, relays progress, and ends when the run ends or fails."""

    def __init__(
        self, config: Config, tree: ProcessTree, console: Console, timeline: Timeline, signals: StopSignals
    ) -> None:
        self._config = config
        self._tree = tree
        self._console = console
        self._timeline = timeline
        self._signals = signals
        self._progress: MarkedLines | None = None

    def run(self, commands: Sequence[Command], awaited: Sequence[Awaited]) -> int:
        """Returns the exit code of the run; everything is stopped then."""
        start_s = now()
        try:
            for command in commands:
                process = self._tree.start(command.name, command.argv, command.env, command.cores)
                if command.name == "coordinator":
                    self._progress = MarkedLines(process.log, PREFIX)
            if self._until_ready(awaited) and self._until_done():
                self._timeline.complete("run", start_s, now(), "run")
                self._stop("the run is done")
                return 0
        except _Failure as failure:
            return self._fail(failure)
        number = self._signals.received[0]
        self._stop(f"{signal.Signals(number).name}: stopping (once more: at once)")
        return 128 + number

    def _until_ready(self, awaited: Sequence[Awaited]) -> bool:
        """False when a signal came first."""
        began, said, clock = time.monotonic(), time.monotonic(), now()
        pending, next_probe = list(awaited), 0.0
        while pending:
            if not self._tick():
                return False
            seconds = time.monotonic() - began
            if time.monotonic() < next_probe:
                continue
            for item in [item for item in pending if item.is_ready()]:
                pending.remove(item)
                self._timeline.complete(f"start {item.name}", clock, now(), item.name)
                self._console.say(f"{item.name} ready after {seconds:.0f} s")
            next_probe = time.monotonic() + _PROBE_EVERY_S
            for item in pending:
                if seconds > item.timeout_s:
                    raise _Failure(
                        f"{item.name} not ready after {seconds:.0f} s ({item.section}.startup_timeout_s)",
                        next((process for process in self._tree.processes if process.name == item.process), None),
                    )
            if pending and time.monotonic() - said > _WAITING_LINE_EVERY_S:
                said = time.monotonic()
                self._console.say(f"waiting for {', '.join(item.name for item in pending)} ({seconds:.0f} s)")
        return True

    def _until_done(self) -> bool:
        """Until coordinator and trainers have ended well. Each of them has deadlines on all of its own waits."""
        workers = [process for process in self._tree.processes if not process.name.startswith("engine-")]
        while any(process.exit_code is None for process in workers):
            if not self._tick():
                return False
        return True

    def _tick(self) -> bool:
        """Wait a moment, relay progress, look for dead processes; False when a signal asks to stop."""
        time.sleep(_TICK_S)
        self._relay()
        if self._signals.received:
            return False
        failed = self._failed()
        if failed:
            raise _Failure(f"{failed[0].name} ended: {failed[0].describe_end()}", failed[0])
        return True

    def _failed(self) -> list[Process]:
        """What ended and should not have: engines at all, the others with anything but 0."""
        ended = self._tree.ended()
        return [process for process in ended if process.exit_code != 0 or process.name.startswith("engine-")]

    def _relay(self) -> None:
        for line in self._progress.new() if self._progress else ():
            self._console.say(line)

    def _fail(self, failure: _Failure) -> int:
        self._console.complain(f"failed: {failure.reason}")
        process = failure.process
        if process is not None:
            self._console.complain(f"last lines of {process.log}:")
            for line in process.last_lines(_LOG_LINES):
                self._console.complain(f"    {line}")
        time.sleep(_AFTERMATH_S)
        for other in self._failed():
            if other is not process:
                last = other.last_lines(1)
                self._console.complain(f"also: {other.name} ended: {other.describe_end()}: {last[0] if last else ''}")
        self._stop("stopping the others")
        return BAD_INPUT if process is not None and process.exit_code == BAD_INPUT else FAILED

    def _stop(self, reason: str) -> None:
        self._relay()
        self._console.say(reason)
        began = time.monotonic()
        self._tree.stop()
        self._relay()
        self._console.say(f"all processes ended ({time.monotonic() - began:.1f} s)")


def finish(config: Config, run_dir: Path, console: Console, code: int, seconds: float) -> None:
    """Merge the timeline; after a run that went well, print its summary."""
    if config.telemetry.timeline:
        merge(run_dir)
    if code:
        console.complain(f"logs: {run_dir / 'logs'}")
        return
    try:
        console.say("\n" + summarise(run_dir))
    except DataError as error:
        console.complain(str(error))
    console.say(f"Total time {format_duration(seconds)}")
