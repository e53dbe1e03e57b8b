"""Notice: what trainers get instead of the tokens of a group that is trained by rule.

All advantages of such a group are 0 and nothing else gives it a gradient, so that its gradient is
exactly 0 (Algorithm.needs_every_gradient). Trainers count it in the normaliser and in the
accounting of what was trained (I2), and compute nothing for it.

Its bytes: a 16-byte envelope - magic `PAGN`, format version u16, reserved u16, CRC-32 of the rest
u32, length of the header u32 - then the header as JSON, then, where a checkpoint may have to keep
the group, the group's own wire format (samples/wire.py).
"""

from __future__ import annotations

import struct
import zlib

import msgspec
import numpy as np

from pa_npu.samples.columns import GroupFormatError
from pa_npu.samples.group import Group

_MAGIC = b"PAGN"
_FORMAT_VERSION = 1
_ENVELOPE = struct.Struct("<4sHHII")


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group that is trained by rule, as trainers know it.

    Args:
        iteration, index, prompt_id: as Group has them.
        first: number of the first of these responses in the group.
        rewards: of all samples of the group, from which credit follows.
        response_tokens: trained tokens of each response here.
        leading_tokens: as response_tokens, for the leading component only.
        version_range: as Group.version_range.
    """

    iteration: int
    index: int
    prompt_id: int
    first: int
    rewards: list[float]
    response_tokens: list[int]
    leading_tokens: list[int]
    version_range: tuple[int, ...]

    def __str__(self) -> str:
        return f"group {self.index} of iteration {self.iteration} (prompt {self.prompt_id})"


def is_notice(data: bytes) -> bool:
    """Says whether these are the bytes of a notice, and not those of a group."""
    return data[: len(_MAGIC)] == _MAGIC


def notice_bytes(group: Group, group_bytes: bytes = b"") -> bytes:
    """Returns the notice of a group, or of the part of it that one replica has.

    group_bytes: the group's wire format, to be kept with the notice.
    """
    first, last = group.part or (0, group.num_samples)
    notice = Notice(
        iteration=group.iteration,
        index=group.index,
        prompt_id=group.prompt_id,
        first=first,
        rewards=group.rewards.tolist(),
        response_tokens=group.trained_lengths[first:last].tolist(),
        leading_tokens=group.leading_lengths[first:last].tolist(),
        version_range=group.version_range,
    )
    header = msgspec.json.encode(notice)
    checksum = zlib.crc32(group_bytes, zlib.crc32(header))
    envelope = _ENVELOPE.pack(_MAGIC, _FORMAT_VERSION, 0, checksum, len(header))
    return envelope + header + group_bytes


def read_notice(data: bytes) -> tuple[Notice, bytes]:
    """Returns the notice and the group's wire format, which is empty if it was not kept.

    Raises GroupFormatError for bytes that `notice_bytes` did not write.
    """
    if len(data) < _ENVELOPE.size:
        raise GroupFormatError(
            f"notice bytes: {len(data)} bytes are shorter than the envelope of {_ENVELOPE.size}"
        )
    magic, version, reserved, checksum, length = _ENVELOPE.unpack_from(data)
    if magic != _MAGIC or version != _FORMAT_VERSION or reserved:
        raise GroupFormatError(
            f"notice bytes: start with {magic!r}, format version {version}; this program reads "
            f"{_MAGIC!r}, version {_FORMAT_VERSION}; run coordinator and trainers from the same "
            "installation"
        )
    body = data[_ENVELOPE.size :]
    if zlib.crc32(body) != checksum:
        raise GroupFormatError(
            f"notice bytes: checksum of {len(body)} bytes does not match, they are damaged"
        )
    try:
        notice = msgspec.json.decode(body[:length], type=Notice)
    except msgspec.DecodeError as error:
        raise GroupFormatError(f"notice bytes: the header cannot be read ({error})") from None
    num_lengths = len(notice.response_tokens)
    num_leading = len(notice.leading_tokens)
    num_rewards = len(notice.rewards)
    if not num_lengths or num_lengths != num_leading or notice.first + num_lengths > num_rewards:
        raise GroupFormatError(
            f"notice bytes: {notice} has {num_lengths} lengths from response {notice.first} on, "
            f"{num_leading} leading ones and {num_rewards} rewards"
        )
    if not np.isfinite(notice.rewards).all():
        raise GroupFormatError(f"notice bytes: {notice} has rewards that are not finite")
    return notice, body[length:]
