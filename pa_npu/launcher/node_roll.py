"""Which nodes take part in a run on several nodes, as the head sees it.

    awaited ──reports, nothing wrong──> present ──silent for placement.node_timeout_s──> lost ──a new launcher reports──> present

What a node's launcher tells of its processes is handed on; what is lost with it is for the listener to say.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from pa_npu.config.sections import PlacementConfig
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import BAD_INPUT, DeadlineExceeded, PaNpuError, UserError
from pa_npu.launcher.node import node_problems
from pa_npu.launcher.node_messages import BEAT_S, Ended, Invitation, Joining, Leaving, Mail, parse_event
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.supervisor import StopSignals

TICK_S = 0.02
# The first beat after some moment may have been on its way already.
SIGNS_OF_LIFE = 2
# Three questions to the store per node, of 50 us each.
_POLL_S = 0.1
_WAITING_LINE_EVERY_S = 15.0
_SILENCE_SAID_AFTER_S = 5.0
_GOODBYE_S = 10.0


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

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.joining.address})" if self.joining else f"node {self.number}"


class Listener(Protocol):
    """What happens on the nodes."""

    def on_ended(self, node: Node, event: Ended) -> None: ...

    def on_lost(self, node: Node) -> None: ...

    def on_joined(self, node: Node) -> None: ...


class NodeRoll:
    """Takes nodes in, turns them away and misses them. channel: with the prefix of node_messages. own: the head's own report.

    shares: of all nodes, the head's first. `dismiss` ends the run on all of them.
    """

    def __init__(
        self,
        placement: PlacementConfig,
        shares: Sequence[Placement],
        channel: StoreChannel,
        own: Joining,
        console: Console,
        signals: StopSignals,
        listener: Listener,
    ) -> None:
        self._placement = placement
        self._channel = channel
        self._own = own
        self._console = console
        self._signals = signals
        self._listener = listener
        self.nodes = [Node(number, share) for number, share in enumerate(shares) if number]
        self._polled_s = 0.0
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="head-beat", daemon=True)

    def invite(self, invitation: Invitation) -> None:
        """From now on launchers of other nodes can join."""
        self._channel.put_json("run", asdict(invitation))

    def open(self) -> None:
        """From now on the head gives signs of life."""
        self._heart.start()

    def await_all(self, verb: str, *, refuse_all: bool) -> bool:
        """Until every node is present; false when a signal came first. verb: what nodes are to do, for people.

        refuse_all: raise UserError when a node cannot take part. Raises DeadlineExceeded when one does not come.
        """
        began = said = time.monotonic()
        while absent := [node for node in self.nodes if not node.present]:
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
            time.sleep(TICK_S)
            self.poll(refuse_all=refuse_all)
        return True

    def await_signs_of_life(self) -> None:
        """Until every node has given a sign of life that comes after everything that happened before, or is lost."""
        self.poll()
        marks = {node.number: node.beats_seen + SIGNS_OF_LIFE for node in self.nodes}
        said = time.monotonic()
        while silent := [node for node in self.nodes if node.present and node.beats_seen < marks[node.number]]:
            if self._signals.received:
                return
            if time.monotonic() - said > _SILENCE_SAID_AFTER_S:
                said = time.monotonic() + _WAITING_LINE_EVERY_S
                self._console.say(f"no sign of life of {', '.join(node.name for node in silent)}")
            time.sleep(TICK_S)
            self.poll()

    def poll(self, *, refuse_all: bool = False) -> None:
        """Take in what the nodes told. refuse_all: raise UserError when a node cannot take part, else refuse it alone."""
        if time.monotonic() - self._polled_s < _POLL_S:
            return
        self._polled_s = time.monotonic()
        for node in self.nodes:
            if node.present:
                self._listen(node)
            self._look_for_newcomer(node, refuse_all)

    def dismiss(self, code: int, reason: str) -> None:
        """The run is over; nodes have some seconds to say that they have heard it."""
        with contextlib.suppress(PaNpuError):  # the store is in this process: what fails here fails for a failing head
            self._channel.put_json("end", {"code": code, "reason": reason})
            deadline = time.monotonic() + _GOODBYE_S
            while time.monotonic() < deadline and any(node.present and node.left is None for node in self.nodes):
                time.sleep(TICK_S)
                self.poll()
            if any(not node.present and self._channel.add(f"{node.number}/launchers", 0) for node in self.nodes):
                time.sleep(SIGNS_OF_LIFE * 2 * BEAT_S)  # a launcher that has not been taken in hears of the end, too
        self._closing.set()
        self._heart.join(_GOODBYE_S)

    def _beat(self) -> None:
        with contextlib.suppress(PaNpuError):
            while not self._closing.wait(BEAT_S):
                self._channel.add("beat", 1)

    def _listen(self, node: Node) -> None:
        assert node.events is not None
        beat = self._channel.add(f"{node.number}/{node.generation}/beat", 0)
        for raw in node.events.receive():
            event = parse_event(raw)
            if isinstance(event, Leaving):
                node.left = event.reason
            else:
                self._listener.on_ended(node, event)
        if beat != node.beat:
            node.beats_seen += beat - node.beat
            node.beat, node.heard_s = beat, time.monotonic()
        silent_s = time.monotonic() - node.heard_s
        if silent_s > self._placement.node_timeout_s and node.left is None:
            node.present = False
            self._console.complain(f"{node.name} is lost: its launcher gave no sign of life for {silent_s:.0f} s")
            self._listener.on_lost(node)

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
            elif node.beats_seen >= node.rival[1] + SIGNS_OF_LIFE:
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
        self._listener.on_joined(node)
