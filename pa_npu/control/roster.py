"""The roster of a run's engines in its store: where launcher, engines that join, and coordinator tell each other of changes.

    launcher             publish_config(), announce(url), renew()          replacement_wanted() -> kill and start again
    engine that joins    wait_config(), announce(url, restarts=False), ask_leave()        has_left() -> may end
    coordinator          entries() when changed(), ask_replacement(), confirm_left()

The roster outlives the coordinator and the trainers, as the engines do: its keys belong to no attempt of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pa_npu.control.channel import StoreChannel
from pa_npu.control.typed import Counter, Topic

PREFIX = "pa/engines/"


@dataclass(frozen=True)
class EngineStart:
    """The newest start of an engine. generation counts its starts; restarts: whether the launcher starts it again when it ends.

    shared: it is on a trainer's device.
    """

    url: str
    generation: int
    restarts: bool
    shared: bool


@dataclass(frozen=True)
class RunConfig:
    """The run's resolved configuration as JSON, with absolute paths."""

    tree: dict[str, Any]


@dataclass(frozen=True)
class ReplacementWanted:
    """This start of an engine is to be replaced."""

    reason: str


@dataclass(frozen=True)
class LeaveAsked:
    """An engine wants to leave the run."""


@dataclass(frozen=True)
class HasLeft:
    """Nothing of the run is on the engine any more."""


CONFIG = Topic("config", RunConfig, "the launcher to publish its configuration")
START = Topic("{index}", EngineStart, "engine {index} to be announced")
REPLACE = Topic("{index}/replace/{generation}", ReplacementWanted, "the coordinator to ask for another engine {index}")
LEAVE = Topic("{index}/leave", LeaveAsked, "engine {index} to leave")
LEFT = Topic("{index}/left", HasLeft, "the coordinator to let engine {index} go")
COUNT = Counter("count")
CHANGES = Counter("changes")


@dataclass(frozen=True)
class Entry:
    """One engine, as `entries` finds it. generation, restarts and shared: as in EngineStart."""

    index: int
    url: str
    generation: int
    restarts: bool
    leaving: bool
    shared: bool


class Roster:
    """channel: with the prefix PREFIX."""

    def __init__(self, channel: StoreChannel) -> None:
        self._channel = channel
        self._seen = 0

    def announce(self, url: str, *, restarts: bool = True, shared: bool = False) -> int:
        """A new engine, which has been started; returns its index."""
        index = COUNT.add(self._channel) - 1
        START.put(self._channel, EngineStart(url, 0, restarts, shared), index=index)
        CHANGES.add(self._channel)
        return index

    def publish_config(self, tree: dict[str, Any]) -> None:
        """For engines that join."""
        CONFIG.put(self._channel, RunConfig(tree))

    def wait_config(self, timeout_s: float) -> dict[str, Any]:
        """Raises DeadlineExceeded when no run has published one, MessageError when another version of this program has."""
        return CONFIG.wait(self._channel, timeout_s).tree

    def is_open(self) -> bool:
        """True; raises StoreError when the run has ended, and its store with it."""
        return CONFIG.exists(self._channel)

    def renew(self, index: int, generation: int, url: str) -> None:
        """The engine has been started again, on another node perhaps."""
        start = START.get(self._channel, index=index)
        START.put(self._channel, replace(start, generation=generation, url=url), index=index)
        CHANGES.add(self._channel)

    def changed(self) -> bool:
        """Whether anything was written since the last call; true at first."""
        seen, self._seen = self._seen, CHANGES.value(self._channel)
        return self._seen != seen

    def entries(self) -> list[Entry]:
        """All engines but those that have left, by index."""
        entries = []
        for index in range(COUNT.value(self._channel)):
            if self.has_left(index):
                continue
            start = START.get_if_there(self._channel, index=index)
            if start is None:  # counted, not written yet
                continue
            leaving = LEAVE.exists(self._channel, index=index)
            entries.append(Entry(index, start.url, start.generation, start.restarts, leaving, start.shared))
        return entries

    def ask_replacement(self, index: int, generation: int, reason: str) -> None:
        REPLACE.put(self._channel, ReplacementWanted(reason), index=index, generation=generation)

    def replacement_wanted(self, index: int, generation: int) -> str | None:
        """Why this start of the engine is to be replaced, if it is."""
        found = REPLACE.get_if_there(self._channel, index=index, generation=generation)
        return found.reason if found is not None else None

    def ask_leave(self, index: int) -> None:
        LEAVE.put(self._channel, LeaveAsked(), index=index)
        CHANGES.add(self._channel)

    def confirm_left(self, index: int) -> None:
        LEFT.put(self._channel, HasLeft(), index=index)

    def has_left(self, index: int) -> bool:
        return LEFT.exists(self._channel, index=index)
