"""The list of a run's engines in its store, through which the launcher, engines and coordinator talk.

    launcher             publish_config(), announce(url), renew()          replacement_wanted() -> kill and start again
    engine that joins    wait_config(), announce(url, restarts=False), ask_leave()        has_left() -> may end
    coordinator          entries() when changed(), ask_replacement(), confirm_left(), lend_device()    is_lent() -> starts later

The roster outlives the coordinator and the trainers, as the engines do, so its keys belong to no
attempt of the run. The store has no password. Every entry is therefore signed with the run's API
key (HMAC-SHA256 over key and value): an engine that a stranger writes into the store gets no prompt
and no API key, and a stranger's configuration starts no engine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.control.typed import Counter, Topic

T = TypeVar("T")

PREFIX = "pa/engines/"
_MARK_BYTES = 32


def teacher_prefix(config: Config, name: str) -> str:
    """Returns the prefix of the roster of a teacher's engines."""
    return f"pa/teachers/{list(config.teacher).index(name)}/"


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStart:
    """The latest start of an engine.

    generation: counts its starts.
    restarts: the launcher starts it again when it ends.
    shared: it runs on a trainer's device.
    """

    url: str
    generation: int
    restarts: bool
    shared: bool


@dataclass(frozen=True)
class ConfigForEngines:
    """The run's resolved configuration as JSON.

    Its paths are absolute. The values of its engines' environment are left out.
    """

    tree: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """A request or a notice about an engine. reason: for logs; empty if there is none."""

    reason: str = ""


@dataclass(frozen=True)
class DeviceLent:
    """The state of an engine's device: whether it is lent to a trainer, which then uses it alone."""

    to_trainer: bool


CONFIG = Topic("config", ConfigForEngines, "the launcher to publish its configuration")
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
    """One engine of the roster. leaving: it was asked to leave."""

    index: int
    leaving: bool


class Unsigned(StoreError):
    """A value that was not signed with this API key."""


class _SignedChannel(StoreChannel):
    """A channel whose values begin with a signature over the store's key and the data.

    Only processes that have the API key can make the signature, and it is valid for one key of the
    store only.
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
    """Returns the configuration in the store without checking its signature.

    Use it only to find out which API key the signature has to be checked with.
    Raises DeadlineExceeded if there is none.
    """
    data = channel.wait_bytes(CONFIG.key, timeout_s, CONFIG.description)
    try:
        return dict(json.loads(data[_MARK_BYTES:])["fields"]["tree"])
    except (ValueError, LookupError, TypeError):
        return {}


class Roster:
    """Reads and writes the roster. channel: with the prefix PREFIX. key: the run's API key."""

    def __init__(self, channel: StoreChannel, key: str) -> None:
        self._channel = _SignedChannel(channel, key)
        self._seen_changes = 0
        self._warned = False

    def announce(self, url: str, *, restarts: bool = True, shared: bool = False) -> int:
        """Adds an engine that has been started, and returns its index."""
        index = COUNT.add(self._channel) - 1
        START.put(self._channel, EngineStart(url, 0, restarts, shared), index=index)
        CHANGES.add(self._channel)
        return index

    def publish_config(self, tree: dict[str, Any]) -> None:
        """Publishes the run's configuration for engines that join."""
        CONFIG.put(self._channel, ConfigForEngines(tree))

    def wait_config(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the run's configuration and returns it.

        Raises DeadlineExceeded after timeout_s, MessageError if another version of this program
        published it, Unsigned if it was published with another API key.
        """
        return CONFIG.wait(self._channel, timeout_s).tree

    def is_open(self) -> bool:
        """Returns True. Raises StoreError if the run has ended, and its store with it."""
        return CONFIG.exists(self._channel)

    def renew(self, index: int, generation: int, url: str) -> None:
        """Records that the engine was started again, possibly on another node."""
        start = START.get(self._channel, index=index)
        START.put(self._channel, replace(start, generation=generation, url=url), index=index)
        CHANGES.add(self._channel)

    def changed(self) -> bool:
        """Returns whether the roster was changed since the last call, or since the start."""
        seen = self._seen_changes
        self._seen_changes = CHANGES.value(self._channel)
        return self._seen_changes != seen

    def entries(self) -> list[Entry]:
        """Returns all engines that have not left, by index."""
        entries = []
        for index in range(COUNT.value(self._channel)):
            if self.has_left(index):
                continue
            start = self._read(START, index=index)
            if start is None:  # the engine is counted, but its entry is not written yet
                continue
            leaving = self._read(LEAVE, index=index) is not None
            entries.append(Entry(**asdict(start), index=index, leaving=leaving))
        return entries

    def ask_replacement(self, index: int, generation: int, reason: str) -> None:
        REPLACE.put(self._channel, Said(reason), index=index, generation=generation)

    def replacement_wanted(self, index: int, generation: int) -> str | None:
        """Returns why this start of the engine is to be replaced; None if it is not."""
        request = self._read(REPLACE, index=index, generation=generation)
        return None if request is None else request.reason

    def ask_leave(self, index: int) -> None:
        LEAVE.put(self._channel, Said(), index=index)
        CHANGES.add(self._channel)

    def confirm_left(self, index: int) -> None:
        LEFT.put(self._channel, Said(), index=index)

    def has_left(self, index: int) -> bool:
        return self._read(LEFT, index=index) is not None

    def lend_device(self, index: int, *, to_trainer: bool) -> None:
        """Lends the engine's device to a trainer, or ends the loan.

        No engine can start on the device while the trainer uses its memory.
        """
        LENT.put(self._channel, DeviceLent(to_trainer), index=index)

    def is_lent(self, index: int) -> bool:
        loan = self._read(LENT, index=index)
        return loan is not None and loan.to_trainer

    def _read(self, topic: Topic[T], **place: Any) -> T | None:
        """Returns a message; None if there is none, or if its signature is wrong."""
        try:
            return topic.get_if_there(self._channel, **place)
        except Unsigned as unsigned:
            if not self._warned:
                log.warning("%s, so it is ignored; who else can reach this store?", unsigned)
            self._warned = True
            return None
