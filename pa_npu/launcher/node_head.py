"""The head's side of a run on several nodes: processes on other nodes as if they were here.

Processes of a lost node count as killed: its launcher's death kills them, and a launcher that loses the head stops them within
less than the head's patience. An engine that is to be started on a lost node is started when the node is back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pa_npu.config.sections import PlacementConfig
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import BAD_INPUT, FAILED, DeadlineExceeded, UserError
from pa_npu.launcher.node_messages import End, Ended, Invitation, Joining, Start, to_json
from pa_npu.launcher.node_roll import TICK_S, Node, NodeRoll
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process.commands import Role, Startable, engine_url
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.log_tail import last_lines
from pa_npu.launcher.process.process_tree import ProcessTree, describe_end
from pa_npu.launcher.process.processes import Process
from pa_npu.launcher.process.recovery import Failure
from pa_npu.launcher.process.supervisor import StopSignals

_KILLED = -9
# After the end of a node's patience with a silent head, what it takes to stop its processes.
_STOP_S = 15.0


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
        self._roll = NodeRoll(placement, shares, channel, own, console, signals, self)
        self._patience_s = placement.node_timeout_s
        self._local = local
        self._log_dir = log_dir
        self._signals = signals
        self._remote: list[RemoteProcess] = []
        self._running: dict[int, dict[int, RemoteProcess]] = defaultdict(dict)  # by node, then by number
        self._waiting: dict[int, list[Start]] = defaultdict(list)  # for the node to come back
        self._next_process = 0
        self._ending: tuple[int, str] = (FAILED, "the head failed")

    @property
    def processes(self) -> list[Process]:
        return [*self._local.processes, *self._remote]

    def invite(self, invitation: Invitation) -> None:
        """From now on launchers of other nodes can join."""
        self._roll.invite(invitation)

    def gather(self) -> bool:
        """Wait until all nodes have joined; false when a signal came first.

        Raises UserError naming the node when one cannot take part, DeadlineExceeded when one does not come.
        """
        return self._roll.await_all("join", refuse_all=True)

    def await_lost(self) -> None:
        """Before coordinator and trainers are started again. Raises Failure when a lost node does not come back."""
        try:
            self._roll.await_all("come back", refuse_all=False)
        except DeadlineExceeded as error:
            raise Failure(str(error)) from None

    def engine_url(self, index: int) -> str:
        """Of an engine on another node."""
        for node in self._roll.nodes:
            if index in node.share.engines and node.joining is not None:
                return engine_url(node.joining.address, node.joining.ports[node.share.engines.index(index)])
        raise KeyError(index)

    def finish(self, code: int, reason: str) -> None:
        """What the other nodes are told when the context is left."""
        self._ending = (code, reason)

    def launch(self, command: Startable) -> Process:
        if not isinstance(command, Role):
            return self._local.launch(command)
        self._roll.poll()
        node = next(node for node in self._roll.nodes if node.number == command.node)
        self._next_process += 1
        log = self._log_dir / f"{command.name}.log"
        process = RemoteProcess(command.name, log, self._next_process, node.number, self._roll.poll)
        self._running[node.number][process.number] = process
        self._remote.append(process)
        order = Start(process.number, command)
        if node.orders is not None and node.present:
            node.orders.send(to_json(order))
        elif command.kind == "engine":
            self._waiting[node.number].append(order)
        else:
            _lose([process], f"{node.name} is lost")
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
        deadline = time.monotonic() + self._patience_s + _STOP_S
        killed = False
        while unheard := [process for process in running if process.exit_code is None]:
            if self._signals.insisted() and not killed:
                killed = True
                self._order_end(unheard, at_once=True)
            if time.monotonic() > deadline:
                _lose(unheard, "its launcher did not say that it ended")
            time.sleep(TICK_S)

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
        self._roll.await_signs_of_life()

    def problem(self) -> str | None:
        self._roll.poll()
        return next((f"{node.name} was {node.left}" for node in self._roll.nodes if node.left), None)

    def __enter__(self) -> NodeTree:
        self._roll.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._ending = (BAD_INPUT if isinstance(error, UserError) else FAILED, str(error) or type(error).__name__)
        self._roll.dismiss(*self._ending)

    def on_ended(self, node: Node, event: Ended) -> None:
        """Of the roll: a process of this node has ended."""
        if process := self._running[node.number].pop(event.process, None):
            process.code, process.lines = event.code, event.lines

    def on_lost(self, node: Node) -> None:
        """Of the roll."""
        _lose(self._running.pop(node.number, {}).values(), f"lost with {node.name}")

    def on_joined(self, node: Node) -> None:
        """Of the roll: for the first time, or again."""
        assert node.orders is not None
        for order in self._waiting.pop(node.number, []):
            node.orders.send(to_json(order))

    def _order_end(self, processes: Sequence[RemoteProcess], *, at_once: bool) -> None:
        for node in self._roll.nodes:
            here = {process.number: process for process in processes if process.node == node.number}
            waiting = self._waiting[node.number]
            for order in [order for order in waiting if order.process in here]:
                waiting.remove(order)
                here.pop(order.process).code = _KILLED
            if here and node.orders is not None and node.present:
                node.orders.send(to_json(End(list(here), at_once)))

    def _chosen(self, processes: Sequence[Process] | None) -> list[RemoteProcess]:
        return [process for process in self._remote if processes is None or process in processes]


def _lose(processes: Iterable[RemoteProcess], reason: str) -> None:
    for process in processes:
        if process.code is None:
            process.code, process.lost = _KILLED, reason
