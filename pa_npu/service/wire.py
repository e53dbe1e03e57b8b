"""The wire of tinker's SDK: requests as its messages have them, answers as its client reads them.

Tested with SDK 0.38. Training requests and the answers with arrays are protocol buffers, everything
else is JSON. Both are read strictly: a field that is not known here is refused by its name, because
a client that sends one expects it to be obeyed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

SUPPORTED_SDK = "0.38"
"""The release of the SDK, up to its second number."""
PROTOBUF = "application/x-protobuf"
KEY_PREFIX = "tml-"
"""The SDK sends no key that begins otherwise."""
PATH_PREFIX = "tinker://"
MISSING_LOGPROB = -99999.0
"""The log-prob in an empty cell of a table of the most likely tokens."""

MAX_LIKELY_TOKENS = 1024
"""How many of the most likely tokens of a place a client may ask for."""
_MAX_FIELDS = 2**22
_VARINT_BYTES = 10


class Refused(Exception):
    """A request that is not served. The message says what, which rule, and the remedy.

    status: of the answer. The SDK repeats a request after 408, 409, 429 and 5xx, and after no other.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_sdk(version: str) -> None:
    """Raises Refused for an SDK whose wire was not tested."""
    if version.split(".")[:2] != SUPPORTED_SDK.split("."):
        raise Refused(
            f"sdk_version: {version[:40]!r} speaks another wire than {SUPPORTED_SDK}, the one that "
            f"this server was tested with; install tinker=={SUPPORTED_SDK}.0"
        )


# Requests in JSON

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Metadata = dict[str, Any] | None


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all requests in JSON; `type` is what some of them repeat of their route."""

    type: str | None = None


class ClientConfig(Request):
    sdk_version: str


class CreateSession(Request):
    sdk_version: str
    tags: list[str] = []
    user_metadata: Metadata = None
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(Request):
    session_id: Name


class ModelRequest(Request):
    model_id: Name


class Adapters(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["adamw"] = "adamw"


class CreateModel(Request):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    user_metadata: Metadata = None
    lora_config: Adapters | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class AdamParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Of one step, with the SDK's defaults. grad_clip_norm: 0 clips nothing."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-12
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Request):
    model_id: Name
    seq_id: Number
    adam_params: AdamParameters


class SaveWeights(Request):
    model_id: Name
    seq_id: Number
    path: Name | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Request):
    model_id: Name
    seq_id: Number
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Request):
    path: Name
    optimizer: bool
    model_id: Name | None = None
    seq_id: Number | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Name | None = None
    user_metadata: Metadata = None
    optimizer_config: OptimizerChoice | None = None


class CreateSamplingSession(Request):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class TextChunk(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[TextChunk]

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return np.array([token for chunk in self.chunks for token in chunk.tokens], np.int32)


class SamplingParameters(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**24)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**61)] | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_k: Literal[-1] = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Sample(Request):
    """A request for samples. Fields of the wire that this server does not serve may have the value
    alone that asks for nothing.
    """

    sampling_session_id: Name
    seq_id: Number
    prompt: Prompt
    sampling_params: SamplingParameters
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIKELY_TOKENS)] = 0
    topk_sample_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIKELY_TOKENS)] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(Request):
    request_id: Name
    allow_metadata_only: bool = False


class WeightsInfo(Request):
    tinker_path: Name


Body = Annotated[Any, "one of the classes above"]


def read_json(body: bytes, kind: type[Any]) -> Any:
    """Returns a request of this kind. Raises Refused, which names the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(f"{kind.__name__}: {str(error)[:300]}") from None


def write_json(answer: object) -> bytes:
    return msgspec.json.encode(answer)


# Protocol buffers: numbers of fields, and what is in them


def _fields(data: memoryview, message: str) -> Iterator[tuple[int, int | memoryview]]:
    """Yields number and content of a message's fields: bytes of those with a length, else the
    integer whose bits were sent. Raises Refused.
    """
    place = 0
    broken = Refused(f"{message}: the message cannot be read; was it cut off?")
    for _ in range(_MAX_FIELDS):
        if place == len(data):
            return
        tag, place = _varint(data, place, broken)
        number, form = tag >> 3, tag & 7
        if form == 0:
            value, place = _varint(data, place, broken)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(form)
        if form == 2:
            length, place = _varint(data, place, broken)
        if length is None or length > len(data) - place:
            raise broken
        content = data[place : place + length]
        place += length
        yield number, content if form == 2 else int.from_bytes(content, "little")
    raise Refused(f"{message}: more than {_MAX_FIELDS:,} fields; send smaller requests")


def _varint(data: memoryview, place: int, broken: Refused) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(data[place : place + _VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value & (2**64 - 1), place + number + 1
    raise broken


def _content(value: int | memoryview, message: str, number: int) -> memoryview:
    if isinstance(value, int):
        raise Refused(f"{message}: field {number} has another type than this server knows")
    return value


def _text(value: int | memoryview, message: str, number: int) -> str:
    try:
        return str(_content(value, message, number), "utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{message}: field {number} is no text") from None


def _integer(value: int | memoryview, message: str, number: int) -> int:
    if not isinstance(value, int):
        raise Refused(f"{message}: field {number} has another type than this server knows")
    return value


def _unknown(message: str, number: int) -> Refused:
    return Refused(
        f"{message}: field {number} is not known to this server, which speaks the wire of SDK "
        f"{SUPPORTED_SDK}; leave it out"
    )


_FLOAT32 = 1
_INT64 = 2
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence with what a loss reads of it.

    tokens: int32 [N], the model's input.
    inputs: arrays by name, of any shape, as the client sent them.
    sampled: ids of the sampled sequences that the client says these tokens come from.
    """

    tokens: npt.NDArray[np.int32]
    inputs: Mapping[str, npt.NDArray[Any]]
    sampled: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A call of forward, or of forward and backward. config: the loss's parameters by name."""

    model_id: str
    seq_id: int
    loss: str
    data: list[Datum]
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(body: bytes, max_data: int) -> ForwardBackward:
    """Returns the request in a body. Raises Refused."""
    name = "forward_backward"
    values: dict[int, Any] = {1: "", 2: 0, 4: "", 6: 0}
    data: list[Datum] = []
    config: dict[str, float | str] = {}
    older: dict[str, float | str] = {}
    for number, value in _fields(memoryview(body), name):
        if number in (1, 4):
            values[number] = _text(value, name, number)
        elif number in (2, 6):
            values[number] = _integer(value, name, number)
        elif number == 3:
            if len(data) == max_data:
                raise Refused(f"data: more than {max_data:,} datums in one request; send fewer")
            data.append(_datum(_content(value, name, number), f"data[{len(data)}]"))
        elif number in (5, 7):
            key, entry = _entry(_content(value, name, number), "loss_fn_config", _number_or_text)
            (config if number == 7 else older)[key] = entry
        else:
            raise _unknown(name, number)
    if not config:
        config = older
    elif any(config.get(key) != entry for key, entry in older.items()):
        raise Refused("loss_fn_config: its two forms differ; send one of them")
    if not 1 <= values[2] < 2**31:
        raise Refused(f"seq_id: {values[2]} must be from 1 to 2**31 - 1")
    if not values[1]:
        raise Refused("model_id: it is missing")
    if not data:
        raise Refused("data: a call needs at least one datum")
    return ForwardBackward(values[1], values[2], values[4], data, config, bool(values[6]))


def _entry(data: memoryview, name: str, read: Any) -> tuple[str, Any]:
    """Returns key and value of a map's entry."""
    key, content = "", None
    for number, value in _fields(data, name):
        if number == 1:
            key = _text(value, name, number)
        elif number == 2:
            content = value
        else:
            raise _unknown(name, number)
    return key, read(content, f"{name}.{key}")


def _number_or_text(content: int | memoryview | None, name: str) -> float | str:
    """Returns a parameter of a loss: the older form is a number's bits, the newer one a message."""
    if isinstance(content, int):
        return _double(content)
    found: float | str | None = None
    for number, value in _fields(content if content is not None else memoryview(b""), name):
        if number == 1:
            found = _double(_integer(value, name, number))
        elif number == 2:
            found = _text(value, name, number)
        else:
            raise _unknown(name, number)
    if found is None:
        raise Refused(f"{name}: it has no value")
    return found


def _double(bits: int) -> float:
    (value,) = struct.unpack("<d", (bits & (2**64 - 1)).to_bytes(8, "little"))
    return float(value)


def _datum(data: memoryview, name: str) -> Datum:
    tokens: list[npt.NDArray[np.int32]] = []
    inputs: dict[str, npt.NDArray[Any]] = {}
    sampled: list[str] = []
    for number, value in _fields(data, name):
        content = _content(value, name, number)
        if number == 1:
            tokens.append(_chunk(content, f"{name}.model_input"))
        elif number == 2:
            key, array = _entry(content, f"{name}.loss_fn_inputs", _tensor)
            inputs[key] = array
        elif number in (3, 4):
            sampled += _sampled_sequences(content, f"{name}.spans")
        else:
            raise _unknown(name, number)
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    return Datum(joined, inputs, tuple(dict.fromkeys(sampled)))


def _chunk(data: memoryview, name: str) -> npt.NDArray[np.int32]:
    tokens = np.zeros(0, np.int32)
    for number, value in _fields(data, name):
        if number in (2, 3):
            kind = "an image" if number == 2 else "audio"
            raise Refused(f"{name}: {kind} is not served; send text alone")
        if number != 1:
            raise _unknown(name, number)
        for inner, content in _fields(_content(value, name, number), name):
            if inner != 1:
                raise _unknown(name, inner)
            tokens = _array(_content(content, name, inner), np.dtype("<i4"), name)
    return tokens


def _tensor(content: int | memoryview | None, name: str) -> npt.NDArray[Any]:
    dense = memoryview(b"")
    kind = 0
    shape: list[int] = []
    for number, value in _fields(
        content if isinstance(content, memoryview) else memoryview(b""), name
    ):
        if number == 1:
            dense = _content(value, name, number)
        elif number == 2:
            raise Refused(f"{name}: a sparse tensor is not served; send a dense one")
        elif number == 3:
            kind = _integer(value, name, number)
        elif number == 4:
            shape += _integers(value, name)
        else:
            raise _unknown(name, number)
    if kind not in _DTYPES:
        raise Refused(f"{name}: dtype {kind} is not served; send float32 or int64")
    array = _array(dense, _DTYPES[kind], name)
    shape = shape or [len(array)]
    if len(shape) > 2 or min(shape) < 0 or int(np.prod(shape)) != len(array):
        raise Refused(f"{name}: {len(array)} values do not have the shape {shape[:8]}")
    return array.reshape(shape)


def _integers(value: int | memoryview, name: str) -> list[int]:
    """Returns the integers of a repeated field, packed or not."""
    if isinstance(value, int):
        return [value if value < 2**63 else value - 2**64]
    place = 0
    numbers = []
    while place < len(value):
        number, place = _varint(value, place, Refused(f"{name}: its shape cannot be read"))
        numbers.append(number if number < 2**63 else number - 2**64)
    return numbers


def _array(data: memoryview, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise Refused(f"{name}: {len(data)} bytes are no {dtype.name} values")
    return np.frombuffer(data, dtype)


def _sampled_sequences(data: memoryview, name: str) -> Iterator[str]:
    for number, value in _fields(data, name):
        if number not in (1, 2):
            raise _unknown(name, number)
        for inner, content in _fields(_content(value, name, number), name):
            if inner == 1 and number == 2:
                yield _text(content, name, inner)


# Answers in protocol buffers


def _key(number: int, form: int) -> bytes:
    return _as_varint(number << 3 | form)


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes_field(number: int, content: bytes) -> bytes:
    return _key(number, 2) + _as_varint(len(content)) + content


def _int_field(number: int, value: int) -> bytes:
    return _key(number, 0) + _as_varint(value) if value else b""


def write_forward_backward(
    logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]
) -> bytes:
    """Returns an answer with the log-probs of every datum, [N] or [N, K], and metrics by name."""
    parts = [_bytes_field(1, b"ArrayRecord")]
    start = 0
    for end in range(1, len(logprobs) + 1):
        # a record holds datums of one trailing shape
        if end == len(logprobs) or logprobs[end].shape[1:] != logprobs[start].shape[1:]:
            parts.append(_bytes_field(2, _record(logprobs[start:end])))
            start = end
    for name, value in metrics.items():
        number = _key(2, 1) + struct.pack("<d", value)
        parts.append(_bytes_field(3, _bytes_field(1, name.encode()) + number))
    return b"".join(parts)


def _record(arrays: Sequence[npt.NDArray[np.float32]]) -> bytes:
    offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
    batched = _bytes_field(1, b"".join(array.astype("<f4").tobytes() for array in arrays))
    batched += _bytes_field(2, offsets.tobytes()) + _int_field(3, _FLOAT32)
    for size in arrays[0].shape[1:]:
        batched += _key(4, 0) + _as_varint(size)
    entry = _bytes_field(1, b"logprobs") + _bytes_field(2, batched)
    return _bytes_field(2, entry) + _int_field(3, len(arrays))


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """A sampled sequence. likely: ids and log-probs [R, K] of each place's most likely tokens."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stopped: bool
    likely: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None


def write_samples(
    sequences: Sequence[SampledTokens],
    prompt_logprobs: npt.NDArray[np.float32] | None,
    likely: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None,
) -> bytes:
    """Returns an answer with sampled sequences. prompt_logprobs: [P], NaN where there is none.
    likely: as in SampledTokens, of the prompt.
    """
    parts = []
    for sequence in sequences:
        content = _int_field(1, 0 if sequence.stopped else 1)
        content += _bytes_field(2, sequence.tokens.astype("<i4").tobytes())
        content += _bytes_field(3, sequence.logprobs.astype("<f4").tobytes())
        if sequence.likely is not None:
            content += _bytes_field(4, _likely(*sequence.likely))
        parts.append(_bytes_field(1, content))
    if prompt_logprobs is not None:
        parts.append(_bytes_field(2, prompt_logprobs.astype("<f4").tobytes()))
    if likely is not None:
        parts.append(_bytes_field(3, _likely(*likely)))
    return b"".join(parts)


def _likely(tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> bytes:
    content = _bytes_field(1, tokens.astype("<i4").tobytes())
    content += _bytes_field(2, logprobs.astype("<f4").tobytes())
    return content + _int_field(3, tokens.shape[1]) + _int_field(4, len(tokens))
