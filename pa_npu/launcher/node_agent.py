"""The launcher of a node that is not the head: it joins the head's run, and starts, watches and stops what the head tells it to.

joining   configuration, versions, devices, paths and ports are reported; the head refuses the run or goes on
serving   roles are started and stopped as ordered, ends are reported
over      the head ended the run, or it is lost, or a signal came: everything on this node is stopped
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pa_npu import __version__
from pa_npu.checkpoints.provenance import config_tree, differences
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, connect
from pa_npu.errors import BAD_INPUT, FAILED, ConfigError, PaNpuError, UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.addresses import resolve_address
from pa_npu.launcher.checks import check_share, resolve_device
from pa_npu.launcher.engine_key import run_key
from pa_npu.launcher.node import NodeReport, inspect_node
from pa_npu.launcher.node_link import HeadLink
from pa_npu.launcher.node_messages import (
    PREFIX,
    End,
    Ended,
    Invitation,
    Joining,
    Leaving,
    NodeError,
    Start,
    parse_order,
)
from pa_npu.launcher.placement import Placement, engine_ports
from pa_npu.launcher.process.commands import Command, Role, Store, engine_command, trainer_command
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import GRACE_S, Process, ProcessTree
from pa_npu.launcher.process.supervisor import StopSignals, signal_name, stop_signals
from pa_npu.launcher.versions import installed_versions
from pa_npu.platform.base import Platform

_TICK_S = 0.05
_LOG_LINES = 20
_CANNOT_START = 127

Build = Callable[[Role], Command]


def run_agent(config: Config) -> int:
    """Take part in the head's run until it is over; returns its exit code. Raises PaNpuError when this node cannot."""
    config, platform = resolve_device(config)
    assert platform
    config = resolve_address(config)
    placement, node = config.placement, config.placement.node_rank
    store = Store(str(placement.master_addr), placement.rendezvous_port)
    print(f"node {node} ({placement.address}): looking for the head at {store.address}", flush=True)
    channel = StoreChannel(connect(store.host, store.port, placement.join_timeout_s), PREFIX)
    invitation = Invitation(**channel.wait_json("run", placement.join_timeout_s, "the head's configuration"))
    generation = channel.add(f"{node}/launchers", 1)
    joining, share = inspect(config, platform, invitation, channel)
    channel.put_json(f"{node}/{generation}/joining", joining_json(joining))
    if joining.report.problems:
        raise UserError(joining.report.problems[0])
    logs = Path(config.run.dir) / "logs"
    with (
        Console(logs / f"launcher-node{node}.log") as console,
        stop_signals() as signals,
        ProcessTree(logs, GRACE_S, signals.insisted) as tree,
        HeadLink(channel, node, generation) as link,
    ):
        console.say(f"pa_npu {__version__}: node {node} ({placement.address}) of the run at {store.address}")
        for line in share.lines():
            console.say(line)
        for note in joining.report.notes:
            console.complain(f"note: {note}")
        build = Builder(config, platform, share, store, joining.ports)
        return Agent(node, build, link, tree, console, signals, placement.node_timeout_s / 2).run()


def joining_json(joining: Joining) -> dict[str, object]:
    return {
        "report": joining.report.to_json(),
        "address": joining.address,
        "versions": joining.versions,
        "ports": joining.ports,
    }


def inspect(
    config: Config, platform: Platform, invitation: Invitation, channel: StoreChannel
) -> tuple[Joining, Placement]:
    """Everything that can be wrong with this node, and its share of the run."""
    node, address = config.placement.node_rank, config.placement.address
    versions = all_versions()
    nothing = Placement((), (), (), ())
    try:
        check_same(config, invitation.config)
        share = check_share(config, platform)
    except UserError as error:
        return Joining(NodeReport(node, address, "", [str(error)]), address, versions, []), nothing
    known = channel.get_json(f"{node}/ports") if channel.exists(f"{node}/ports") else None
    report = inspect_node(config, platform, share, node, invitation.token, known)
    ports = known or ([] if config.rollout.attach or report.problems else engine_ports(config, share.engines))
    return Joining(report, address, versions, ports), share


def all_versions() -> dict[str, str]:
    """What must be the same on all nodes."""
    return {"pa_npu": __version__, **installed_versions()}


def check_same(config: Config, head: dict[str, object]) -> None:
    """Raises ConfigError when a key has another value than on the head, but for those that say which node this is."""
    own = {"placement.node_rank", "placement.host"} | ({"checkpoint.load"} if config.checkpoint.resume else set())
    keys = [key for key in differences(head, config_tree(config)) if key not in own]
    if keys:
        some = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        raise ConfigError(
            f"configuration differs from the head's in {some}; start every node with the same recipe and keys, but for "
            f"placement.node_rank and placement.host"
        )


class Builder:
    """The commands of roles on this node, by its own configuration."""

    def __init__(self, config: Config, platform: Platform, share: Placement, store: Store, ports: list[int]) -> None:
        self._config = config
        self._platform = platform
        self._share = share
        self._store = store
        self._ports = dict(zip(share.engines, ports, strict=False))

    def __call__(self, role: Role) -> Command:
        """Raises NodeError for a role that this node does not have."""
        if role.kind == "trainer" and role.index in self._share.ranks:
            store = Store(self._store.host, self._store.port, role.attempt)
            return trainer_command(self._config, self._platform, self._share, store, role.index)
        if role.kind == "engine" and role.index in self._ports:
            spec, port = ModelSpec.read(self._config.model.path), self._ports[role.index]
            key = run_key(self._config)
            return engine_command(self._config, spec, self._platform, self._share, role.index, port, key)
        raise NodeError(f"{role.name} is not of node {role.node}")


class Agent:
    """Obeys the head. silence_s: how long the head may be silent. The tree's owner stops what runs when run() returns."""

    def __init__(
        self,
        node: int,
        build: Build,
        link: HeadLink,
        tree: ProcessTree,
        console: Console,
        signals: StopSignals,
        silence_s: float,
    ) -> None:
        self._node = node
        self._build = build
        self._link = link
        self._tree = tree
        self._console = console
        self._signals = signals
        self._silence_s = silence_s
        self._processes: dict[int, Process] = {}

    def run(self) -> int:
        """Until the run is over; returns the exit code."""
        while True:
            time.sleep(_TICK_S)
            while not self._link.orders.empty():
                self._obey(parse_order(self._link.orders.get(), self._node))
            self._report_ends()
            if (over := self._link.over) is not None:
                self._stop(f"the head ended the run: {over.reason}", over.code)
                self._link.send(Leaving(""))
                return over.code
            if self._signals.received:
                number = self._signals.received[0]
                self._link.send(Leaving(f"stopped by {signal_name(number)}"))
                self._stop(f"{signal_name(number)}: stopping this node, and with it the run", 0)
                self._report_ends()
                return 128 + number
            if self._link.lost or self._link.silent_s() > self._silence_s:
                why = (
                    self._link.lost
                    or f"no sign of life for {self._link.silent_s():.0f} s (placement.node_timeout_s / 2)"
                )
                self._stop(f"failed: the head is lost: {why}", FAILED)
                return FAILED

    def _obey(self, order: Start | End) -> None:
        if isinstance(order, Start):
            self._start(order)
            return
        chosen = [process for number in order.processes if (process := self._processes.get(number))]
        if order.at_once:
            for process in chosen:
                self._tree.kill_one(process)
        else:
            self._tree.stop(chosen)

    def _start(self, order: Start) -> None:
        try:
            self._processes[order.process] = self._tree.launch(self._build(order.role))
        except UserError as error:
            self._link.send(Ended(order.process, BAD_INPUT, [str(error)]))
        except (PaNpuError, OSError) as error:
            self._link.send(Ended(order.process, _CANNOT_START, [f"{order.role.name} cannot be started: {error}"]))

    def _report_ends(self) -> None:
        for number, process in list(self._processes.items()):
            if (code := process.exit_code) is not None:
                del self._processes[number]
                self._tree.forget([process])
                self._link.send(Ended(number, code, process.last_lines(_LOG_LINES)))

    def _stop(self, reason: str, code: int) -> None:
        (self._console.complain if code else self._console.say)(reason)
        began = time.monotonic()
        self._tree.stop()
        self._console.say(f"all processes of this node ended ({time.monotonic() - began:.1f} s)")
