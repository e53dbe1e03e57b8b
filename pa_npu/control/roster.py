"""The roster of a run's engines in its store: where launcher, engines that join, and coordinator tell each other of changes.

    launcher             publish_config(), announce(url), renew()          replacement_wanted() -> kill and start again
    engine that joins    wait_config(), announce(url, restarts=False), ask_leave()        has_left() -> may end
    coordinator          entries() when changed(), ask_replacement(), confirm_left()

The roster outlives the coordinator and the trainers, as the engines do: its keys belong to no attempt of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pa_npu.control.channel import StoreChannel, StoreError

PREFIX = "pa/engines/"


@dataclass(frozen=True)
class Entry:
    """One engine. generation counts its starts; restarts: whether the launcher starts it again when it ends."""

    index: int
    url: str
    generation: int
    restarts: bool
    leaving: bool


class Roster:
    """channel: with the prefix PREFIX."""

    def __init__(self, channel: StoreChannel) -> None:
        self._channel = channel
        self._seen = 0

    def announce(self, url: str, *, restarts: bool = True) -> int:
        """A new engine, which has been started; returns its index."""
        index = self._channel.add("count", 1) - 1
        self._channel.put_json(str(index), {"url": url, "generation": 0, "restarts": restarts})
        self._channel.add("changes", 1)
        return index

    def publish_config(self, tree: dict[str, Any]) -> None:
        """The run's configuration as JSON, with absolute paths, for engines that join."""
        self._channel.put_json("config", tree)

    def wait_config(self, timeout_s: float) -> dict[str, Any]:
        """Raises DeadlineExceeded when no run has published one."""
        tree: dict[str, Any] = self._channel.wait_json("config", timeout_s, "the launcher to publish its configuration")
        return tree

    def is_open(self) -> bool:
        """True; raises StoreError when the run has ended, and its store with it."""
        return self._channel.exists("config")

    def renew(self, index: int, generation: int, url: str) -> None:
        """The engine has been started again, on another node perhaps."""
        self._channel.put_json(str(index), self._channel.get_json(str(index)) | {"generation": generation, "url": url})
        self._channel.add("changes", 1)

    def changed(self) -> bool:
        """Whether anything was written since the last call; true at first."""
        seen, self._seen = self._seen, self._channel.add("changes", 0)
        return self._seen != seen

    def entries(self) -> list[Entry]:
        """All engines but those that have left, by index."""
        entries = []
        for index in range(self._channel.add("count", 0)):
            if self.has_left(index):
                continue
            try:
                value = self._channel.get_json(str(index))
            except StoreError:  # counted, not written yet
                continue
            leaving = self._channel.exists(f"{index}/leave")
            entries.append(Entry(index, value["url"], value["generation"], value["restarts"], leaving))
        return entries

    def ask_replacement(self, index: int, generation: int, reason: str) -> None:
        self._channel.put_json(f"{index}/replace/{generation}", reason)

    def replacement_wanted(self, index: int, generation: int) -> str | None:
        """Why this start of the engine is to be replaced, if it is."""
        key = f"{index}/replace/{generation}"
        return str(self._channel.get_json(key)) if self._channel.exists(key) else None

    def ask_leave(self, index: int) -> None:
        self._channel.put_json(f"{index}/leave", True)
        self._channel.add("changes", 1)

    def confirm_left(self, index: int) -> None:
        self._channel.put_json(f"{index}/left", True)

    def has_left(self, index: int) -> bool:
        return self._channel.exists(f"{index}/left")
