"""Attachments: named arrays of any shape, such as an image's pixels, that stand behind placeholder tokens of a sample.

    tokens        p0 p1 i  i  i  i  p2 a0 a1      i: one id, the same for every image
    placeholders        start 2, length 4 ──> pixels float32 [16, 1176], grid int64 [1, 3]

A model computes a run of placeholder tokens from its arrays, so that token ids do not say what a
sample begins with. Beginnings are equal where tokens and arrays are: `prefix_keys`. Everything
between who shows an array and the model that reads it carries it without knowing it.

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

    name: an identifier. array: any shape, C-contiguous, of a type in columns.STORED.
    digest: bytes [16], BLAKE2b of name, type, shape and bytes of the array.

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
    """A run of placeholder tokens and the arrays that it stands for, at least one, by name.

    start: the run's first token, counted in the tokens that the run is given with: those of one
    `show`, of a sample, or of a group. length: of the run, in tokens.

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
        """The digests of the run's attachments: equal where all its arrays are."""
        return b"".join([attachment.digest for attachment in self.attachments])

    def moved(self, by: int) -> Placeholders:
        """The same run in tokens before which `by` others stand."""
        return replace(self, start=self.start + by)

    def key(self, first_token: int) -> int:
        """A negative number of 63 bits that says what the run is: its length, its first token and
        what its arrays hold.
        """
        about = struct.pack("<qq", self.length, first_token) + self.content
        digest = hashlib.blake2b(about, digest_size=8).digest()
        return -1 - (int.from_bytes(digest, "little") >> 1)


def arranged(
    placeholders: Iterable[Placeholders], num_tokens: int, about: object
) -> tuple[Placeholders, ...]:
    """The runs by where they start. Attachments that were given for the same tokens become one run.

    about: what has the tokens, for messages. Raises GroupFormatError for a run that is not within
    num_tokens tokens, and for two that overlap.
    """
    by_span: dict[tuple[int, int], Placeholders] = {}
    for run in placeholders:
        if run.end > num_tokens:
            raise GroupFormatError(
                f"{about} {run}: must lie within {num_tokens} tokens; correct start or length"
            )
        same = by_span.get((run.start, run.length))
        if same is not None:
            run = replace(run, attachments=(*same.attachments, *run.attachments))
        by_span[run.start, run.length] = run
    ordered = [by_span[span] for span in sorted(by_span)]
    for before, run in pairwise(ordered):
        if run.start < before.end:
            raise GroupFormatError(
                f"{about} {run}: overlap those from token {before.start} on, {before.length} "
                "tokens; a token stands for one run's attachments"
            )
    return tuple(ordered)


def prefix_keys(
    tokens: npt.NDArray[np.int32], placeholders: Sequence[Placeholders]
) -> npt.NDArray[np.integer[Any]]:
    """Returns what two sequences must have in common to have a beginning in common, [tokens].

    The tokens themselves where nothing is attached. Otherwise int64 in which a run's first token is
    a number that says what the run stands for, so that sequences part there unless they show the
    same arrays.
    """
    if not placeholders:
        return tokens
    keys = tokens.astype(np.int64)
    for run in placeholders:
        keys[run.start] = run.key(int(tokens[run.start]))
    return keys


def within(placeholders: Sequence[Placeholders], start: int, end: int) -> tuple[Placeholders, ...]:
    """The runs that start in tokens [start, end), counted from `start` on."""
    return tuple(run.moved(-start) for run in placeholders if start <= run.start < end)


def distinct(placeholders: Sequence[Placeholders]) -> tuple[Attachment, ...]:
    """The attachments of these runs, each array once, in the order in which they come first."""
    by_digest: dict[bytes, Attachment] = {}
    for run in placeholders:
        for attachment in run.attachments:
            by_digest.setdefault(attachment.digest, attachment)
    return tuple(by_digest.values())


def described(placeholders: Sequence[Placeholders]) -> list[dict[str, Any]]:
    """What records say of attachments, as JSON: where they stand and what they are, no values."""
    return [
        {
            "start": run.start,
            "length": run.length,
            "name": attachment.name,
            "dtype": attachment.array.dtype.name,
            "shape": list(attachment.array.shape),
            "digest": attachment.digest.hex(),
        }
        for run in placeholders
        for attachment in run.attachments
    ]
