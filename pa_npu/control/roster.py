"""The roster of a run's engines in its store: where launcher, engines that join, and coordinator tell each other of changes.

    launcher             publish_config(), announce(url), renew()          replacement_wanted() -> kill and start again
    engine that joins    wait_config(), announce(url, restarts=False), ask_leave()        has_left() -> may end
    coordinator          entries() when changed(), ask_replacement(), confirm_left(), lend_device()    is_lent() -> starts later

The roster outlives the coordinator and the trainers, as the engines do: its keys belong to no
attempt of the run. The store asks nobody for a password, so every entry is signed with the run's
API key (HMAC-SHA256 over key and value): an engine that a stranger writes into the store gets no
prompt and no API key, and a configuration by a stranger starts no engine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.control.typed import Counter, Topic

T = TypeVar("T")

PREFIX = "pa/engines/"
_MARK_BYTES = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStart:
    """The newest start of an engine. generation counts its starts; restarts: whether the launcher
    starts it again when it ends.

    shared: it is on a trainer's device.
    """

    url: str
    generation: int
    restarts: bool
    shared: bool


@dataclass(frozen=True)
class RunConfig:
    """The run's resolved configuration as JSON, with absolute paths, without values of its engines'
    environment.
    """

    tree: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """Something that is asked of an engine's start or told of it, with a reason where one belongs
    to it.
    """

    reason: str = ""


@dataclass(frozen=True)
class DeviceLent:
    """Whether a trainer has the engine's device alone."""

    to_trainer: bool


CONFIG = Topic("config", RunConfig, "the launcher to publish its configuration")
START = Topic("{index}", EngineStart, "engine {index} to be announced")
REPLACE = Topic(
    "{index}/replace/{generation}", Said, "the coordinator to ask for another engine {index}"
)
LEAVE = Topic("{index}/leave", Said, "engine {index} to leave")
LEFT = Topic("{index}/left", Said, "the coordinator to let engine {index} go")
LENT = Topic(
    "{index}/lent", DeviceLent, "the coordinator to say who has the device of engine {index}"
)
COUNT = Counter("count")
CHANGES = Counter("changes")


@dataclass(frozen=True)
class Entry(EngineStart):
    """One engine, as `entries` finds it."""

    index: int
    leaving: bool


class Unsigned(StoreError):
    """A value that nobody wrote who has this API key."""


class _Signed(StoreChannel):
    """A channel whose values carry a mark that only who has the key can make, and that holds for
    one place alone.
    """

    def __init__(self, channel: StoreChannel, key: str) -> None:
        super().__init__(channel._store, channel._prefix)
        self._secret = hashlib.sha256(b"pa_npu roster" + key.encode()).digest()

    def put_bytes(self, key: str, data: bytes) -> None:
        super().put_bytes(key, self._mark(key, data) + data)

    def get_bytes(self, key: str) -> bytes:
        data = super().get_bytes(key)
        if not hmac.compare_digest(data[:_MARK_BYTES], self._mark(key, data[_MARK_BYTES:])):
            raise Unsigned(f"{self._address}: {key} is not signed with the run's API key")
        return data[_MARK_BYTES:]

    def _mark(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, f"{self._prefix}{key}\0".encode() + data, "sha256")


def claimed_config(channel: StoreChannel, timeout_s: float) -> dict[str, Any]:
    """The configuration of the run whose store this is, as somebody says. Only to find out which
    API key to check it with.

    Raises DeadlineExceeded where there is none.
    """
    data = channel.wait_bytes(CONFIG.key, timeout_s, CONFIG.what)
    try:
        return dict(json.loads(data[_MARK_BYTES:])["fields"]["tree"])
    except (ValueError, LookupError, TypeError):
        return {}


class Roster:
    """channel: with the prefix PREFIX. key: the run's API key."""

    def __init__(self, channel: StoreChannel, key: str) -> None:
        self._channel = _Signed(channel, key)
        self._seen = 0
        self._warned = False

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
        """Raises DeadlineExceeded when no run has published one, MessageError when another version
        of this program has.

        Raises Unsigned when it was published with another API key.
        """
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
            start = self._read(START, index=index)
            if start is None:  # counted, not written yet
                continue
            leaving = self._read(LEAVE, index=index) is not None
            entries.append(Entry(**asdict(start), index=index, leaving=leaving))
        return entries

    def ask_replacement(self, index: int, generation: int, reason: str) -> None:
        REPLACE.put(self._channel, Said(reason), index=index, generation=generation)

    def replacement_wanted(self, index: int, generation: int) -> str | None:
        """Why this start of the engine is to be replaced, if it is."""
        found = self._read(REPLACE, index=index, generation=generation)
        return found.reason if found is not None else None

    def ask_leave(self, index: int) -> None:
        LEAVE.put(self._channel, Said(), index=index)
        CHANGES.add(self._channel)

    def confirm_left(self, index: int) -> None:
        LEFT.put(self._channel, Said(), index=index)

    def has_left(self, index: int) -> bool:
        return self._read(LEFT, index=index) is not None

    def lend_device(self, index: int, *, to_trainer: bool) -> None:
        """A trainer needs the memory of the engine's device, in which none can start meanwhile; or
        no more.
        """
        LENT.put(self._channel, DeviceLent(to_trainer), index=index)

    def is_lent(self, index: int) -> bool:
        found = self._read(LENT, index=index)
        return found is not None and found.to_trainer

    def _read(self, topic: Topic[T], **place: Any) -> T | None:
        """Reads a message if it is there and signed."""
        try:
            return topic.get_if_there(self._channel, **place)
        except Unsigned as unsigned:
            if not self._warned:
                log.warning("%s, so it is left out; who else can reach this store?", unsigned)
            self._warned = True
            return None
