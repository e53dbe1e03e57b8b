"""The bytes in which a group travels from coordinator to trainers.

Little endian: a 16-byte envelope - magic `PAGR`, format version u16, reserved u16, CRC-32 of the rest u32, reserved u32 -
followed by a safetensors file with one `identity` tensor (run_seed, iteration, index, prompt_id as int64) and one tensor per
array. What samples share is sent once, and what only trained tokens have is sent for these alone:

    shared   int32 [G]      tokens that a sample has in common with the one before it, all of them untrained
    tokens, trained         of each sample's other tokens
    logprobs, versions, advantages      of the trained tokens

The envelope makes every damaged or foreign payload a GroupFormatError before anything is parsed; there is no pickle anywhere.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save as save_tensors

from pa_npu.samples.types import IDENTITY, NO_VERSION, PER_SAMPLE, PER_TOKEN, Group, GroupFormatError

FORMAT_VERSION = 2
_MAGIC = b"PAGR"
_ENVELOPE = struct.Struct("<4sHHII")
_OF_TRAINED = {"logprobs": 0.0, "versions": NO_VERSION, "advantages": 0.0}  # and what the other tokens have
_DTYPES = PER_TOKEN | PER_SAMPLE | {"shared": np.dtype("<i4")}
_STORED = {"?": "BOOL", "i": "I32", "f": "F32", "b": "BOOL"}
# A group of more tokens than this is damage, not data.
_MOST_TOKENS = 2**31 - 1


def to_bytes(group: Group) -> bytes:
    """The wire format. `from_bytes` gives back an equal group, bit for bit."""
    shared = _shared(group)
    offsets = group.offsets()
    own = np.ones(group.num_tokens, np.bool_)
    for start, length in zip(offsets, shared, strict=False):
        own[start : start + length] = False
    tensors: dict[str, Any] = {
        "identity": np.array([getattr(group, name) for name in IDENTITY], dtype="<i8"),
        "shared": shared,
        "tokens": group.tokens[own],
        "trained": group.trained[own],
    }
    tensors |= {name: getattr(group, name)[group.trained] for name in _OF_TRAINED}
    tensors |= {name: getattr(group, name) for name in PER_SAMPLE}
    payload = save_tensors({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    return _ENVELOPE.pack(_MAGIC, FORMAT_VERSION, 0, zlib.crc32(payload), 0) + payload


def from_bytes(data: bytes | bytearray | memoryview) -> Group:
    """Parses and validates; the arrays are writable and do not alias `data`.

    Raises GroupFormatError, and nothing else, for any bytes that `to_bytes` of this format version did not write.
    """
    view = memoryview(data)
    if len(view) < _ENVELOPE.size:
        raise GroupFormatError(f"group bytes: {len(view)} bytes are shorter than the envelope of {_ENVELOPE.size}")
    magic, version, flags, checksum, reserved = _ENVELOPE.unpack_from(view)
    if magic != _MAGIC:
        raise GroupFormatError(f"group bytes: start with {magic!r} instead of {_MAGIC!r}, this is no group")
    if version != FORMAT_VERSION or flags or reserved:
        raise GroupFormatError(
            f"group bytes: format version {version} (flags {flags}, {reserved}), this program reads version "
            f"{FORMAT_VERSION}; run coordinator and trainers from the same installation"
        )
    payload = bytes(view[_ENVELOPE.size :])
    if zlib.crc32(payload) != checksum:
        raise GroupFormatError(
            f"group bytes: checksum of {len(payload)} payload bytes does not match, they are damaged"
        )
    try:
        tensors = dict(safetensors.deserialize(payload))
    except safetensors.SafetensorError as error:
        raise GroupFormatError(f"group bytes: payload is not safetensors ({error})") from error
    return _group(_arrays(tensors))


def _shared(group: Group) -> np.ndarray:
    """int32 [G]: how many leading untrained tokens each sample has in common with the one before it."""
    shared = np.zeros(group.num_samples, np.int32)
    sequences, prompts = group.sequences(), group.prompt_lengths()
    for number in range(1, group.num_samples):
        limit = min(prompts[number - 1], prompts[number])
        differs = np.flatnonzero(sequences[number - 1][:limit] != sequences[number][:limit])
        shared[number] = differs[0] if len(differs) else limit
    return shared


def _arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors as arrays of the types that they must have."""
    names = {"identity", *_DTYPES}
    if tensors.keys() != names:
        raise GroupFormatError(f"group bytes: tensors {sorted(tensors)}, expected {sorted(names)}")
    arrays = {}
    for name, tensor in tensors.items():
        stored = "I64" if name == "identity" else _STORED[_DTYPES[name].kind]
        if tensor["dtype"] != stored or len(tensor["shape"]) != 1:
            raise GroupFormatError(f"group bytes: {name} is {tensor['dtype']} {tensor['shape']}, expected {stored} [n]")
        raw = np.frombuffer(tensor["data"], np.uint8)
        if stored == "BOOL" and len(raw) and raw.max() > 1:
            raise GroupFormatError(f"group bytes: {name} must be 0 or 1, found {raw.max()}")
        arrays[name] = raw.view("<i8" if name == "identity" else _DTYPES[name])
    if len(arrays["identity"]) != len(IDENTITY):
        raise GroupFormatError(f"group bytes: identity has {len(arrays['identity'])} numbers, expected {len(IDENTITY)}")
    return arrays


def _group(arrays: dict[str, np.ndarray]) -> Group:
    """Undoes what `to_bytes` left out."""
    lengths, shared = arrays["lengths"].astype(np.int64), arrays["shared"].astype(np.int64)
    if len(shared) != len(lengths) or (shared < 0).any() or (shared > lengths).any() or shared[:1].any():
        raise GroupFormatError(
            f"group bytes: shared {shared.tolist()[:8]} does not fit to lengths {lengths.tolist()[:8]}"
        )
    if (shared[1:] > lengths[:-1]).any():
        raise GroupFormatError("group bytes: a sample shares more tokens than the one before it has")
    total = int(lengths.sum())
    if total > _MOST_TOKENS or total - int(shared.sum()) != len(arrays["tokens"]):
        raise GroupFormatError(
            f"group bytes: {len(arrays['tokens'])} tokens, but samples of {total} tokens that share {int(shared.sum())} need "
            f"{total - int(shared.sum())}"
        )
    if len(arrays["trained"]) != len(arrays["tokens"]):
        raise GroupFormatError(
            f"group bytes: trained has {len(arrays['trained'])} values for {len(arrays['tokens'])} tokens"
        )
    tokens, trained = np.empty(total, np.int32), np.zeros(total, np.bool_)
    before = start = taken = 0
    for length, common in zip(lengths.tolist(), shared.tolist(), strict=True):
        if common:
            tokens[start : start + common] = tokens[before : before + common]
        own = length - common
        tokens[start + common : start + length] = arrays["tokens"][taken : taken + own]
        trained[start + common : start + length] = arrays["trained"][taken : taken + own]
        before, start, taken = start, start + length, taken + own
    columns: dict[str, Any] = {}
    for name, elsewhere in _OF_TRAINED.items():
        if len(arrays[name]) != np.count_nonzero(trained):
            raise GroupFormatError(
                f"group bytes: {name} has {len(arrays[name])} values for {np.count_nonzero(trained)} trained tokens"
            )
        columns[name] = np.full(total, elsewhere, _DTYPES[name])
        columns[name][trained] = arrays[name]
    identity: dict[str, Any] = dict(zip(IDENTITY, arrays["identity"].tolist(), strict=True))
    samples: dict[str, Any] = {name: arrays[name].copy() for name in PER_SAMPLE}
    return Group(**identity, tokens=tokens, trained=trained, **columns, **samples)
