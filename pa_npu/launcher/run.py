"""One run from start to end: store, nodes, process tree, readiness, supervision, stop, summary.

nodes     where there are several: the launchers of the others have joined and found nothing wrong (node_head.py)
engines, coordinator and trainer ranks start together (their imports take half a minute)
ready     all engines answer, all pipeline stages have announced their weights
running   the coordinator's progress lines are relayed
done      coordinator and trainers have ended with 0; engines are stopped, the summary is printed
lost      an engine, or coordinator and trainers from the newest checkpoint, are started again (recovery.py)
failed    that does not help: the name, end and last log lines of a process are printed, everything is stopped
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pa_npu import __version__
from pa_npu.checkpoints.provenance import config_tree
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, attempt_prefix, connect
from pa_npu.control.roster import PREFIX as ROSTER_PREFIX
from pa_npu.control.roster import Roster
from pa_npu.errors import ConfigError, DataError
from pa_npu.launcher.addresses import resolve_address
from pa_npu.launcher.checks import Findings, check_engines, check_surroundings, resolve_device
from pa_npu.launcher.engine_key import engine_key, key_file
from pa_npu.launcher.node import TOKEN_FILE, inspect_node, leave_token
from pa_npu.launcher.node_agent import all_versions
from pa_npu.launcher.node_head import NodeTree
from pa_npu.launcher.node_messages import PREFIX as NODES_PREFIX
from pa_npu.launcher.node_messages import Invitation, Joining
from pa_npu.launcher.placement import engine_ports, placement_lines
from pa_npu.launcher.process.commands import (
    Role,
    Startable,
    Store,
    coordinator_command,
    engine_command,
    engine_url,
    trainer_command,
)
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import GRACE_S, ProcessTree
from pa_npu.launcher.process.readiness import Awaited, engine_answers, host_store, trainers_announced
from pa_npu.launcher.process.recovery import Attempt, Recovery
from pa_npu.launcher.process.supervisor import StopSignals, Supervisor, stop_signals
from pa_npu.launcher.resume import resolve_resume
from pa_npu.launcher.run_directory import begin_attempt, own_run_directory
from pa_npu.platform.base import Platform
from pa_npu.publish.transport import Abandonment
from pa_npu.telemetry.progress import format_duration
from pa_npu.telemetry.record_file import attempt
from pa_npu.telemetry.summary import summarise
from pa_npu.telemetry.timeline import MERGED, Timeline, merge


def run(config: Config) -> int:
    """Check everything, run, and return the exit code. Raises UserError before anything starts."""
    start_s = time.monotonic()
    config, platform = resolve_device(config)
    config = resolve_address(config)
    findings = check_surroundings(config, platform)
    assert platform and findings.spec and findings.placement
    key = engine_key(config)
    with own_run_directory(config) as run_dir, Console(run_dir / "logs" / "launcher.log") as console:
        nodes = config.placement.nnodes
        console.say(
            f"pa_npu {__version__}: {config.rollout.engines} engines and {config.trainer.devices} trainer ranks "
            f"on {platform.name}{f', {nodes} nodes' if nodes > 1 else ''}; run directory {run_dir}"
        )
        for line in (*findings.counts, *placement_lines(findings.placements)):
            console.say(line)
        for note in findings.notes:
            console.complain(f"note: {note}")
        timeline = Timeline.for_run(run_dir, "launcher", enabled=config.telemetry.timeline)
        with (
            timeline,
            contextlib.nullcontext() if config.rollout.attach else key_file(run_dir, key),
            stop_signals() as signals,
            ProcessTree(run_dir / "logs", GRACE_S, signals.insisted) as local,
        ):
            if nodes == 1:
                server = _host_store(config)  # lives as long as this name
                plan = Plan(config, findings, platform, server.port, key, console)
                code = supervise(plan, local, timeline, signals)
            else:
                with several_nodes(config, findings, platform, local, console, signals) as (server, tree):
                    plan = Plan(config, findings, platform, server.port, key, console, tree)
                    code = plan.gather(signals) or supervise(plan, tree, timeline, signals)
                    tree.finish(code, "it is done" if code == 0 else f"exit code {code}")
        finish(config, run_dir, console, code, time.monotonic() - start_s)
        return code


def supervise(plan: Plan, tree: ProcessTree | NodeTree, timeline: Timeline, signals: StopSignals) -> int:
    """Start everything and see it through."""
    config, console = plan.config, plan.console
    engines, urls = plan.engines()
    roster = announce(config, plan.store, urls)
    console.say(f"engines can join with: python -m pa_npu.launcher.join --join {plan.store.address}")
    recovery = Recovery(config, tree, console, roster, plan.attempt_again)
    supervisor = Supervisor(tree, console, timeline, signals, recovery)
    first = plan.attempt(config, 0)
    return supervisor.run(engines, first.commands, [*await_engines(config, urls), *first.awaited])


@contextmanager
def several_nodes(
    config: Config, findings: Findings, platform: Platform, local: ProcessTree, console: Console, signals: StopSignals
) -> Iterator[tuple[dist.TCPStore, NodeTree]]:
    """The run's store, and the processes of all nodes, which are told of the run's end when the context is left."""
    assert findings.placement
    token, address = leave_token(config), config.placement.address
    own = Joining(inspect_node(config, platform, findings.placement, 0, token), address, all_versions(), [])
    server = _host_store(config)
    channel = StoreChannel(connect(address, server.port, config.trainer.startup_timeout_s), NODES_PREFIX)
    log_dir = Path(config.run.dir) / "logs"
    try:
        with NodeTree(config.placement, findings.placements, local, log_dir, channel, own, console, signals) as tree:
            tree.invite(Invitation(config_tree(config), own.versions, token))
            yield server, tree
    finally:
        (Path(config.run.dir) / TOKEN_FILE).unlink(missing_ok=True)


def run_engines(config: Config) -> int:
    """Start the engines alone and keep them until a signal, for runs that name them in rollout.attach."""
    config, platform = resolve_device(config)
    assert platform
    spec, placement = check_engines(config, platform)
    directory = Path(f"{config.run.dir}-engines")
    key = engine_key(config)
    ports = engine_ports(config, placement.engines)
    commands = [
        engine_command(config, spec, platform, placement, index, port, key)
        for index, port in zip(placement.engines, ports, strict=True)
    ]
    urls = [engine_url(config.placement.address, port) for port in ports]
    with (
        Console(directory / "logs" / "launcher.log") as console,
        key_file(directory, key) as file,
        stop_signals() as signals,
        ProcessTree(directory / "logs", GRACE_S, signals.insisted) as tree,
    ):
        console.say(f"attach with rollout.attach=[{','.join(urls)}] rollout.key_file={file.resolve()}")
        supervisor = Supervisor(tree, console, Timeline(None, "launcher"), signals)
        return supervisor.run(commands, [], await_engines(config, urls))


@dataclass(frozen=True)
class Plan:
    """How to start engines, and coordinator and trainers as often as it takes. nodes: where there are several."""

    config: Config
    findings: Findings
    platform: Platform
    store_port: int
    key: str
    console: Console
    nodes: NodeTree | None = None

    @property
    def store(self) -> Store:
        return Store(self.config.placement.address, self.store_port)

    def gather(self, signals: StopSignals) -> int:
        """Wait for the other nodes; 0, or the exit code when a signal came first. Raises PaNpuError when one cannot join."""
        assert self.nodes
        return 0 if self.nodes.gather() else 128 + signals.received[0]

    def engines(self) -> tuple[list[Startable], list[str]]:
        """The engines to start, none where running ones are attached, and the URLs of all."""
        config, spec, here = self.config, self.findings.spec, self.findings.placement
        assert spec and here
        if config.rollout.attach:
            return [], list(config.rollout.attach)
        ports = dict(zip(here.engines, engine_ports(config, here.engines), strict=True))
        commands: list[Startable] = []
        urls = []
        for index, node in self._nodes_of([share.engines for share in self.findings.placements]):
            if node == 0:
                commands.append(engine_command(config, spec, self.platform, here, index, ports[index], self.key))
                urls.append(engine_url(config.placement.address, ports[index]))
                continue
            assert self.nodes
            commands.append(Role(node, "engine", index))
            urls.append(self.nodes.engine_url(index))
        return commands, urls

    def attempt(self, config: Config, number: int) -> Attempt:
        """The commands of an attempt that has `config` in the run directory."""
        store, trainer, here = replace(self.store, attempt=number), config.trainer, self.findings.placement
        assert here
        channel = StoreChannel(connect(store.host, store.port, trainer.startup_timeout_s), store.prefix)
        announced = partial(trainers_announced, channel, trainer.pipeline_parallel)
        commands: list[Startable] = [coordinator_command(config, self.platform, store, self.key)]
        for rank, node in self._nodes_of([share.ranks for share in self.findings.placements]):
            if node == 0:
                commands.append(trainer_command(config, self.platform, here, store, rank))
            else:
                commands.append(Role(node, "trainer", rank, number))
        return Attempt(commands, [Awaited("trainers", announced, trainer.startup_timeout_s, "trainer", "trainer-0")])

    def attempt_again(self, number: int) -> Attempt:
        """From the newest checkpoint of the run, or where it began if it has none. Raises Failure where a node is missing."""
        # an engine may still wait for trainers that are gone
        last = attempt_prefix(number - 1).rstrip("/")
        Abandonment(self.store.host, self.store.port, last).declare("coordinator and trainers were started again")
        if self.nodes:
            self.nodes.await_lost()
        config = resolve_resume(self.config, self.console.complain, restart=True)
        begin_attempt(config, self.console.complain)
        return self.attempt(config, number)

    def _nodes_of(self, numbers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """(engine or rank, its node) in order. numbers: of each node."""
        return sorted((number, node) for node, here in enumerate(numbers) for number in here)


def announce(config: Config, store: Store, urls: Sequence[str]) -> Roster:
    """The roster of the run's store, with its engines: those to start, which are started again when they end, or the attached."""
    channel = StoreChannel(connect(store.host, store.port, config.trainer.startup_timeout_s), ROSTER_PREFIX)
    roster = Roster(channel)
    roster.publish_config(_for_joining(config))
    for url in urls:
        roster.announce(url, restarts=not config.rollout.attach)
    return roster


def _for_joining(config: Config) -> dict[str, Any]:
    """The tree for engines that join, from other directories than this one."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    for section, key in (("run", "dir"), ("model", "path"), ("rollout", "python"), ("rollout", "key_file")):
        value = tree[section][key]
        if value and (os.path.exists(value) or key == "dir"):  # an interpreter may also be a name on PATH
            tree[section][key] = os.path.abspath(value)
    return tree


def await_engines(config: Config, urls: Sequence[str]) -> list[Awaited]:
    timeout_s = config.rollout.startup_timeout_s
    names = [f"engine-{index}" for index in range(len(urls))]
    return [
        Awaited(name, partial(engine_answers, url), timeout_s, "rollout", name)
        for name, url in zip(names, urls, strict=True)
    ]


def _host_store(config: Config) -> dist.TCPStore:
    host, port = config.placement.address, config.placement.rendezvous_port
    try:
        return host_store(host, port)
    except OSError as error:
        raise ConfigError(
            f"placement.store_port: port {port} of {host} cannot be used ({error.strerror}); "
            f"choose another, or 0 for a free one"
        ) from None


def finish(config: Config, run_dir: Path, console: Console, code: int, seconds: float) -> None:
    """Merge the timeline; after a run that went well, print its summary."""
    if config.telemetry.timeline:
        attempt(run_dir / MERGED, lambda: merge(run_dir))
    if code:
        console.complain(f"logs: {run_dir / 'logs'}")
        return
    try:
        console.say("\n" + summarise(run_dir))
    except DataError as error:
        console.complain(str(error))
    console.say(f"Total time {format_duration(seconds)}")
