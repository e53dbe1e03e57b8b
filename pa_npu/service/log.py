"""The log of a service: everything that was accepted, written and synced before it is acknowledged.

    file      a record after another:  length u32 | CRC-32 u32 | MessagePack
    Accepted  a request, with what the server decided about it (seed, version, number)
    Begun     the request is being carried out; not synced, since it only counts ends of processes
    Finished  its answer
    Kept      a slot's state is in a file that has all its requests up to a number
    Ended     a session is over; its slots are free
    Dropped   a request waited too long for one before it

A record that was being written when the process died is at the end and incomplete, and was not
acknowledged: it is cut off. Any other damage is an error.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from pa_npu.checkpoints.whole_files import sync_directory, write_whole
from pa_npu.errors import DataError

_HEAD = struct.Struct("<II")


class Accepted(msgspec.Struct, tag=True):
    """id: of the request, by which a client finds its answer. owner: the session. model: whose
    order it is in, or empty. seq: its number there. digest: of its content. body: the content.
    decided: what the server chose. time_s: when, on the clock of the day.
    """

    route: str
    id: str
    owner: str
    model: str
    seq: int
    digest: bytes
    body: bytes
    decided: dict[str, int | str]
    time_s: float


class Begun(msgspec.Struct, tag=True):
    id: str


class Finished(msgspec.Struct, tag=True):
    """is_json: whether the content is JSON rather than a protocol buffer. error: in words. failed:
    whether the trainers could not carry it out for a reason that is not in the request, such as
    memory. It has changed nothing then, and no start carries it out again.
    """

    id: str
    content: bytes = b""
    is_json: bool = False
    error: str | None = None
    failed: bool = False


class Kept(msgspec.Struct, tag=True):
    model: str
    seq: int
    file: str


class Ended(msgspec.Struct, tag=True):
    owner: str


class Dropped(msgspec.Struct, tag=True):
    """A request that will not be carried out, since one before it did not come."""

    id: str


Record = Accepted | Begun | Finished | Kept | Ended | Dropped


class Log:
    """The log of a run directory, open for appending. Close it."""

    def __init__(self, file: Path) -> None:
        """Cuts an incomplete record off the end. Raises DataError for other damage."""
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = []
        end = 0
        if file.exists():
            data = file.read_bytes()
            for record, end in _read(data, file):  # noqa: B007  # where the last one ends
                self.records.append(record)
        self._stream = file.open("ab")
        self._stream.truncate(end)
        sync_directory(file.parent)

    def write(self, record: Record) -> None:
        """Appends a record and waits until the disk has it; a Begun may be lost with the machine."""
        self._stream.write(_encode(record))
        self._stream.flush()
        if not isinstance(record, Begun):
            os.fsync(self._stream.fileno())

    @property
    def num_bytes(self) -> int:
        return self._stream.tell()

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replaces the log by these records, as a whole."""
        self._stream.close()
        write_whole(self._file, b"".join(map(_encode, records)))
        self._stream = self._file.open("ab")

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _encode(record: Record) -> bytes:
    content = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _read(data: bytes, file: Path) -> Iterator[tuple[Record, int]]:
    """Yields every record with where it ends."""
    place = 0
    decoder = msgspec.msgpack.Decoder(Record)
    while place + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, place)
        start = place + _HEAD.size
        if start + length > len(data):
            return
        content = data[start : start + length]
        place = start + length
        if zlib.crc32(content) != checksum:
            if place == len(data):
                return
            raise DataError(
                f"service log: {file}: the record at byte {start} is damaged; restore the file from a "
                "backup, or begin with another run.dir"
            )
        yield decoder.decode(content), place
