"""The nodes that a Ray cluster gives to a run: reserved, checked, missed and replaced.

    wanted ──resources there──> made ──checks passed──> present ──actor lost, or silent──> wanted

A node is a share of the run with a host actor. A node that is lost is wanted again at once: its
place in the placement group is given back by Ray, on the node that returns or on another one that
has the resources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pa_npu.errors import PaNpuError
from pa_npu.launcher.cluster.host import NodeReport, node_problem
from pa_npu.launcher.cluster.ray_connection import HostFailed, HostGone, RayConnection
from pa_npu.launcher.placement import Placement
from pa_npu.launcher.process.console import Console

TICK_S = 0.02
# A node whose processes are not heard of for this long is lost, if Ray has not said so.
SILENT_S = 60.0
_POLL_S = 0.05
_WAITING_LINE_EVERY_S = 15.0
# A node that was refused is asked again after this: somebody may have corrected it.
_ASK_AGAIN_S = 5.0
# Ray may place a new host on a node whose death it does not know of yet; then that one dies as
# well.
_START_AGAIN_S = 1.0
_STARTS = 5


@dataclass(eq=False)
class Node:
    """One node of the run. extra: its engine's index, where it is one that comes when there are
    free devices.
    """

    number: int
    share: Placement
    resources: dict[str, float]
    extra: int | None = None
    host: Any = None
    joining: Any = None
    look: Any = None
    heard_s: float = 0.0
    report: NodeReport | None = None
    present: bool = False
    ask_again_s: float | None = None
    failed_starts: int = 0
    problem: str = ""

    @property
    def name(self) -> str:
        return (
            f"node {self.number} ({self.report.address})" if self.report else f"node {self.number}"
        )


@dataclass
class RayNodes:
    """The nodes of a run. own: the launcher's machine's report. order: what a host is told beside
    its number.

    timeout_s: run.startup_timeout_s, within which the cluster gives nodes, also for lost ones.
    on_ended: hears of a process's number, exit code and last lines. on_lost: hears why.
    """

    connection: RayConnection
    timeout_s: float
    launcher_report: NodeReport
    order: dict[str, Any]
    nodes: Sequence[Node]
    console: Console
    on_ended: Callable[[Node, int, int, list[str]], None]
    on_lost: Callable[[Node, str], None]
    interrupted: Callable[[], bool]
    _group: Any = None
    _polled_s: float = 0.0

    def reserve(self) -> bool:
        """Until the cluster has given every node of the run its resources; false when a signal came
        first.

        Raises NodesMissing with what is wanted and what there is after timeout_s.
        """
        fixed = [node for node in self.nodes if node.extra is None]
        self._group = self.connection.reserve([node.resources for node in fixed])
        if not self._wait(
            lambda: self.connection.is_reserved(self._group),
            lambda: shortage(self.connection, fixed),
        ):
            return False
        for node in self.nodes:
            self._make(node)
        return True

    def await_present(self, nodes: Sequence[Node], *, patient: bool) -> bool:
        """Until these have passed their checks; false when a signal came first. Raises NodesMissing
        by the deadline.

        patient: a node that cannot take part may be corrected or replaced until then; else that is
        raised at once.
        """

        def missing() -> str:
            return ", ".join(
                node.problem or f"{node.name} is not there" for node in nodes if not node.present
            )

        def all_present() -> bool:
            self.poll()
            if not patient and (
                problem := next((node.problem for node in nodes if node.problem), None)
            ):
                raise NodesMissing(problem)
            return all(node.present for node in nodes)

        return self._wait(all_present, missing)

    def poll(self) -> None:
        """Take what hosts have told since, and tell of ends and losses."""
        if time.monotonic() - self._polled_s < _POLL_S:
            return
        self._polled_s = time.monotonic()
        for node in self.nodes:
            if node.ask_again_s is not None and time.monotonic() > node.ask_again_s:
                self._make(node)
            elif node.host is not None:
                self._hear(node)

    def lose(self, node: Node, reason: str) -> None:
        """Its processes count as killed, and it is wanted again."""
        was_present = node.present
        node.present = False
        self._take_away(node, 0.0)
        if was_present:
            self.console.print_error(f"{node.name} is lost: {reason}")
            self.on_lost(node, reason)

    def close(self) -> None:
        """All hosts end, and what they were given is free again."""
        for node in self.nodes:
            if node.host is not None:
                self.connection.end(node.host)
        if self._group is not None:
            self.connection.release(self._group)

    def _make(self, node: Node) -> None:
        group = None if node.extra is not None else self._group
        node.host = self.connection.make_host(node.name, node.resources, group, node.number)
        node.ask_again_s = None
        node.look = None
        order = {**self.order, "node": node.number, "engine": node.extra}
        node.joining = self.connection.call(node.host, "join", order)

    def _hear(self, node: Node) -> None:
        reference = node.look or node.joining
        if not self.connection.done([reference]):
            silent_s = time.monotonic() - node.heard_s
            if node.present and silent_s > SILENT_S:
                self.lose(node, f"no sign of life for {silent_s:.0f} s")
            return
        try:
            value = self.connection.result(reference, SILENT_S)
        except HostGone as error:
            if node.present:
                self.lose(node, str(error))
            else:
                self._start_again(node, str(error))
            return
        except HostFailed as error:
            self._refuse(node, f"node {node.number}: its checks failed: {error}")
            return
        node.heard_s = time.monotonic()
        if reference is node.joining:
            node.joining = None
            self._welcome(node, NodeReport(**value))
        else:
            node.look = self.connection.call(node.host, "look")
            for number, code, lines in value:
                self.on_ended(node, number, code, lines)

    def _welcome(self, node: Node, report: NodeReport) -> None:
        back = node.report is not None
        node.report = report
        if problem := node_problem(report, self.launcher_report):
            self._refuse(node, problem)
            return
        node.present = True
        node.problem = ""
        node.failed_starts = 0
        node.look = self.connection.call(node.host, "look")
        self.console.print_line(f"{node.name} {'is back' if back else 'has joined'}")
        for note in report.notes:
            self.console.print_error(f"note: {node.name}: {note}")

    def _start_again(self, node: Node, reason: str) -> None:
        node.failed_starts += 1
        if node.failed_starts >= _STARTS:
            self._refuse(node, f"{node.name}: its host ends as soon as it has started: {reason}")
        else:
            self._take_away(node, _START_AGAIN_S)

    def _refuse(self, node: Node, problem: str) -> None:
        self._take_away(node, _ASK_AGAIN_S)
        if problem != node.problem:
            self.console.print_error(f"refused: {problem}")
        node.problem = problem

    def _take_away(self, node: Node, pause_s: float) -> None:
        self.connection.end(node.host)
        node.host = node.look = node.joining = None
        node.ask_again_s = time.monotonic() + pause_s

    def _wait(self, is_true: Callable[[], bool], why_not: Callable[[], str]) -> bool:
        began = time.monotonic()
        last_line_s = time.monotonic() - _WAITING_LINE_EVERY_S + 1.0
        while not is_true():
            if self.interrupted():
                return False
            waited_s = time.monotonic() - began
            limit_s = self.timeout_s
            if waited_s > limit_s:
                raise NodesMissing(f"{why_not()}, within {limit_s:g} s (run.startup_timeout_s)")
            if time.monotonic() - last_line_s > _WAITING_LINE_EVERY_S:
                last_line_s = time.monotonic()
                self.console.print_line(f"waiting for nodes ({waited_s:.0f} s): {why_not()}")
            time.sleep(TICK_S)
        return True


class NodesMissing(PaNpuError):
    """The cluster does not give the run what it needs."""


def shortage(connection: RayConnection, nodes: Sequence[Node]) -> str:
    """Says in one line what the run wants of each node and what the cluster has."""
    wants: dict[str, int] = {}
    for node in nodes:
        text = " and ".join(f"{amount:g} {name}" for name, amount in node.resources.items())
        wants[text] = wants.get(text, 0) + 1
    wanted = ", ".join(
        f"{count} node{'s' if count > 1 else ''} with {text}" for text, count in wants.items()
    )
    names = sorted({name for node in nodes for name in node.resources})
    has = ", ".join(
        f"{address} {' and '.join(f'{resources.get(name, 0):g} {name}' for name in names)}"
        for address, resources in sorted(connection.nodes())
    )
    free = " and ".join(f"{connection.free(name):g} {name}" for name in names)
    return (
        f"placement.cluster: the run needs {wanted}; the cluster has {has or 'no nodes'}, of which "
        f"{free} are free in all; add nodes, end what has reserved them, or lower rollout.engines, "
        "trainer.devices or placement.nnodes"
    )
