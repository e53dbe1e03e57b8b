"""Typed messages between processes: a topic is a key of the store with its dataclass.

    MEMBERS = Topic("publish/{version}/{attempt}/members", Members, "engines that can load weight
    version {version}")

    MEMBERS.put(channel, Members(epoch=0, workers=2), version=3, attempt=0)
    members = MEMBERS.wait(channel, timeout_s, version=3, attempt=0)

A topic is a module constant next to its dataclass, so that a key is spelled once. The stored value
is JSON with the message's name. A value of another version of the program, or of a foreign writer,
therefore raises a MessageError instead of a KeyError far from the cause.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from string import Formatter
from typing import Any, Generic, TypeVar, cast

import msgspec

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import PaNpuError

T = TypeVar("T")


class MessageError(PaNpuError):
    """The value of a key is not the message of its topic."""


@dataclass(frozen=True)
class Topic(Generic[T]):
    """A family of keys, and the message that is stored under each.

    key: a template; its fields are the keyword arguments of every method.
    message: a frozen dataclass.
    description: completes "waited 3 s for ...", sender included; may contain the key's fields.

    Fields of a message are int, float, str, bool, None, Any, dataclasses of these, and their
    tuple[X, ...], list[X], dict[str, X] and unions; msgspec reads them.
    """

    key: str
    message: type[T]
    description: str

    def at(self, **place: Any) -> str:
        """Returns the key for these fields. Raises TypeError if one is missing or unknown."""
        names = {name for _, name, _, _ in Formatter().parse(self.key) if name is not None}
        if names != place.keys():
            raise TypeError(f"{self.key}: got {sorted(place)}, needs {sorted(names)}")
        return self.key.format(**place)

    def put(self, channel: StoreChannel, message: T, **place: Any) -> None:
        """Stores a message, replacing an earlier one."""
        if type(message) is not self.message:
            raise TypeError(
                f"{self.key}: {type(message).__name__} is not a {self.message.__name__}"
            )
        envelope = {"message": self.message.__name__, "fields": asdict(cast(Any, message))}
        channel.put_bytes(self.at(**place), json.dumps(envelope).encode())

    def exists(self, channel: StoreChannel, **place: Any) -> bool:
        return channel.exists(self.at(**place))

    def get(self, channel: StoreChannel, **place: Any) -> T:
        """Returns the stored message.

        Raises StoreError if there is none, MessageError if it is not of this topic's type.
        """
        return self._decode(channel.get_bytes(self.at(**place)), place)

    def get_if_there(self, channel: StoreChannel, **place: Any) -> T | None:
        """Returns the stored message; None if there is none."""
        return self.get(channel, **place) if self.exists(channel, **place) else None

    def wait(self, channel: StoreChannel, timeout_s: float, **place: Any) -> T:
        """Waits for the message. Raises DeadlineExceeded after timeout_s, MessageError as `get`."""
        awaited = self.description.format(**place)
        data = channel.wait_bytes(self.at(**place), timeout_s, awaited)
        return self._decode(data, place)

    async def wait_async(self, channel: StoreChannel, timeout_s: float, **place: Any) -> T:
        """Does the same as `wait` in an event loop, and can be cancelled."""
        awaited = self.description.format(**place)
        data = await channel.wait_bytes_async(self.at(**place), timeout_s, awaited)
        return self._decode(data, place)

    def _decode(self, data: bytes, place: dict[str, Any]) -> T:
        where = f"store key {self.at(**place)}"
        remedy = "run all processes of a run from the same installation"
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MessageError(
                f"{where}: {len(data)} bytes that are not JSON ({error}); {remedy}"
            ) from error
        if not isinstance(envelope, dict) or envelope.keys() != {"message", "fields"}:
            raise MessageError(f"{where}: is no message; {remedy}")
        stored = envelope["message"]
        expected = self.message.__name__
        if stored != expected:
            raise MessageError(f"{where}: holds {stored}, this program reads {expected}; {remedy}")
        try:
            message = msgspec.convert(envelope["fields"], self.message)
        except msgspec.ValidationError as error:
            raise MessageError(f"{where}: {expected} does not fit: {error}; {remedy}") from error
        names = {part.name for part in fields(cast(Any, self.message))}
        if envelope["fields"].keys() != names:
            differing = ", ".join(sorted(envelope["fields"].keys() ^ names))
            raise MessageError(
                f"{where}: {expected} lacks, or does not know, {differing}; {remedy}"
            )
        return message


@dataclass(frozen=True)
class Counter:
    """A key that is only ever added to, atomically, by any process; 0 at first."""

    key: str

    def add(self, channel: StoreChannel, amount: int = 1) -> int:
        """Adds an amount and returns the new sum."""
        return channel.add(self.key, amount)

    def value(self, channel: StoreChannel) -> int:
        return channel.add(self.key, 0)
