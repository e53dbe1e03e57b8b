"""What the launchers of several nodes tell each other through the run's store; the keys are below PREFIX.

    run             head   its configuration, versions, and the token that it left in run.dir
    beat            head   counts while it lives
    end             head   exit code and reason: the run is over
    N/launchers     node   counts the launchers of node N; the one that counts g has the keys below
    N/ports         head   ports of the node's engines, once they are chosen
    N/g/joining     node   what it found out about itself
    N/g/refused     head   why it may not take part
    N/g/beat        node   counts while it lives
    N/g/orders      head   start a role, stop or kill processes; in this order
    N/g/events      node   a process has ended, or the launcher is leaving

Orders name roles and numbers, never commands or paths: whoever writes to the store can start and stop what the node's own
configuration describes, and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import PaNpuError
from pa_npu.launcher.node import NodeReport
from pa_npu.launcher.process.commands import Role

PREFIX = "pa/nodes/"
BEAT_S = 0.25


class NodeError(PaNpuError):
    """What another launcher says cannot be understood."""


@dataclass(frozen=True)
class Invitation:
    """config: the head's as a tree of JSON values."""

    config: dict[str, Any]
    versions: dict[str, str]
    token: str


@dataclass(frozen=True)
class Joining:
    """address: where the node's processes listen. ports: of its engines, in the order of its placement."""

    report: NodeReport
    address: str
    versions: dict[str, str]
    ports: list[int]

    @classmethod
    def from_json(cls, raw: Any) -> Joining:
        try:
            report = NodeReport(**raw["report"])
            return cls(report, str(raw["address"]), dict(raw["versions"]), [int(port) for port in raw["ports"]])
        except (KeyError, TypeError, ValueError) as error:
            raise NodeError(f"a node's report cannot be read ({error!r}); use one version on all nodes") from None


@dataclass(frozen=True)
class Start:
    """process: the head's number for it, by which it is stopped and its end is told."""

    process: int
    role: Role


@dataclass(frozen=True)
class End:
    """Stop processes; at_once: by SIGKILL."""

    processes: list[int]
    at_once: bool


@dataclass(frozen=True)
class Ended:
    """lines: the last ones of its log."""

    process: int
    code: int
    lines: list[str]


@dataclass(frozen=True)
class Leaving:
    """The node's launcher ends. reason: empty where the head ended the run."""

    reason: str


_KINDS: dict[str, type[Any]] = {"start": Start, "end": End, "ended": Ended, "leaving": Leaving}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(message: Start | End | Ended | Leaving) -> dict[str, Any]:
    return {"is": _NAMES[type(message)], **asdict(message)}


def parse_order(raw: Any, node: int) -> Start | End:
    """An order for `node`. Raises NodeError unless it has exactly the form of one."""
    try:
        if raw["is"] == "end":
            return End([_number(process) for process in raw["processes"]], raw["at_once"] is True)
        if raw["is"] == "start" and raw["role"]["kind"] in ("engine", "trainer"):
            role = raw["role"]
            order = Role(_number(role["node"]), role["kind"], _number(role["index"]), _number(role["attempt"]))
            if order.node == node:
                return Start(_number(raw["process"]), order)
    except (KeyError, TypeError, ValueError):
        pass
    raise NodeError(f"an order for node {node} cannot be understood: {str(raw)[:100]}; use one version on all nodes")


def parse_event(raw: Any) -> Ended | Leaving:
    """Raises NodeError unless it has exactly the form of one."""
    try:
        if raw["is"] == "ended":
            return Ended(int(raw["process"]), int(raw["code"]), [str(line) for line in raw["lines"]])
        if raw["is"] == "leaving":
            return Leaving(str(raw["reason"]))
    except (KeyError, TypeError, ValueError):
        pass
    raise NodeError(f"a node's event cannot be understood: {str(raw)[:100]}; use one version on all nodes")


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


class Mail:
    """A sequence of messages from one writer to one reader."""

    def __init__(self, channel: StoreChannel, name: str) -> None:
        self._channel = channel
        self._name = name
        self._next = 0

    def send(self, value: Any) -> None:
        self._channel.put_json(f"{self._name}/{self._next}", value)
        self._next = self._channel.add(self._name, 1)

    def receive(self) -> list[Any]:
        """What was sent since the last call."""
        count = self._channel.add(self._name, 0)
        first, self._next = self._next, max(count, self._next)
        return [self._channel.get_json(f"{self._name}/{index}") for index in range(first, count)]
