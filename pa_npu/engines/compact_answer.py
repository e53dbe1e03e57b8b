"""The answer of an engine of this package to a request for responses: token ids and log-probs as arrays.

A client that sends `Accept: application/vnd.pa-npu.responses` gets it in place of the JSON of
/v1/completions, from an engine that knows it. JSON has 82 bytes a token, most of them token
strings, offsets and top log-probs that nobody reads; this has 8, which become arrays in one copy.

    8 bytes     MAGIC
    uint32      length of the header
    header      JSON: Header
    int32       token ids that a prompt with images became, if the header gives their number
    int32       token ids of all responses, one after another
    float32     as many log-probs, if the header says so
    bytes       an .npy file of each response's expert choices, if the header gives their lengths

Numbers are little-endian. Imported by vLLM's API server too, in the engine's own interpreter, hence
the standard library and numpy only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"pa-resp1"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Header:
    """Describes the responses of an answer, in order of their seeds.

    Args:
        id: of the request, as the engine's workers know it.
        texts: of the responses, without an end token.
        finish_reasons: as in /v1/completions: stop, length or abort.
        lengths: tokens of each response.
        has_logprobs: whether log-probs follow the token ids.
        choices_bytes: length of each response's file of expert choices; empty if there is none.
        num_prompt_tokens: of a prompt with images; 0 for all others.
    """

    id: str
    texts: list[str]
    finish_reasons: list[str]
    lengths: list[int]
    has_logprobs: bool
    choices_bytes: list[int]
    num_prompt_tokens: int = 0


@dataclass(frozen=True)
class CompactResponse:
    """One response as the engine has it. expert_choices: an .npy file."""

    text: str
    token_ids: Sequence[int] | npt.NDArray[np.int32]
    finish_reason: str
    logprobs: Sequence[float] | npt.NDArray[np.float32] | None = None
    expert_choices: bytes | None = None


def encode(request: str, responses: Sequence[CompactResponse], prompt: Sequence[int] = ()) -> bytes:
    """Returns the answer to `request`. Either all responses have log-probs, or none.

    prompt: what the engine made of a prompt with images.
    """
    has_logprobs = all(response.logprobs is not None for response in responses)
    files = [response.expert_choices for response in responses if response.expert_choices]
    header = Header(
        id=request,
        texts=[response.text for response in responses],
        finish_reasons=[response.finish_reason for response in responses],
        lengths=[len(response.token_ids) for response in responses],
        has_logprobs=has_logprobs,
        choices_bytes=[len(file) for file in files],
        num_prompt_tokens=len(prompt),
    )
    text = json.dumps(asdict(header)).encode()
    parts = [MAGIC, _LENGTH.pack(len(text)), text, np.asarray(prompt, "<i4").tobytes()]
    parts += [np.asarray(response.token_ids, "<i4").tobytes() for response in responses]
    if has_logprobs:
        parts += [np.asarray(response.logprobs, "<f4").tobytes() for response in responses]
    return b"".join([*parts, *files])


@dataclass(frozen=True)
class CompactAnswer:
    """An answer, read but not checked against what was asked for.

    Args:
        header: of the answer.
        tokens: int32, of all responses, one after another. A view of the answer's bytes.
        logprobs: float32 of the same length, or None.
        expert_choices: an .npy file of each response; empty if the answer has none.
        prompt_tokens: int32, what a prompt with images became; None for all others.
    """

    header: Header
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    expert_choices: list[bytes]
    prompt_tokens: npt.NDArray[np.int32] | None = None


def decode(data: bytes) -> CompactAnswer:
    """Raises ValueError for bytes that are no complete answer."""
    begin = len(MAGIC) + _LENGTH.size
    if len(data) < begin or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC.decode()}")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    offset = begin + length
    if offset > len(data):
        raise ValueError(f"its header has {length} bytes, and {len(data) - begin} follow")
    header = _header(data[begin:offset])
    num_tokens = sum(header.lengths)
    expected = 4 * header.num_prompt_tokens
    expected += 4 * num_tokens * (2 if header.has_logprobs else 1) + sum(header.choices_bytes)
    if len(data) - offset != expected:
        raise ValueError(f"{len(data) - offset} bytes follow its header instead of {expected}")
    prompt_tokens = None
    if header.num_prompt_tokens:
        prompt_tokens = np.frombuffer(data, "<i4", header.num_prompt_tokens, offset)
        offset += 4 * header.num_prompt_tokens
    tokens = np.frombuffer(data, "<i4", num_tokens, offset)
    offset += 4 * num_tokens
    logprobs = None
    if header.has_logprobs:
        logprobs = np.frombuffer(data, "<f4", num_tokens, offset)
        offset += 4 * num_tokens
    files = []
    for length in header.choices_bytes:
        files.append(data[offset : offset + length])
        offset += length
    return CompactAnswer(header, tokens, logprobs, files, prompt_tokens)


def _header(text: bytes) -> Header:
    try:
        fields: Any = json.loads(text)
        header = Header(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from None
    of_text = isinstance(header.id, str) and _all_are(str, header.texts, header.finish_reasons)
    of_numbers = _all_are(int, header.lengths, header.choices_bytes, [header.num_prompt_tokens])
    if not of_text or not of_numbers or not isinstance(header.has_logprobs, bool):
        raise ValueError("its header has a field of another type")
    if min([header.num_prompt_tokens, *header.lengths, *header.choices_bytes]) < 0:
        raise ValueError("its header has a length below 0")
    number = len(header.lengths)
    if len(header.texts) != number or len(header.finish_reasons) != number:
        raise ValueError("its header has other numbers of texts, reasons and lengths")
    if header.choices_bytes and len(header.choices_bytes) != number:
        raise ValueError("its header has expert choices of some responses only")
    return header


def _all_are(kind: type, *lists: Any) -> bool:
    """Returns whether these are lists of exactly this type."""
    return all(
        isinstance(values, list) and all(type(v) is kind for v in values) for values in lists
    )
