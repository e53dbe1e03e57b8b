"""The head's side of a run on several nodes: who is there, and processes on other nodes as if they were here.

    awaited ──reports, nothing wrong──> present ──silent for placement.node_timeout_s──> lost ──a new launcher reports──> present

Processes of a lost node count as killed: its launcher's death kills them, and a launcher that loses the head stops them within
less than the head's patience. An engine that is to be started on a lost node is started when the node is back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from pa_npu.buffer.store import StoreChannel
from pa_npu.config.schema import PlacementConfig
from pa_npu.errors import BAD_INPUT, FAILED, DeadlineExceeded, PaNpuError, UserError
from pa_npu.launcher.commands import Role, Startable, engine_url
from pa_npu.launcher.console import Console
from pa_npu.launcher.log_tail import last_lines
from pa_npu.launcher.node import node_problems
from pa_npu.launcher.node_messages import (
    BEAT_S,
    End,
    Ended,
    Invitation,
    Joining,
    Leaving,
    Mail,
    Start,
    parse_event,
    to_json,
)
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process_tree import ProcessTree, describe_end
from pa_npu.launcher.processes import Process
from pa_npu.launcher.recovery import Failure
from pa_npu.launcher.supervisor import StopSignals

_TICK_S = 0.02
# Three questions to the store per node, of 50 us each.
_POLL_S = 0.1
# The first beat after some moment may have been on its way already.
_SIGNS_OF_LIFE = 2
_WAITING_LINE_EVERY_S = 15.0
_KILLED = -9
# After the end of a node's patience with a silent head, what it takes to stop its processes.
_STOP_S = 15.0
_GOODBYE_S = 10.0


@dataclass(eq=False)
class RemoteProcess:
    """A process that another node's launcher owns. `refresh` brings what that launcher told since."""

    name: str
    log: Path
    number: int
    node: int
    refresh: Callable[[], None]
    code: int | None = None
    lines: list[str] = field(default_factory=list)
    lost: str = ""

    @property
    def exit_code(self) -> int | None:
        self.refresh()
        return self.code

    def describe_end(self) -> str:
        return self.lost or describe_end(self.code or 0)

    def last_lines(self, count: int) -> list[str]:
        return self.lines[-count:] or last_lines(self.log, count)


@dataclass(eq=False)
class Node:
    """What the head knows of another node. generation: of its launchers, the one that takes part; 0 before the first."""

    number: int
    share: Placement
    joining: Joining | None = None
    generation: int = 0
    refused: int = 0
    present: bool = False
    beat: int = 0
    beats_seen: int = 0
    heard_s: float = 0.0
    orders: Mail | None = None
    events: Mail | None = None
    left: str | None = None
    rival: tuple[int, int] | None = (
        None  # another launcher's generation, and how many beats of this one had been seen then
    )
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    waiting: list[Start] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.joining.address})" if self.joining else f"node {self.number}"


class NodeTree:
    """All processes of a run on several nodes: those of `local`, the head's own, and those of the other nodes.

    channel: with the prefix of node_messages. own: the head's report on itself. shares: of all nodes, the head's first.
    Use it as a context manager: leaving it ends the run on all nodes.
    """

    def __init__(
        self,
        placement: PlacementConfig,
        shares: Sequence[Placement],
        local: ProcessTree,
        log_dir: Path,
        channel: StoreChannel,
        own: Joining,
        console: Console,
        signals: StopSignals,
    ) -> None:
        self._placement = placement
        self._local = local
        self._log_dir = log_dir
        self._channel = channel
        self._own = own
        self._console = console
        self._signals = signals
        self._nodes = [Node(number, share) for number, share in enumerate(shares) if number]
        self._remote: list[RemoteProcess] = []
        self._next_process = 0
        self._polled_s = 0.0
        self._ending: tuple[int, str] = (FAILED, "the head failed")
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="head-beat", daemon=True)

    @property
    def processes(self) -> list[Process]:
        return [*self._local.processes, *self._remote]

    def invite(self, invitation: Invitation) -> None:
        """From now on launchers of other nodes can join."""
        self._channel.put_json("run", asdict(invitation))

    def gather(self) -> bool:
        """Wait until all nodes have joined; false when a signal came first.

        Raises UserError naming the node when one cannot take part, DeadlineExceeded when one does not come.
        """
        return self._await_nodes("join")

    def await_lost(self) -> None:
        """Before coordinator and trainers are started again. Raises Failure when a lost node does not come back."""
        try:
            self._await_nodes("come back")
        except DeadlineExceeded as error:
            raise Failure(str(error)) from None

    def engine_url(self, index: int) -> str:
        """Of an engine on another node."""
        for node in self._nodes:
            if index in node.share.engines and node.joining is not None:
                return engine_url(node.joining.address, node.joining.ports[node.share.engines.index(index)])
        raise KeyError(index)

    def finish(self, code: int, reason: str) -> None:
        """What the other nodes are told when the context is left."""
        self._ending = (code, reason)

    def launch(self, command: Startable) -> Process:
        if not isinstance(command, Role):
            return self._local.launch(command)
        self._poll()
        node = self._node(command.node)
        self._next_process += 1
        log = self._log_dir / f"{command.name}.log"
        process = RemoteProcess(command.name, log, self._next_process, node.number, self._poll)
        node.processes[process.number] = process
        self._remote.append(process)
        order = Start(process.number, command)
        if node.orders is not None and node.present:
            node.orders.send(to_json(order))
        elif command.kind == "engine":
            node.waiting.append(order)
        else:
            self._lose([process], f"{node.name} is lost")
        return process

    def ended(self) -> list[Process]:
        """What ended with its node first, then what was killed by a signal: the others often only lost contact with these."""

        def rank(process: Process) -> int:
            if isinstance(process, RemoteProcess) and process.lost:
                return 0
            return 1 if (process.exit_code or 0) < 0 else 2

        return sorted((process for process in self.processes if process.exit_code is not None), key=rank)

    def stop(self, processes: Sequence[Process] | None = None) -> None:
        running = [p for p in self._chosen(processes) if p.exit_code is None]
        self._order_end(running, at_once=False)
        self._local.stop(processes)
        deadline = time.monotonic() + self._placement.node_timeout_s + _STOP_S
        killed = False
        while unheard := [process for process in running if process.exit_code is None]:
            if self._signals.insisted() and not killed:
                killed = True
                self._order_end(unheard, at_once=True)
            if time.monotonic() > deadline:
                self._lose(unheard, "its launcher did not say that it ended")
            time.sleep(_TICK_S)

    def kill_one(self, process: Process) -> None:
        for remote in self._chosen([process]):
            if remote.exit_code is None:
                self._order_end([remote], at_once=True)
                remote.code = _KILLED
        self._local.kill_one(process)

    def forget(self, processes: Sequence[Process]) -> None:
        self._local.forget(processes)
        self._remote = [process for process in self._remote if process not in processes]

    def settle(self, seconds: float) -> None:
        """Until every node has given a sign of life that comes after everything that happened before, or is lost."""
        self._local.settle(seconds)
        self._poll()
        marks = {node.number: node.beats_seen + _SIGNS_OF_LIFE for node in self._nodes}
        said = time.monotonic()
        while silent := [node for node in self._nodes if node.present and node.beats_seen < marks[node.number]]:
            if self._signals.received:
                return
            if time.monotonic() - said > 5.0:
                said = time.monotonic() + _WAITING_LINE_EVERY_S
                self._console.say(f"no sign of life of {', '.join(node.name for node in silent)}")
            time.sleep(_TICK_S)
            self._poll()

    def problem(self) -> str | None:
        self._poll()
        return next((f"{node.name} was {node.left}" for node in self._nodes if node.left), None)

    def __enter__(self) -> NodeTree:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._ending = (BAD_INPUT if isinstance(error, UserError) else FAILED, str(error) or type(error).__name__)
        code, reason = self._ending
        with contextlib.suppress(PaNpuError):  # the store is in this process: what fails here fails for a failing head
            self._channel.put_json("end", {"code": code, "reason": reason})
            deadline = time.monotonic() + _GOODBYE_S
            while time.monotonic() < deadline and any(node.present and node.left is None for node in self._nodes):
                time.sleep(_TICK_S)
                self._poll()
            if any(not node.present and self._channel.add(f"{node.number}/launchers", 0) for node in self._nodes):
                time.sleep(_SIGNS_OF_LIFE * 2 * BEAT_S)  # a launcher that has not been taken in hears of the end, too
        self._closing.set()
        self._heart.join(_GOODBYE_S)

    def _beat(self) -> None:
        with contextlib.suppress(PaNpuError):
            while not self._closing.wait(BEAT_S):
                self._channel.add("beat", 1)

    def _await_nodes(self, verb: str) -> bool:
        began = said = time.monotonic()
        while absent := [node for node in self._nodes if not node.present]:
            if self._signals.received:
                return False
            names, limit_s = ", ".join(node.name for node in absent), self._placement.join_timeout_s
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                raise DeadlineExceeded(
                    f"{names} did not {verb} within {limit_s:.0f} s (placement.join_timeout_s); look at its launcher's output"
                )
            if said == began or time.monotonic() - said > _WAITING_LINE_EVERY_S:
                said = time.monotonic()
                self._console.say(f"waiting for {names} to {verb} ({waited_s:.0f} s)")
            time.sleep(_TICK_S)
            self._poll(refuse_all=verb == "join")
        return True

    def _poll(self, *, refuse_all: bool = False) -> None:
        """Take in what the nodes told. refuse_all: raise UserError when a node cannot take part, else refuse it alone."""
        if time.monotonic() - self._polled_s < _POLL_S:
            return
        self._polled_s = time.monotonic()
        for node in self._nodes:
            if node.present:
                self._listen(node)
            self._look_for_newcomer(node, refuse_all)

    def _listen(self, node: Node) -> None:
        assert node.events is not None
        beat = self._channel.add(f"{node.number}/{node.generation}/beat", 0)
        for raw in node.events.receive():
            event = parse_event(raw)
            if isinstance(event, Leaving):
                node.left = event.reason
            else:
                _take_end(node, event)
        if beat != node.beat:
            node.beats_seen += beat - node.beat
            node.beat, node.heard_s = beat, time.monotonic()
        silent_s = time.monotonic() - node.heard_s
        if silent_s > self._placement.node_timeout_s and node.left is None:
            node.present = False
            self._console.complain(f"{node.name} is lost: its launcher gave no sign of life for {silent_s:.0f} s")
            self._lose(list(node.processes.values()), f"lost with {node.name}")
            node.processes.clear()

    def _look_for_newcomer(self, node: Node, refuse_all: bool) -> None:
        latest = self._channel.add(f"{node.number}/launchers", 0)
        place = f"{node.number}/{latest}"
        if latest <= max(node.generation, node.refused) or not self._channel.exists(f"{place}/joining"):
            return
        joining = Joining.from_json(self._channel.get_json(f"{place}/joining"))
        if node.present:
            # The one before it is dead, which is known when it has been silent for long enough, or this is one too many.
            if node.rival is None or node.rival[0] != latest:
                node.rival = (latest, node.beats_seen)
            elif node.beats_seen >= node.rival[1] + _SIGNS_OF_LIFE:
                self._turn_away(node, latest, f"node {node.number} has a launcher already, and it is alive")
            return
        if problems := self._problems(node, joining):
            if refuse_all:
                for line in problems[1:]:
                    self._console.complain(line)
                self._refuse(node, latest, problems[0])
                raise UserError(problems[0])
            self._turn_away(node, latest, problems[0])
            return
        self._welcome(node, latest, joining)

    def _problems(self, node: Node, joining: Joining) -> list[str]:
        lines = node_problems([self._own.report, joining.report])
        if joining.report.problems:
            return lines
        who = f"node {node.number} ({joining.report.host})"
        for name in sorted(self._own.versions.keys() | joining.versions.keys()):
            here, there = self._own.versions.get(name, "not installed"), joining.versions.get(name, "not installed")
            if here != there:
                lines.append(f"{who}: {name} is {there}, but {here} on the head; install the same on all nodes")
        if node.joining is not None and node.joining.address != joining.address:
            lines.append(f"{who}: came back with another address, {joining.address}; give it {node.joining.address}")
        return lines

    def _turn_away(self, node: Node, generation: int, reason: str) -> None:
        """The run goes on without it."""
        self._console.complain(f"refused: {reason}")
        self._refuse(node, generation, reason)

    def _refuse(self, node: Node, generation: int, reason: str) -> None:
        node.refused = generation
        self._channel.put_json(f"{node.number}/{generation}/refused", {"code": BAD_INPUT, "reason": reason})

    def _welcome(self, node: Node, generation: int, joining: Joining) -> None:
        place = f"{node.number}/{generation}"
        back = node.joining is not None
        node.joining, node.generation, node.present = joining, generation, True
        node.orders, node.events = Mail(self._channel, f"{place}/orders"), Mail(self._channel, f"{place}/events")
        node.beat, node.heard_s, node.left = 0, time.monotonic(), None
        self._channel.put_json(f"{node.number}/ports", joining.ports)
        self._console.say(f"{node.name} {'is back' if back else 'has joined'}")
        for note in joining.report.notes:
            self._console.complain(f"note: {node.name}: {note}")
        for order in node.waiting:
            node.orders.send(to_json(order))
        node.waiting.clear()

    def _lose(self, processes: Sequence[RemoteProcess], reason: str) -> None:
        for process in processes:
            if process.code is None:
                process.code, process.lost = _KILLED, reason

    def _order_end(self, processes: Sequence[RemoteProcess], *, at_once: bool) -> None:
        for node in self._nodes:
            here = {process.number: process for process in processes if process.node == node.number}
            for order in [order for order in node.waiting if order.process in here]:
                node.waiting.remove(order)
                here.pop(order.process).code = _KILLED
            if here and node.orders is not None and node.present:
                node.orders.send(to_json(End(list(here), at_once)))

    def _chosen(self, processes: Sequence[Process] | None) -> list[RemoteProcess]:
        return [process for process in self._remote if processes is None or process in processes]

    def _node(self, number: int) -> Node:
        return next(node for node in self._nodes if node.number == number)


def _take_end(node: Node, event: Ended) -> None:
    process = node.processes.pop(event.process, None)
    if process is not None:
        process.code, process.lines = event.code, event.lines
