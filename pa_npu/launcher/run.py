"""One run from start to end: store, cluster, process tree, readiness, supervision, stop, summary.

nodes     on a cluster: it has given the run its nodes, and nothing is wrong with them (cluster/)
engines, coordinator and trainer ranks start together (their imports take half a minute)
ready     all engines answer, all pipeline stages have announced their weights
running   the coordinator's progress lines are relayed
done      coordinator and trainers have ended with 0; engines are stopped, the summary is printed
lost      an engine, or coordinator and trainers from the newest checkpoint, are started again
          (process/recovery.py)
failed    that does not help: the name, end and last log lines of a process are printed, everything
          is stopped
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pa_npu import __version__
from pa_npu.checkpoints import directories
from pa_npu.checkpoints.directories import content_problem
from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect, host_store
from pa_npu.control.messages import TRAINERS_RUN_ON
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster, teacher_prefix
from pa_npu.engines.http_server import KEY_VARIABLE
from pa_npu.errors import BAD_INPUT, ConfigError, DataError
from pa_npu.launcher.checks.engines import check_engines
from pa_npu.launcher.checks.machine import resolve_device
from pa_npu.launcher.cluster.cluster import Cluster, local_cluster
from pa_npu.launcher.cluster.ray_cluster import ray_cluster
from pa_npu.launcher.cluster.ray_connection import RayConnection, connected
from pa_npu.launcher.engine_key import engine_key, key_file, run_key_file
from pa_npu.launcher.machine_limits import busy_note
from pa_npu.launcher.placement import placement_lines
from pa_npu.launcher.process.commands import Startable, Store, coordinator_command
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree
from pa_npu.launcher.process.processes import Awaited, engine_answers, trainers_announced
from pa_npu.launcher.process.recovery import Attempt, Recovery, StartedTeacher
from pa_npu.launcher.process.supervisor import (
    EarlyEndRequest,
    StopSignals,
    Supervisor,
    stop_signals,
)
from pa_npu.launcher.run_checks import check_surroundings, settle_places
from pa_npu.launcher.run_directory import (
    begin_attempt,
    checkpoints_directory,
    hint_to_continue,
    own_run_directory,
    resolve_resume,
)
from pa_npu.planning.publish import publishers_of
from pa_npu.platform.base import Platform
from pa_npu.telemetry.chrome_trace import MERGED, merge
from pa_npu.telemetry.progress import format_duration
from pa_npu.telemetry.records import attempt
from pa_npu.telemetry.run_end import RunEnd, record_end, record_engines, recorded_begin
from pa_npu.telemetry.run_summary import summarise
from pa_npu.telemetry.secrets import HIDDEN, Secrets
from pa_npu.telemetry.timeline import Timeline, now
from pa_npu.weight_transfer.transport import Abandonment


def run(config: Config, *, ends_early: bool = False) -> int:
    """Check everything, run, and return the exit code. Raises UserError before anything starts.

    ends_early: the first SIGINT lets the run end after its iteration, with a checkpoint and an
    export, instead of stopping it.
    """
    config, platform = resolve_device(config)
    if config.placement.cluster == "local":
        return _run(config, platform, None, ends_early)
    with connected() as connection:
        placement = config.placement.model_copy(
            update={"host": config.placement.host or connection.address}
        )
        return _run(
            config.model_copy(update={"placement": placement}), platform, connection, ends_early
        )


def _run(
    config: Config, platform: Platform, connection: RayConnection | None, ends_early: bool
) -> int:
    """connection: to the Ray cluster that engines and trainers run on; None where that is this
    machine alone.
    """
    start_s = time.monotonic()
    findings = check_surroundings(config, platform)
    assert findings.spec
    config = settle_places(config, findings)
    key = engine_key(config)
    with (
        own_run_directory(config) as run_dir,
        Console(run_dir / "logs" / "launcher.log") as console,
    ):
        nodes = config.placement.nnodes
        engines = (
            f"{counted(config.rollout.engines, 'engine')} and "
            if config.rollout.has_engines
            else ""
        )
        if config.teacher_engines:
            of_teachers = counted(len(config.teacher_engines), "engine")
            engines = f"{engines}{of_teachers} of teachers and "
        console.print_line(
            f"pa_npu {__version__}: {engines}{counted(config.trainer.devices, 'trainer rank')} "
            f"on {platform.name}{f', {nodes} nodes' if nodes > 1 else ''}; run directory {run_dir}"
        )
        for line in (*findings.counts, *placement_lines(findings.placements)):
            console.print_line(line)
        for note in findings.notes:
            console.print_error(f"note: {note}")
        timeline = Timeline.for_run(run_dir, "launcher")
        begun_s = now()
        with (
            timeline,
            recorded_begin(timeline),
            run_key_file(config, run_dir, key),
            stop_signals() as signals,
            ProcessTree(run_dir / "logs", GRACE_S, signals.insisted) as local,
        ):
            server = _host_store(config)  # lives as long as this name
            store = Store(config.placement.address, server.port)
            opened: AbstractContextManager[Cluster | None]
            if connection is None:
                assert findings.placement
                opened = nullcontext(
                    local_cluster(config, platform, findings.placement, local, key, store)
                )
            else:
                opened = ray_cluster(config, platform, connection, local, store, console, signals)
            with opened as cluster:
                if cluster is None:  # a signal came before all nodes were there
                    number = signals.received[0]
                    record_end(timeline, begun_s, RunEnd("stopped", signal.Signals(number).name))
                    code = 128 + number
                else:
                    early_end = EarlyEndRequest() if ends_early else None
                    plan = Plan(config, platform, cluster, store, key, console, early_end)
                    code = supervise(plan, timeline, signals)
        finish(config, run_dir, console, code, time.monotonic() - start_s)
        return code


def supervise(plan: Plan, timeline: Timeline, signals: StopSignals) -> int:
    """Start everything and see it through."""
    config = plan.config
    console = plan.console
    cluster = plan.cluster
    engines = cluster.engines()
    urls = [cluster.engine_url(engine) for engine in engines] or list(config.rollout.attach)
    record_engines(timeline, urls)
    roster = announce(config, plan.store, urls, plan.key)
    if config.rollout.has_engines:
        console.print_line(f"engines can join with: pa-npu join {plan.store.address}")
    teachers = announce_teachers(config, plan)
    recovery = Recovery(
        config=config,
        tree=cluster.processes,
        console=console,
        roster=roster,
        attempt=plan.attempt_again,
        url_of=cluster.engine_url,
        progress=plan.newest_checkpoint,
        damaged=plan.is_damaged,
    )
    for engine in cluster.extra_engines():
        recovery.expect(engine)
    supervisor = Supervisor(cluster.processes, console, timeline, signals, recovery, plan.early_end)
    first = plan.attempt(config, 0)
    awaited = [*await_engines(config, urls), *await_teachers(plan), *first.awaited]
    return supervisor.run(engines, first.commands, awaited, teachers)


def run_engines(config: Config) -> int:
    """Start the engines alone and keep them until a signal, for runs that name them in
    rollout.attach.
    """
    config, platform = resolve_device(config)
    placement = check_engines(config, platform)
    directory = Path(f"{config.run.dir}-engines")
    key = engine_key(config)
    with (
        Console(directory / "logs" / "launcher.log") as console,
        key_file(directory, key) as file,
        stop_signals() as signals,
        ProcessTree(directory / "logs", GRACE_S, signals.insisted) as tree,
    ):
        cluster = local_cluster(config, platform, placement, tree, key)
        engines = cluster.engines()
        urls = [cluster.engine_url(engine) for engine in engines]
        console.print_line(
            f"attach with rollout.attach=[{','.join(urls)}] and {KEY_VARIABLE}=$(cat "
            f"{file.resolve()}) in the environment"
        )
        supervisor = Supervisor(tree, console, Timeline(None, "launcher"), signals)
        return supervisor.run(engines, [], await_engines(config, urls))


@dataclass(frozen=True)
class Plan:
    """Starts coordinator and trainers, as often as it takes."""

    config: Config
    platform: Platform
    cluster: Cluster
    store: Store
    key: str
    console: Console
    early_end: EarlyEndRequest | None = None
    # checkpoints, and what is wrong with their content
    damaged: dict[Path, str] = field(default_factory=dict)

    def attempt(self, config: Config, number: int) -> Attempt:
        """Returns the commands of an attempt that has `config` in the run directory."""
        store = replace(self.store, attempt=number)
        limit_s = config.run.startup_timeout_s
        channel = StoreChannel(connect(store.host, store.port, limit_s), store.prefix)
        if self.early_end is not None:
            self.early_end.attempt_begins(channel)
        announced = partial(trainers_announced, channel, publishers_of(config))
        if not config.rollout.has_engines:
            announced = partial(TRAINERS_RUN_ON.exists, channel)
        coordinator = coordinator_command(config, self.platform, store, self.key)
        commands: list[Startable] = [coordinator, *self.cluster.trainers(number)]
        return Attempt(commands, [Awaited("trainers", announced, limit_s, "trainer-0")])

    def attempt_again(self, number: int) -> Attempt:
        """Starts again from the run's newest checkpoint, or from where it began if it has none.

        Raises Failure where a node is missing.
        """
        # an engine may still wait for trainers that are gone
        last = attempt_prefix(number - 1).rstrip("/")
        Abandonment(self.store.host, self.store.port, last).declare(
            "coordinator and trainers were started again"
        )
        self.cluster.await_nodes()
        config = resolve_resume(
            self.config, self.console.print_error, restart=True, damaged=self.damaged
        )
        begin_attempt(config, self.console.print_error)
        return self.attempt(config, number)

    def newest_checkpoint(self) -> Path | None:
        return directories.newest(checkpoints_directory(self.config), self.damaged)[0]

    def is_damaged(self, number: int) -> bool:
        """Returns whether attempt `number` went on with a chosen checkpoint whose content is
        damaged; no later attempt takes that one.
        """
        chosen = (
            self.newest_checkpoint() if number or self.config.checkpoint.resume == "auto" else None
        )
        wrong = content_problem(chosen) if chosen is not None else ""
        if chosen is not None and wrong:
            self.damaged[chosen] = wrong
        return bool(wrong)


def announce(config: Config, store: Store, urls: Sequence[str], key: str) -> Roster:
    """Returns the roster of the run's store, with its engines: those to start, which are started
    again when they end, or the attached.
    """
    channel = StoreChannel(
        connect(store.host, store.port, config.run.startup_timeout_s), ROSTER_PREFIX
    )
    roster = Roster(channel, key)
    roster.publish_config(_for_joining(config))
    for index, url in enumerate(urls):
        roster.announce(
            url, restarts=not config.rollout.attach, shared=config.devices.is_shared(index)
        )
    return roster


def announce_teachers(config: Config, plan: Plan) -> list[StartedTeacher]:
    """Returns the rosters of the run's store with the engines of teachers, one for each teacher."""
    rosters: dict[str, Roster] = {}
    started = []
    for role, name in zip(plan.cluster.teachers(), config.teacher_engines, strict=True):
        if name not in rosters:
            limit_s = config.run.startup_timeout_s
            store = connect(plan.store.host, plan.store.port, limit_s)
            channel = StoreChannel(store, teacher_prefix(config, name))
            rosters[name] = Roster(channel, plan.key)
        index = rosters[name].announce(plan.cluster.engine_url(role))
        started.append(StartedTeacher(role, rosters[name], index))
    return started


def await_teachers(plan: Plan) -> list[Awaited]:
    timeout_s = plan.config.run.startup_timeout_s
    awaited = []
    for role, name in zip(plan.cluster.teachers(), plan.config.teacher_engines, strict=True):
        is_ready = partial(engine_answers, plan.cluster.engine_url(role))
        awaited.append(Awaited(f"{role.name} ({name})", is_ready, timeout_s, role.name))
    return awaited


def _for_joining(config: Config) -> dict[str, Any]:
    """Returns the tree for engines that join, from other directories than this one; whoever reaches
    the store can read it.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    tree["rollout"]["env"] = dict.fromkeys(tree["rollout"]["env"], HIDDEN)
    tree["rollout"]["extra_args"] = Secrets(tree).config["rollout.extra_args"]
    tree["environment"]["options"] = {}
    for section, key in (("run", "dir"), ("model", "path"), ("rollout", "python")):
        value = tree[section][key]
        # an interpreter may also be a name on PATH
        if value and (os.path.exists(value) or key == "dir"):
            tree[section][key] = os.path.abspath(value)
    return tree


def await_engines(config: Config, urls: Sequence[str]) -> list[Awaited]:
    timeout_s = config.run.startup_timeout_s
    names = [f"engine-{index}" for index in range(len(urls))]
    return [
        Awaited(name, partial(engine_answers, url), timeout_s, name)
        for name, url in zip(names, urls, strict=True)
    ]


def _host_store(config: Config) -> dist.TCPStore:
    host = config.placement.address
    port = config.placement.port
    try:
        return host_store(host, port)
    except OSError as error:
        raise ConfigError(
            f"placement.port: port {port} of {host} cannot be used ({error.strerror}); "
            f"choose another, or 0 for a free one"
        ) from None


def finish(config: Config, run_dir: Path, console: Console, code: int, seconds: float) -> None:
    """Merge the timeline; after a run that went well, print its summary.

    What cannot be written changes no exit code.
    """
    attempt(run_dir / MERGED, lambda: merge(run_dir))
    if code:
        console.print_error(f"logs: {run_dir / 'logs'}")
        if code != BAD_INPUT:
            console.print_error(hint_to_continue(config))
        return
    try:
        console.print_line("\n" + summarise(run_dir))
    except DataError as error:
        console.print_error(str(error))
    if note := busy_note():
        console.print_line(f"\n{note}")
    console.print_line(f"Total time {format_duration(seconds)}")
