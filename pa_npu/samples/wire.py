"""The bytes in which a group travels from coordinator to trainers.

Little endian: a 16-byte envelope - magic `PAGR`, format version u16, reserved u16, CRC-32 of the
rest u32, reserved u32 - followed by a safetensors file. What samples share is sent once, what only
trained tokens have is sent for these alone, and what stays the same along a run of trained tokens
once per run. A run is one sample's: its first token is never trained.

    numbers    int64 [5 or 7]    run_seed, iteration, index, prompt_id, and G, the number of samples; where several replicas train
                                 the group, also which samples this one trains, from one number to
                                 before another
    spans      int32 [G + R, 3]  of each sample: its tokens, how many of them it shares with the one before it, finished;
                                 of each run: its first token in the group, its tokens, the weight
                                 version
    values     float32 [G + R]   each sample's reward, each run's advantage
    tokens     int32             of each sample, those that it does not share
    logprobs   float32           of the trained tokens; 0 of one that the policy did not write, whose run has the version -1
    components uint8 [R]         each run's component of the loss; left out where all are 1
    weight     float32           of the trained tokens; left out where all are 1
    NAME       its dtype         every declared column: of the trained tokens, of all, or of context, of those that a sample does
                                 not share (samples/columns.py)

Where something is attached (samples/attachments.py), and only there:

    placeholders       int32 [B, 3]   of each run and array that it stands for: the run's first token in the group, its tokens,
                                      the array's number
    digests            uint8 [A, 16]  of each array, once however many samples show it
    attachments/N/NAME its dtype      array number N, of any shape

Shared are leading tokens before the first that the policy wrote, up to a run that stands for other
arrays. A reader that names the columns of its task gets those and no others. The envelope makes
every damaged or foreign payload a GroupFormatError before anything is parsed, and digests are
computed again from the arrays that arrived. There is no pickle anywhere.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import safetensors

from pa_npu.samples.attachments import DIGEST_BYTES, Attachment, Placeholders
from pa_npu.samples.columns import (
    ADVANTAGES,
    LOGPROBS,
    NONE,
    STORED,
    STORED_TYPES,
    VERSIONS,
    WEIGHT,
    Column,
    GroupFormatError,
    RunColumns,
)
from pa_npu.samples.group import IDENTITY, Group

FORMAT_VERSION = 4
_READABLE = (3, 4)
"""3 had no components, weight or attachments, and is otherwise the same: checkpoints of earlier
releases have groups in it.
"""
_MAGIC = b"PAGR"
_ENVELOPE = struct.Struct("<4sHHII")
_SPAN_NUMBERS = 3
# The tensors that every group has.
_FRAME = (
    Column("numbers", "int64"),
    Column("spans", "int32", (_SPAN_NUMBERS,)),
    Column("values", "float32"),
    Column("tokens", "int32"),
)
# Tensors that a group has only where they say something.
_COMPONENTS = Column("components", "uint8")
_BINDING_NUMBERS = 3
_PLACEHOLDERS = Column("placeholders", "int32", (_BINDING_NUMBERS,))
_NO_BINDINGS = np.zeros((0, _BINDING_NUMBERS), np.int32)
_DIGESTS = Column("digests", "uint8", (DIGEST_BYTES,))
_OPTIONAL = {column.name: column for column in (_COMPONENTS, WEIGHT, _PLACEHOLDERS, _DIGESTS)}
# Numbers of more digits are refused before they are read.
_ATTACHMENT_NAME = re.compile(r"attachments/(\d{1,9})/(\w+)")
_TYPES = {stored: dtype for dtype, stored in STORED_TYPES.items()}
Tensors = dict[str, np.ndarray]
# A group of more tokens than this is damage, not data.
_MOST_TOKENS = 2**31 - 1


def to_bytes(group: Group, columns: RunColumns = NONE) -> bytes:
    """The wire format. `from_bytes` gives back an equal group, bit for bit.

    Raises GroupFormatError where the group lacks a declared column, or has another.
    """
    columns.check((LOGPROBS, *group.columns), str(group))
    starts, ends = group.runs
    spans = np.empty((group.num_samples + len(starts), _SPAN_NUMBERS), "<i4")
    samples, runs = spans[: group.num_samples], spans[group.num_samples :]
    samples[:, 0], samples[:, 1], samples[:, 2] = group.lengths, _shared(group), group.finished
    runs[:, 0], runs[:, 1], runs[:, 2] = starts, ends - starts, group.versions[starts]
    places = zip(pairwise(group.offsets().tolist()), samples[:, 1].tolist(), strict=True)
    own = [slice(start + shared, end) for (start, end), shared in places]
    tensors = {
        "numbers": np.array(
            [*(getattr(group, name) for name in IDENTITY), group.num_samples, *(group.part or ())],
            "<i8",
        ),
        "spans": spans,
        "values": np.concatenate([group.rewards, group.advantages[starts]]),
        "tokens": np.concatenate([group.tokens[span] for span in own]),
        "logprobs": group.logprobs[group.trained],
        **{
            column.name: _sent(column, values, group.trained, own)
            for column in columns.carried
            if (values := group.columns.get(column)) is not None
        },
    }
    components = group.component[starts]
    if (components != 1).any():
        tensors[_COMPONENTS.name] = components
    if group.weight is not None:
        tensors[WEIGHT.name] = group.weight[group.trained]
    if group.placeholders:
        tensors.update(_attached(group))
    return _framed(tensors)


def _attached(group: Group) -> Tensors:
    """The tensors of the group's attachments, of which each array is there once."""
    numbers = {attachment.digest: n for n, attachment in enumerate(group.attachments)}
    bindings = [
        (run.start, run.length, numbers[attachment.digest])
        for run in group.placeholders
        for attachment in run.attachments
    ]
    digests = b"".join([attachment.digest for attachment in group.attachments])
    tensors = {
        _PLACEHOLDERS.name: np.array(bindings, "<i4"),
        _DIGESTS.name: np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
    }
    for number, attachment in enumerate(group.attachments):
        tensors[f"attachments/{number}/{attachment.name}"] = attachment.array
    return tensors


def _sent(column: Column, values: np.ndarray, trained: np.ndarray, own: list[slice]) -> np.ndarray:
    if column.tokens == "context":
        return np.concatenate([values[span] for span in own])
    return values[trained] if column.tokens == "trained" else np.ascontiguousarray(values)


def _framed(tensors: Tensors) -> bytes:
    """The safetensors file is written here, and copied once: safetensors' own `save` takes twice as
    long, and copies it twice.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": STORED_TYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    head = msgspec.json.encode(header)
    pieces: list[bytes | memoryview] = [
        struct.pack("<Q", len(head)),
        head,
        *(t.data for t in tensors.values()),
    ]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([_ENVELOPE.pack(_MAGIC, FORMAT_VERSION, 0, checksum, 0), *pieces])


def from_bytes(data: bytes | bytearray | memoryview, columns: RunColumns = NONE) -> Group:
    """Parses and validates; the arrays are writable and do not alias `data`.

    Raises GroupFormatError, and nothing else, for any bytes that `to_bytes` of a readable version
    did not write. columns: what the run declares; those that the task does not read are left out.
    """
    return _group(*_read(data, columns), columns)


def _read(
    data: bytes | bytearray | memoryview, columns: RunColumns
) -> tuple[Tensors, dict[Column, np.ndarray], list[Attachment]]:
    """The arrays of the frame, the columns that the task reads, and the attachments by number."""
    view = memoryview(data)
    if len(view) < _ENVELOPE.size:
        raise GroupFormatError(
            f"group bytes: {len(view)} bytes are shorter than the envelope of {_ENVELOPE.size}"
        )
    magic, version, flags, checksum, reserved = _ENVELOPE.unpack_from(view)
    if magic != _MAGIC:
        raise GroupFormatError(
            f"group bytes: start with {magic!r} instead of {_MAGIC!r}, this is no group"
        )
    if version not in _READABLE or flags or reserved:
        raise GroupFormatError(
            f"group bytes: format version {version} ({flags}, {reserved}), this program reads "
            f"versions {' and '.join(map(str, _READABLE))}; run coordinator and trainers from the "
            "same installation, and a run from the checkpoint of one that is not newer"
        )
    payload = bytes(view[_ENVELOPE.size :])
    if zlib.crc32(payload) != checksum:
        raise GroupFormatError(
            f"group bytes: checksum of {len(payload)} payload bytes does not match, they are "
            "damaged"
        )
    try:
        tensors = dict(safetensors.deserialize(payload))
    except safetensors.SafetensorError as error:
        raise GroupFormatError(f"group bytes: payload is not safetensors ({error})") from error
    frame = {one.name: _array(one, tensors.pop(one.name)) for one in _FRAME if one.name in tensors}
    optional = {
        name: _array(one, tensors.pop(name)) for name, one in _OPTIONAL.items() if name in tensors
    }
    attachments = _attachments(tensors, optional) if _DIGESTS.name in optional else []
    found = {columns.named(name, "group bytes"): tensor for name, tensor in tensors.items()}
    # in the order of their declaration: safetensors gives them in none
    named = [(column, found[column]) for column in (LOGPROBS, *columns.carried) if column in found]
    of_tokens = {column: _array(column, one) for column, one in named if columns.wants(column)}
    return {**_checked(frame), **optional}, of_tokens, attachments


def _attachments(tensors: dict[str, Any], optional: Tensors) -> list[Attachment]:
    """Takes the attachments out of the tensors, by number.

    Raises GroupFormatError unless they are those whose digests were sent.
    """
    by_number: dict[int, Attachment] = {}
    for tensor_name in list(tensors):
        match = _ATTACHMENT_NAME.fullmatch(tensor_name)
        if match is None:
            continue
        number, tensor = int(match[1]), tensors.pop(tensor_name)
        if number in by_number:
            raise GroupFormatError(f"group bytes: {tensor_name} is a second attachment {number}")
        by_number[number] = Attachment(match[2], _array_of_any_shape(tensor_name, tensor))
    digests = optional[_DIGESTS.name]
    if sorted(by_number) != list(range(len(digests))):
        raise GroupFormatError(
            f"group bytes: attachments {sorted(by_number)[:8]} for {len(digests)} digests"
        )
    attachments = [by_number[number] for number in range(len(digests))]
    for number, (attachment, digest) in enumerate(zip(attachments, digests, strict=True)):
        if attachment.digest != digest.tobytes():
            raise GroupFormatError(
                f"group bytes: attachment {number} ({attachment.name}) has the digest "
                f"{attachment.digest.hex()} instead of {digest.tobytes().hex()}; its array was "
                "changed after it was attached, or on its way"
            )
    return attachments


def _array_of_any_shape(name: str, tensor: dict[str, Any]) -> np.ndarray:
    try:
        return np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]]).reshape(tensor["shape"])
    except (LookupError, ValueError, OverflowError):
        raise GroupFormatError(
            f"group bytes: {name} is {tensor['dtype']} {tensor['shape']!s:.80}, expected a shape "
            f"that numpy has and a type among {', '.join(_TYPES)}"
        ) from None


def _placeholders(
    bindings: np.ndarray, attachments: Sequence[Attachment]
) -> tuple[Placeholders, ...]:
    """The runs of int32 [B, 3] bindings, each with all its attachments.

    Raises GroupFormatError for one of an array that is not there, and for an array without any.
    """
    by_span: dict[tuple[int, int], list[Attachment]] = {}
    numbers = set()
    for start, length, number in bindings.tolist():
        if not 0 <= number < len(attachments):
            raise GroupFormatError(
                f"group bytes: placeholders from token {start} on stand for attachment {number}, "
                f"of {len(attachments)}"
            )
        by_span.setdefault((start, length), []).append(attachments[number])
        numbers.add(number)
    if len(numbers) < len(attachments):
        raise GroupFormatError(
            f"group bytes: {len(attachments)} attachments, of which {len(numbers)} have "
            "placeholders"
        )
    return tuple(
        Placeholders(start, length, attached) for (start, length), attached in by_span.items()
    )


def _shared(group: Group) -> list[int]:
    """[G]: how many tokens before the first that the policy wrote each sample has in common with
    the one before it.
    """
    offsets, prompts, keys = group.offsets().tolist(), group.prompt_lengths(), group.prefix_keys
    shared, before = [0], keys[: prompts[0]].tobytes()
    for start, length in zip(offsets[1:], prompts[1:], strict=False):
        prompt = keys[start : start + length].tobytes()
        # nearly always the same prompt
        shared.append(length if prompt == before else _common(before, prompt, keys.dtype))
        before = prompt
    return shared


def _common(one: bytes, other: bytes, dtype: np.dtype[Any]) -> int:
    """Leading keys that two prompts share."""
    shorter = min(len(one), len(other)) // dtype.itemsize
    differs = np.frombuffer(one, dtype, shorter) != np.frombuffer(other, dtype, shorter)
    return int(differs.argmax()) if differs.any() else shorter


def _array(column: Column, tensor: dict[str, Any]) -> np.ndarray:
    shape = tensor["shape"]
    if tensor["dtype"] != STORED[column.dtype] or not shape or tuple(shape[1:]) != column.shape:
        wanted = f"{STORED[column.dtype]} [{', '.join(['n', *map(str, column.shape)])}]"
        raise GroupFormatError(
            f"group bytes: {column.name} is {tensor['dtype']} {shape}, expected {wanted}"
        )
    return np.frombuffer(tensor["data"], column.type).reshape(shape)


def _checked(frame: Tensors) -> Tensors:
    if len(frame) != len(_FRAME):
        raise GroupFormatError(
            f"group bytes: tensors {sorted(frame)}, expected "
            f"{sorted(column.name for column in _FRAME)}"
        )
    if len(frame["numbers"]) not in (len(IDENTITY) + 1, len(IDENTITY) + 3):
        raise GroupFormatError(
            f"group bytes: numbers has {len(frame['numbers'])} values, expected "
            f"{len(IDENTITY) + 1} or {len(IDENTITY) + 3}"
        )
    return frame


def _group(
    arrays: Tensors,
    of_tokens: Mapping[Column, np.ndarray],
    attachments: Sequence[Attachment],
    columns: RunColumns,
) -> Group:
    """Undoes what `to_bytes` left out."""
    numbers = arrays["numbers"].tolist()
    identity, num_samples, part = (
        numbers[: len(IDENTITY)],
        numbers[len(IDENTITY)],
        tuple(numbers[len(IDENTITY) + 1 :]),
    )
    spans, values = arrays["spans"], arrays["values"]
    if not 0 < num_samples <= len(spans) or len(values) != len(spans):
        raise GroupFormatError(
            f"group bytes: {len(spans)} spans and {len(values)} values for {num_samples} samples"
        )
    lengths, finished = spans[:num_samples, 0].copy(), spans[:num_samples, 2]
    if ((finished != 0) & (finished != 1)).any():
        raise GroupFormatError(
            f"group bytes: finished must be 0 or 1, found {finished.tolist()[:8]}"
        )
    shared = spans[:num_samples, 1].tolist()
    tokens = _all_tokens("tokens", lengths.tolist(), shared, arrays["tokens"])
    rows, run_lengths = _trained_rows(spans[num_samples:], len(tokens))
    component = np.zeros(len(tokens), np.uint8)
    component[rows] = 1
    if (components := arrays.get(_COMPONENTS.name)) is not None:
        if len(components) != len(run_lengths):
            raise GroupFormatError(
                f"group bytes: {len(components)} components for {len(run_lengths)} runs"
            )
        component[rows] = np.repeat(components, run_lengths)
    weight = arrays.get(WEIGHT.name)
    bindings = arrays.get(_PLACEHOLDERS.name, _NO_BINDINGS)
    sampled: dict[Column, Any] = {
        LOGPROBS: np.float32(0),
        **of_tokens,
        VERSIONS: np.repeat(spans[num_samples:, 2], run_lengths),
        ADVANTAGES: np.repeat(values[num_samples:], run_lengths),
    }
    full = {
        column: _all_tokens(column.name, lengths.tolist(), shared, found)
        if column.tokens == "context"
        else _full(column, found, len(tokens), rows)
        for column, found in sampled.items()
    }
    fixed: dict[str, Any] = {
        column.name: full.pop(column) for column in (LOGPROBS, VERSIONS, ADVANTAGES)
    }
    group = Group(
        **dict(zip(IDENTITY, identity, strict=True)),
        lengths=lengths,
        tokens=tokens,
        component=component,
        weight=None if weight is None else _full(WEIGHT, weight, len(tokens), rows),
        **fixed,
        rewards=values[:num_samples].copy(),
        finished=finished.astype(np.bool_),
        part=part or None,
        columns=full,
        placeholders=_placeholders(bindings, attachments),
    )
    columns.check(tuple(of_tokens), str(group))
    return group


def _full(column: Column, values: np.ndarray, num_tokens: int, rows: np.ndarray) -> np.ndarray:
    """[num_tokens, *shape]. values: of the trained tokens, which are at `rows`, one for all of
    them, or of all tokens.
    """
    wanted = len(rows) if column.tokens == "trained" else num_tokens
    if values.ndim and len(values) != wanted:
        raise GroupFormatError(
            f"group bytes: {column.name} has {len(values)} values for {wanted} {column.tokens} "
            "tokens"
        )
    if column.tokens == "all":
        return values.copy()
    full = column.blank(num_tokens)
    full[rows] = values
    return full


def _all_tokens(name: str, lengths: list[int], shared: list[int], own: np.ndarray) -> np.ndarray:
    """[sum of lengths, ...]: each sample's tokens, or a column of them, from those that only it
    has.
    """
    before = 0
    for length, common in zip(lengths, shared, strict=True):
        if not 0 <= common <= min(before, length):
            raise GroupFormatError(
                f"group bytes: shared {shared[:8]} does not fit to lengths {lengths[:8]}: a sample "
                f"of {length} tokens, after one of {before}, shares {common}"
            )
        before = length
    total = sum(lengths)
    if total > _MOST_TOKENS or total - sum(shared) != len(own):
        raise GroupFormatError(
            f"group bytes: {len(own)} {name}, but samples of {total} tokens that share "
            f"{sum(shared)} need {total - sum(shared)}"
        )
    tokens = np.empty((total, *own.shape[1:]), own.dtype)
    before = start = taken = 0
    for length, common in zip(lengths, shared, strict=True):
        middle, end = start + common, start + length
        tokens[start:middle] = tokens[before : before + common]
        tokens[middle:end] = own[taken : taken + length - common]
        before, start, taken = start, end, taken + length - common
    return tokens


def _trained_rows(runs: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [N] where the runs' tokens are in the group, int64 [R] their numbers)."""
    starts, lengths = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
    ends = starts + lengths
    if (
        not len(runs)
        or (lengths < 1).any()
        or starts[0] < 0
        or (starts[1:] < ends[:-1]).any()
        or ends[-1] > num_tokens
    ):
        raise GroupFormatError(
            f"group bytes: runs {runs[:8, :2].tolist()} of trained tokens must follow one another "
            f"within {num_tokens} tokens"
        )
    taken = np.cumsum(lengths)
    return np.arange(taken[-1]) + np.repeat(starts - taken + lengths, lengths), lengths
