"""Topic: a key of the store with the one dataclass that is put there; how processes exchange typed messages.

    MEMBERS = Topic("publish/{version}/{attempt}/members", Members, "engines that can load weight version {version}")

    MEMBERS.put(channel, Members(epoch=0, workers=2), version=3, attempt=0)
    members = MEMBERS.wait(channel, timeout_s, version=3, attempt=0)

A topic is a module constant next to its dataclass, so that a key is spelled once. What is stored is JSON with the message's name
and format: a program of another version, or a foreign writer, ends in one MessageError instead of a KeyError far from the cause.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from string import Formatter
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pa_npu.control.channel import StoreChannel
from pa_npu.errors import PaNpuError

T = TypeVar("T")


class MessageError(PaNpuError):
    """A key of the store holds something else than the message that belongs there."""


@dataclass(frozen=True)
class Topic(Generic[T]):
    """A family of keys, and what is stored under each.

    key: template; its fields are the keyword arguments of every method. message: a frozen dataclass. what: completes "waited 3 s
    for ...", sender included, with the key's fields. format: raise it whenever the dataclass changes.

    Fields of a message are int, float, str, bool, None, Any, dataclasses of these, and their tuple[X, ...], list[X],
    dict[str, X] and unions.
    """

    key: str
    message: type[T]
    what: str
    format: int = 1

    def at(self, **place: Any) -> str:
        """The key. Raises TypeError where a field is missing or unknown."""
        return self.key.format(**self._checked(place))

    def put(self, channel: StoreChannel, message: T, **place: Any) -> None:
        """Replaces an earlier message."""
        if type(message) is not self.message:
            raise TypeError(f"{self.key}: {type(message).__name__} is not a {self.message.__name__}")
        envelope = {"message": self.message.__name__, "format": self.format, "fields": asdict(cast(Any, message))}
        channel.put_bytes(self.at(**place), json.dumps(envelope).encode())

    def exists(self, channel: StoreChannel, **place: Any) -> bool:
        return channel.exists(self.at(**place))

    def delete(self, channel: StoreChannel, **place: Any) -> bool:
        return channel.delete(self.at(**place))

    def get(self, channel: StoreChannel, **place: Any) -> T:
        """The message that is there. Raises StoreError when none is, MessageError when it is none of this topic's."""
        return self._decode(channel.get_bytes(self.at(**place)), place)

    def get_if_there(self, channel: StoreChannel, **place: Any) -> T | None:
        return self.get(channel, **place) if self.exists(channel, **place) else None

    def wait(self, channel: StoreChannel, timeout_s: float, **place: Any) -> T:
        """Raises DeadlineExceeded after timeout_s, MessageError as `get`."""
        return self._decode(channel.wait_bytes(self.at(**place), timeout_s, self._described(place)), place)

    async def wait_async(self, channel: StoreChannel, timeout_s: float, **place: Any) -> T:
        """`wait` for the event loop: cancellable."""
        return self._decode(await channel.wait_bytes_async(self.at(**place), timeout_s, self._described(place)), place)

    def _described(self, place: Mapping[str, Any]) -> str:
        return self.what.format(**place)

    def _checked(self, place: dict[str, Any]) -> dict[str, Any]:
        names = {name for _, name, _, _ in Formatter().parse(self.key) if name is not None}
        if names != place.keys():
            raise TypeError(f"{self.key}: got {sorted(place)}, needs {sorted(names)}")
        return place

    def _decode(self, data: bytes, place: dict[str, Any]) -> T:
        where = f"store key {self.at(**place)}"
        remedy = "run all processes of a run from the same installation"
        try:
            envelope = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"{where}: {len(data)} bytes that are no JSON ({error}); {remedy}") from error
        if not isinstance(envelope, dict) or envelope.keys() != {"message", "format", "fields"}:
            raise MessageError(f"{where}: is no message; {remedy}")
        found = f"{envelope['message']} of format {envelope['format']}"
        expected = f"{self.message.__name__} of format {self.format}"
        if found != expected:
            raise MessageError(f"{where}: holds {found}, this program reads {expected}; {remedy}")
        try:
            return cast(T, read_fields(self.message, envelope["fields"]))
        except ValueError as error:
            raise MessageError(f"{where}: {expected} has {error}; {remedy}") from error


@dataclass(frozen=True)
class Counter:
    """A key that is only ever added to, atomically, by any process; 0 at first."""

    key: str

    def add(self, channel: StoreChannel, amount: int = 1) -> int:
        """The sum, this amount included."""
        return channel.add(self.key, amount)

    def value(self, channel: StoreChannel) -> int:
        return channel.add(self.key, 0)


def read_fields(kind: Any, value: Any, path: str = "") -> Any:
    """`value` as JSON gave it, as an object of type `kind`. Raises ValueError naming the field that does not fit."""
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, path)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, path)
    if origin in (tuple, list):
        item = arguments[0] if arguments[-1:] == (Ellipsis,) or origin is list else None
        if not isinstance(value, list) or (item is None and len(value) != len(arguments)):
            raise _misfit(kind, value, path)
        kinds = [item] * len(value) if item is not None else list(arguments)
        parts = [read_fields(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True))]
        return tuple(parts) if origin is tuple else parts
    if origin is dict:
        if not isinstance(value, dict):
            raise _misfit(kind, value, path)
        return {name: read_fields(arguments[1], part, f"{path}[{name}]") for name, part in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (type(None) if kind is None else kind):
        raise _misfit(kind, value, path)
    return value


def _read_dataclass(kind: Any, value: Any, path: str) -> Any:
    names = [part.name for part in fields(kind)]
    if not isinstance(value, dict) or value.keys() != set(names):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"fields {found}{' in ' + path if path else ''} instead of {sorted(names)}")
    hints = get_type_hints(kind)
    return kind(**{name: read_fields(hints[name], value[name], f"{path}.{name}".lstrip(".")) for name in names})


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return read_fields(others[0], value, path)
    for kind in others:
        try:
            return read_fields(kind, value, path)
        except ValueError:
            continue
    raise _misfit(" or ".join(map(_name, kinds)), value, path)


def _misfit(kind: Any, value: Any, path: str) -> ValueError:
    shown = repr(value)
    return ValueError(
        f"{path or 'a value'} = {shown[:60]}{'...' if len(shown) > 60 else ''}, which is no {_name(kind)}"
    )


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
