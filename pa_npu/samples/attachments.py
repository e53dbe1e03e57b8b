"""Attachments: named arrays of any shape, such as pixels, behind placeholder tokens of a sample.

    tokens        p0 p1 i  i  i  i  p2 a0 a1      i: one id, the same for every image
    placeholders        start 2, length 4 ──> pixels float32 [16, 1176], grid int64 [1, 3]

A model computes a run of placeholder tokens from its arrays, so that token ids do not say what a
sample begins with. Two beginnings are equal if tokens and arrays are equal (`prefix_keys`).
Everything between who shows an array and the model that reads it carries it without knowing it.

An attachment is told from others by its digest. A group has each array once, however many of its
samples show it, and so have its bytes, the buffer and a microbatch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.samples.columns import STORED, STORED_TYPES, GroupFormatError

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Attachment:
    """A named array, read only. Make it once for all samples that show it: its digest takes time.

    name: an identifier. array: of any shape, C-contiguous, of a type in columns.STORED.
    digest: bytes [16], BLAKE2b of the array's name, type, shape and bytes.

    Raises GroupFormatError for an array that cannot travel.
    """

    name: str
    array: npt.NDArray[Any] = field(repr=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise GroupFormatError(
                f"attachment {self.name!r}: its name must be an identifier, such as pixels"
            )
        if not isinstance(self.array, np.ndarray):
            raise GroupFormatError(
                f"attachment {self.name}: must be a numpy array, found "
                f"{type(self.array).__name__}; convert it"
            )
        if self.array.dtype not in STORED_TYPES:
            raise GroupFormatError(
                f"attachment {self.name}: its type {self.array.dtype} must be little endian and "
                f"one of {', '.join(STORED)}; convert it"
            )
        if not self.array.flags.c_contiguous:
            raise GroupFormatError(
                f"attachment {self.name}: its array {list(self.array.shape)} is not contiguous; "
                "give np.ascontiguousarray of it"
            )
        about = f"{self.name} {self.array.dtype.name} {list(self.array.shape)}\n"
        digest = hashlib.blake2b(about.encode(), digest_size=DIGEST_BYTES)
        digest.update(self.array.data)
        object.__setattr__(self, "digest", digest.digest())


@dataclass(frozen=True, eq=False)
class Placeholders:
    """A run of placeholder tokens and the arrays that it stands for.

    start: the run's first token, counted in the tokens that the run is given with: those of one
    `show`, of a sample, or of a group. length: number of tokens of the run.
    attachments: at least one array, sorted by name.

    Raises GroupFormatError for a run that no tokens can have.
    """

    start: int
    length: int
    attachments: Sequence[Attachment]

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise GroupFormatError(
                f"{self}: a run begins at token 0 or later and has at least one token"
            )
        if not self.attachments:
            raise GroupFormatError(f"{self}: a run stands for at least one attachment")
        by_name = {attachment.name: attachment for attachment in self.attachments}
        if len(by_name) < len(self.attachments):
            names = sorted(attachment.name for attachment in self.attachments)
            repeated = next(name for name in names if names.count(name) > 1)
            raise GroupFormatError(
                f"{self}: two attachments of the run have the name {repeated}; give each its own"
            )
        ordered = tuple(by_name[name] for name in sorted(by_name))
        object.__setattr__(self, "attachments", ordered)

    def __str__(self) -> str:
        return f"placeholders from token {self.start} on, {self.length} tokens"

    @property
    def end(self) -> int:
        """The token after the run."""
        return self.start + self.length

    @cached_property
    def content(self) -> bytes:
        """The digests of the run's attachments: equal for runs whose arrays are all equal."""
        return b"".join([attachment.digest for attachment in self.attachments])

    def moved(self, by: int) -> Placeholders:
        """Returns the same run in tokens that begin `by` tokens earlier."""
        return replace(self, start=self.start + by)

    def key(self, first_token: int) -> int:
        """Returns a negative number of 63 bits that follows from the run's length, its first token
        and its arrays.
        """
        about = struct.pack("<qq", self.length, first_token) + self.content
        digest = hashlib.blake2b(about, digest_size=8).digest()
        return -1 - (int.from_bytes(digest, "little") >> 1)


def arranged(
    placeholders: Iterable[Placeholders], num_tokens: int, owner: object
) -> tuple[Placeholders, ...]:
    """Returns the runs in the order of their starts. Attachments that were given for the same
    tokens become one run.

    owner: whose tokens these are, for messages. Raises GroupFormatError for a run that is not
    within num_tokens tokens, and for two runs that overlap.
    """
    by_span: dict[tuple[int, int], Placeholders] = {}
    for run in placeholders:
        if run.end > num_tokens:
            raise GroupFormatError(
                f"{owner} {run}: must lie within {num_tokens} tokens; correct start or length"
            )
        same = by_span.get((run.start, run.length))
        if same is not None:
            run = replace(run, attachments=(*same.attachments, *run.attachments))
        by_span[run.start, run.length] = run
    ordered = [by_span[span] for span in sorted(by_span)]
    for previous, run in pairwise(ordered):
        if run.start < previous.end:
            raise GroupFormatError(
                f"{owner} {run}: overlap those from token {previous.start} on, {previous.length} "
                "tokens; a token stands for one run's attachments"
            )
    return tuple(ordered)


def prefix_keys(
    tokens: npt.NDArray[np.int32], placeholders: Sequence[Placeholders]
) -> npt.NDArray[np.int64]:
    """Returns int64 [tokens]: the keys by which beginnings of sequences are compared.

    They are the tokens, except for each run's first one. Its key says what the run stands for, so
    that sequences part there unless they show the same arrays.
    """
    keys = tokens.astype(np.int64)
    for run in placeholders:
        keys[run.start] = run.key(int(tokens[run.start]))
    return keys


def within(placeholders: Sequence[Placeholders], start: int, end: int) -> tuple[Placeholders, ...]:
    """Returns the runs that start in tokens [start, end), counted from `start` on."""
    return tuple(run.moved(-start) for run in placeholders if start <= run.start < end)


def distinct(placeholders: Sequence[Placeholders]) -> tuple[Attachment, ...]:
    """Returns the attachments of these runs, each array once, in the order of their first use."""
    by_digest: dict[bytes, Attachment] = {}
    for run in placeholders:
        for attachment in run.attachments:
            by_digest.setdefault(attachment.digest, attachment)
    return tuple(by_digest.values())


def described(placeholders: Sequence[Placeholders]) -> list[dict[str, Any]]:
    """Describes attachments for records, as JSON: their places and their kinds, but no values."""
    described_attachments = []
    for run in placeholders:
        for attachment in run.attachments:
            description = {
                "start": run.start,
                "length": run.length,
                "name": attachment.name,
                "dtype": attachment.array.dtype.name,
                "shape": list(attachment.array.shape),
                "digest": attachment.digest.hex(),
            }
            described_attachments.append(description)
    return described_attachments
