"""Group: a prompt with its G rewarded responses, and the bytes in which it travels from coordinator to trainer.

Wire format (little endian): a 16-byte envelope - magic `PAGR`, format version u16, reserved u16, CRC-32 of the rest
u32, reserved u32 - followed by a safetensors file with one `header` tensor (iteration, version, index, prompt_id as
int64) and one tensor per array. The envelope makes every damaged or foreign payload a `GroupFormatError` before
anything is parsed; there is no pickle anywhere.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save as save_tensors

from pa_npu.errors import PaNpuError

FORMAT_VERSION = 1
_MAGIC = b"PAGR"
_ENVELOPE = struct.Struct("<4sHHII")
_HEADER_FIELDS = ("iteration", "version", "index", "prompt_id")
# Array name -> (safetensors type, numpy type). The order is also the order of validation.
_ARRAYS: dict[str, tuple[str, np.dtype[Any]]] = {
    "prompt_tokens": ("I32", np.dtype("<i4")),
    "response_tokens": ("I32", np.dtype("<i4")),
    "response_lengths": ("I32", np.dtype("<i4")),
    "logprobs": ("F32", np.dtype("<f4")),
    "rewards": ("F32", np.dtype("<f4")),
    "advantages": ("F32", np.dtype("<f4")),
    "finished": ("U8", np.dtype("u1")),
}


class GroupFormatError(PaNpuError):
    """A group's bytes or arrays break a rule of the wire format; the message names the field and the values."""


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt, its G responses, their rewards and advantages: the unit of dispatch and of the buffer.

    Construction validates everything, so a Group that exists is well-formed on both sides of the wire.

    iteration, version: the iteration that trains it, and the weight version that generated it (I1 compares them).
    index: dispatch index within the iteration, 0 .. prompts_per_iteration - 1. prompt_id: row of the dataset.
    prompt_tokens: int32 [P]. response_tokens: int32 [sum R], the responses one after another.
    response_lengths: int32 [G], each at least 1. logprobs: float32 [sum R], of the sampling distribution (engine).
    rewards, advantages: float32 [G]. finished: uint8 [G], 1 = ended by itself, 0 = cut at the length limit.
    """

    iteration: int
    version: int
    index: int
    prompt_id: int
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    response_lengths: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    finished: np.ndarray

    def __post_init__(self) -> None:
        for name in _HEADER_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
                raise GroupFormatError(f"group {name}: {value!r} must be an integer between 0 and 2**63 - 1")
            object.__setattr__(self, name, int(value))
        for name, (_, dtype) in _ARRAYS.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise GroupFormatError(f"{self} {name}: must be a {dtype.name} array [n], found {found}")
        self._check_arrays()

    def _check_arrays(self) -> None:
        num_responses = len(self.response_lengths)
        if num_responses == 0:
            raise GroupFormatError(f"{self} response_lengths: a group needs at least one response")
        if len(self.prompt_tokens) == 0:
            raise GroupFormatError(f"{self} prompt_tokens: a prompt needs at least one token")
        if (shortest := self.response_lengths.min()) < 1:
            raise GroupFormatError(
                f"{self} response_lengths: every response needs at least one token, shortest is {shortest}"
            )
        total = int(self.response_lengths.sum(dtype=np.int64))
        for name, wanted in (
            ("response_tokens", total),
            ("logprobs", total),
            ("rewards", num_responses),
            ("advantages", num_responses),
            ("finished", num_responses),
        ):
            if len(getattr(self, name)) != wanted:
                raise GroupFormatError(
                    f"{self} {name}: {len(getattr(self, name))} values, but {num_responses} responses of together "
                    f"{total} tokens need {wanted}"
                )
        for name in ("prompt_tokens", "response_tokens"):
            if (lowest := getattr(self, name).min()) < 0:
                raise GroupFormatError(f"{self} {name}: token ids must not be negative, lowest is {lowest}")
        for name in ("logprobs", "rewards", "advantages"):
            finite = np.isfinite(getattr(self, name))
            if not finite.all():
                position = int(finite.argmin())
                raise GroupFormatError(
                    f"{self} {name}: values must be finite, number {position} is {getattr(self, name)[position]}"
                )
        if self.finished.max() > 1:
            raise GroupFormatError(f"{self} finished: must be 0 or 1, found {self.finished.max()}")

    def __str__(self) -> str:
        return f"group {self.index} of iteration {self.iteration} (prompt {self.prompt_id}, version {self.version})"

    @property
    def num_responses(self) -> int:
        """G."""
        return len(self.response_lengths)

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_tokens)

    @property
    def num_sample_tokens(self) -> int:
        """Prompt and response tokens with the prompt counted once per sample: the numerator of TPSPD."""
        return self.num_responses * len(self.prompt_tokens) + len(self.response_tokens)

    def response_offsets(self) -> np.ndarray:
        """int64 [G + 1]: response i is `response_tokens[offsets[i]:offsets[i + 1]]`."""
        offsets = np.zeros(self.num_responses + 1, dtype=np.int64)
        np.cumsum(self.response_lengths, dtype=np.int64, out=offsets[1:])
        return offsets

    def to_bytes(self) -> bytes:
        """The wire format. Inverse of `from_bytes`, bit for bit."""
        tensors: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        tensors["header"] = np.array([getattr(self, name) for name in _HEADER_FIELDS], dtype="<i8")
        payload = save_tensors(tensors)
        return _ENVELOPE.pack(_MAGIC, FORMAT_VERSION, 0, zlib.crc32(payload), 0) + payload

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Group:
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
        return cls._from_tensors(tensors)

    @classmethod
    def _from_tensors(cls, tensors: dict[str, Any]) -> Group:
        if tensors.keys() != {"header", *_ARRAYS}:
            raise GroupFormatError(f"group bytes: tensors {sorted(tensors)}, expected {sorted({'header', *_ARRAYS})}")
        header = tensors.pop("header")
        if header["dtype"] != "I64" or header["shape"] != [len(_HEADER_FIELDS)]:
            raise GroupFormatError(f"group bytes: header is {header['dtype']} {header['shape']}, expected I64 [4]")
        arrays: dict[str, Any] = {}
        for name, tensor in tensors.items():
            stored, dtype = _ARRAYS[name]
            if tensor["dtype"] != stored or len(tensor["shape"]) != 1:
                raise GroupFormatError(
                    f"group bytes: {name} is {tensor['dtype']} {tensor['shape']}, expected {stored} [n]"
                )
            arrays[name] = np.frombuffer(tensor["data"], dtype=dtype)
        values = np.frombuffer(header["data"], dtype="<i8").tolist()
        return cls(**dict(zip(_HEADER_FIELDS, values, strict=True)), **arrays)
