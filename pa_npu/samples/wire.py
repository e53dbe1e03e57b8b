"""The bytes in which a group travels from coordinator to trainers.

Little endian: a 16-byte envelope - magic `PAGR`, format version u16, reserved u16, CRC-32 of the
rest u32, reserved u32 - followed by a safetensors file. Tokens that samples share are sent once.
Values that only trained tokens have are sent for these alone, and values that stay the same along
a run of trained tokens once per run. A run belongs to one sample, because the first token of a
sample is never trained.

    numbers    int64 [5 or 7]    run_seed, iteration, index, prompt_id, and G, the number of
                                 samples; if several replicas train the group, also the first
                                 sample that this one trains and the one after its last
    spans      int32 [G + R, 3]  of each sample: its tokens, how many of them it shares with the
                                 sample before it, finished; of each run: its first token in the
                                 group, its tokens, the weight version
    values     float32 [G + R]   each sample's reward, each run's advantage
    tokens     int32             of each sample, those that it does not share
    logprobs   float32           of the trained tokens; 0 for tokens that the policy did not write,
                                 whose run has the version -1
    components uint8 [R]         each run's component of the loss; left out if all are 1
    weight     float32           of the trained tokens; left out if all are 1
    NAME       its dtype         every declared column (samples/columns.py): of the trained tokens,
                                 or of all; columns of context of the tokens that a sample does not
                                 share

Only if something is attached (samples/attachments.py):

    placeholders       int32 [B, 3]   of each run and array that it stands for: the run's first
                                      token in the group, its tokens, the array's number
    digests            uint8 [A, 16]  of each array, once however many samples show it
    attachments/N/NAME its dtype      array number N, of any shape

Samples share leading tokens before the first that the policy wrote, up to a run that stands for
other arrays. A reader that names the columns of its task gets those and no others. The envelope
makes every damaged or foreign payload a GroupFormatError before anything is parsed, and digests are
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
from pa_npu.samples.wire_rows import full_column, restored, shared_lengths, trained_rows

FORMAT_VERSION = 4
_READABLE = (3, 4)
"""Version 3 had no components, weight or attachments, and is otherwise the same. Checkpoints of
earlier releases hold groups in it.
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
_OPTIONAL = (_COMPONENTS, WEIGHT, _PLACEHOLDERS, _DIGESTS)
# Numbers of more digits are refused before they are read.
_ATTACHMENT_NAME = re.compile(r"attachments/(\d{1,9})/(\w+)")
_TYPES = {stored: dtype for dtype, stored in STORED_TYPES.items()}
Tensors = dict[str, np.ndarray]


def to_bytes(group: Group, columns: RunColumns = NONE) -> bytes:
    """Returns the wire format, from which `from_bytes` makes an equal group, bit for bit.

    Raises GroupFormatError if the group lacks a declared column or has an undeclared one.
    """
    columns.check((LOGPROBS, *group.columns), str(group))
    starts, ends = group.runs
    spans = np.empty((group.num_samples + len(starts), _SPAN_NUMBERS), "<i4")
    samples = spans[: group.num_samples]
    samples[:, 0] = group.lengths
    num_shared = shared_lengths(group)
    samples[:, 1] = num_shared
    samples[:, 2] = group.finished
    runs = spans[group.num_samples :]
    runs[:, 0] = starts
    runs[:, 1] = ends - starts
    runs[:, 2] = group.versions[starts]
    places = zip(pairwise(group.offsets().tolist()), num_shared, strict=True)
    unshared = [slice(start + shared, end) for (start, end), shared in places]
    identity = [getattr(group, name) for name in IDENTITY]
    numbers = [*identity, group.num_samples, *(group.part or ())]
    tensors = {
        "numbers": np.array(numbers, "<i8"),
        "spans": spans,
        "values": np.concatenate([group.rewards, group.advantages[starts]]),
        "tokens": np.concatenate([group.tokens[span] for span in unshared]),
        "logprobs": group.logprobs[group.trained],
    }
    for column in columns.carried:
        if column in group.columns:
            values = group.columns[column]
            tensors[column.name] = _sent_values(column, values, group.trained, unshared)
    components = group.component[starts]
    if (components != 1).any():
        tensors[_COMPONENTS.name] = components
    if group.weight is not None:
        tensors[WEIGHT.name] = group.weight[group.trained]
    if group.placeholders:
        tensors.update(_attachment_tensors(group))
    return _framed(tensors)


def _attachment_tensors(group: Group) -> Tensors:
    """Returns the tensors of the group's attachments, in which each array is there once."""
    numbers = {attachment.digest: n for n, attachment in enumerate(group.attachments)}
    bindings = []
    for run in group.placeholders:
        for attachment in run.attachments:
            bindings.append((run.start, run.length, numbers[attachment.digest]))
    digests = b"".join([attachment.digest for attachment in group.attachments])
    tensors = {
        _PLACEHOLDERS.name: np.array(bindings, "<i4"),
        _DIGESTS.name: np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
    }
    for number, attachment in enumerate(group.attachments):
        tensors[f"attachments/{number}/{attachment.name}"] = attachment.array
    return tensors


def _sent_values(
    column: Column, values: np.ndarray, trained: np.ndarray, unshared: list[slice]
) -> np.ndarray:
    if column.tokens == "context":
        return np.concatenate([values[span] for span in unshared])
    if column.tokens == "trained":
        return values[trained]
    return np.ascontiguousarray(values)


def _framed(tensors: Tensors) -> bytes:
    """Writes envelope and safetensors file, copying the tensors once. The `save` of safetensors
    copies them twice and takes twice as long.
    """
    header = {}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": STORED_TYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    head = msgspec.json.encode(header)
    pieces: list[bytes | memoryview] = [struct.pack("<Q", len(head)), head]
    pieces += [tensor.data for tensor in tensors.values()]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([_ENVELOPE.pack(_MAGIC, FORMAT_VERSION, 0, checksum, 0), *pieces])


def from_bytes(data: bytes | bytearray | memoryview, columns: RunColumns = NONE) -> Group:
    """Parses and validates a group; its arrays are writable and do not alias `data`.

    columns: those that the run declares; the ones that the task does not read are left out.

    Raises GroupFormatError, and nothing else, for any bytes that `to_bytes` of a readable version
    did not write.
    """
    frame, declared_columns, attachments = _parsed(_payload(data), columns)
    return _group(frame, declared_columns, attachments, columns)


def _payload(data: bytes | bytearray | memoryview) -> bytes:
    """Returns the safetensors file in an envelope that is whole and readable.

    Raises GroupFormatError for any other.
    """
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
    return payload


def _parsed(
    payload: bytes, columns: RunColumns
) -> tuple[Tensors, dict[Column, np.ndarray], list[Attachment]]:
    """Returns the arrays of the frame, the columns that the task reads, and the attachments by
    number.
    """
    try:
        tensors = dict(safetensors.deserialize(payload))
    except safetensors.SafetensorError as error:
        raise GroupFormatError(f"group bytes: payload is not safetensors ({error})") from error
    frame = _popped(tensors, _FRAME)
    optional = _popped(tensors, _OPTIONAL)
    attachments = _attachments(tensors, optional) if _DIGESTS.name in optional else []
    sent = {columns.named(name, "group bytes"): tensor for name, tensor in tensors.items()}
    declared_columns = {}
    # in the order of their declaration, as safetensors keeps none
    for column in (LOGPROBS, *columns.carried):
        if column in sent and columns.wants(column):
            declared_columns[column] = _array(column, sent[column])
    return {**_checked(frame), **optional}, declared_columns, attachments


def _popped(tensors: dict[str, Any], columns: Sequence[Column]) -> Tensors:
    """Takes those of these columns that are there out of the tensors."""
    return {
        column.name: _array(column, tensors.pop(column.name))
        for column in columns
        if column.name in tensors
    }


def _attachments(tensors: dict[str, Any], optional: Tensors) -> list[Attachment]:
    """Takes the attachments out of the tensors and returns them by number.

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
    """Returns the runs of int32 [B, 3] bindings, each with all its attachments.

    Raises GroupFormatError for a binding of an array that is not there, and for an array without a
    binding.
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


def _array(column: Column, tensor: dict[str, Any]) -> np.ndarray:
    shape = tensor["shape"]
    stored = STORED[column.dtype]
    if tensor["dtype"] != stored or not shape or tuple(shape[1:]) != column.shape:
        sizes = ", ".join(["n", *map(str, column.shape)])
        raise GroupFormatError(
            f"group bytes: {column.name} is {tensor['dtype']} {shape}, expected {stored} [{sizes}]"
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
    declared_columns: Mapping[Column, np.ndarray],
    attachments: Sequence[Attachment],
    columns: RunColumns,
) -> Group:
    """Makes the group, for which it restores what `to_bytes` left out."""
    identity = arrays["numbers"][: len(IDENTITY)].tolist()
    num_samples, *part = arrays["numbers"][len(IDENTITY) :].tolist()
    spans = arrays["spans"]
    values = arrays["values"]
    if not 0 < num_samples <= len(spans) or len(values) != len(spans):
        raise GroupFormatError(
            f"group bytes: {len(spans)} spans and {len(values)} values for {num_samples} samples"
        )
    lengths = spans[:num_samples, 0].copy()
    finished = spans[:num_samples, 2]
    if ((finished != 0) & (finished != 1)).any():
        raise GroupFormatError(
            f"group bytes: finished must be 0 or 1, found {finished.tolist()[:8]}"
        )
    shared = spans[:num_samples, 1].tolist()
    tokens = restored("tokens", lengths.tolist(), shared, arrays["tokens"])
    rows, run_lengths = trained_rows(spans[num_samples:], len(tokens))
    weight = arrays.get(WEIGHT.name)
    sent: dict[Column, Any] = {
        LOGPROBS: np.float32(0),
        **declared_columns,
        VERSIONS: np.repeat(spans[num_samples:, 2], run_lengths),
        ADVANTAGES: np.repeat(values[num_samples:], run_lengths),
    }
    full = {}
    for column, sent_values in sent.items():
        if column.tokens == "context":
            full[column] = restored(column.name, lengths.tolist(), shared, sent_values)
        else:
            full[column] = full_column(column, sent_values, len(tokens), rows)
    group = Group(
        **dict(zip(IDENTITY, identity, strict=True)),
        lengths=lengths,
        tokens=tokens,
        component=_component(arrays.get(_COMPONENTS.name), len(tokens), rows, run_lengths),
        weight=None if weight is None else full_column(WEIGHT, weight, len(tokens), rows),
        logprobs=full.pop(LOGPROBS),
        versions=full.pop(VERSIONS),
        advantages=full.pop(ADVANTAGES),
        rewards=values[:num_samples].copy(),
        finished=finished.astype(np.bool_),
        part=tuple(part) or None,
        columns=full,
        placeholders=_placeholders(arrays.get(_PLACEHOLDERS.name, _NO_BINDINGS), attachments),
    )
    columns.check(tuple(declared_columns), str(group))
    return group


def _component(
    components: np.ndarray | None, num_tokens: int, rows: np.ndarray, run_lengths: np.ndarray
) -> np.ndarray:
    """Returns uint8 [num_tokens]: the component of each token. components: of each run; None if
    all are 1.
    """
    component = np.zeros(num_tokens, np.uint8)
    if components is None:
        component[rows] = 1
        return component
    if len(components) != len(run_lengths):
        raise GroupFormatError(
            f"group bytes: {len(components)} components for {len(run_lengths)} runs"
        )
    component[rows] = np.repeat(components, run_lengths)
    return component
