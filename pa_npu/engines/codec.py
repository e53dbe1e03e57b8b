"""Requests for responses, and their answers: encodes the former, decodes and checks the latter.

An answer is the JSON of /v1/completions as vLLM's server has it, or arrays (compact_answer) from an
engine that knows that form. A checked response has a length within what was asked for, token ids
within the vocabulary, and possible log-probs.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines import compact_answer
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.images import RequestImage, as_fields
from pa_npu.engines.protocol import NO_TOKENS, EngineError, Generation, Sampling

SERVED_MODEL = "policy"
"""The name under which every engine serves the model."""
# A log-prob may exceed 0 by rounding of the log-softmax; bf16 engines compute it in fp32.
LOGPROB_ROUNDING = 1e-4
# vLLM replaces -inf by this, which a sampled token cannot have.
_LOGPROB_CLAMP = -9999.0
# abort: how vLLM ends a response that is cut
_REASONS: dict[str | None, Literal["stop", "length", "cut"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "cut",
}


class LogProbs(msgspec.Struct, gc=False):
    token_logprobs: list[float]


class Answered(msgspec.Struct, gc=False):
    """One response as an engine sent it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: LogProbs | None = None
    routed_experts: str | None = None

    @property
    def token_logprobs(self) -> Sequence[float]:
        return self.logprobs.token_logprobs if self.logprobs is not None else ()


class _Response(msgspec.Struct, gc=False):
    choices: list[Answered]
    id: str = ""
    prompt_token_ids: list[int] | None = None


_encoder = msgspec.json.Encoder()
# Typed decoding skips the fields that are most of the bytes (token strings, offsets, top log-probs,
# the echoed prompt).
_decoder = msgspec.json.Decoder(_Response)


def encode_request(
    prompt_tokens: npt.NDArray[np.int32],
    n: int,
    seed: int,
    sampling: Sampling,
    written: npt.NDArray[np.int32] = NO_TOKENS,
    served_model: str = SERVED_MODEL,
    images: Sequence[RequestImage] = (),
) -> bytes:
    """Returns the body of a request for n responses.

    Every sampling parameter is explicit, so that no generation_config.json of a model changes the
    distribution. `written`: the beginning of the one response that is asked for, which the engine
    computes as a part of the prompt. `images`: of the prompt.
    """
    body: dict[str, Any] = {
        "model": served_model,
        "prompt": [*prompt_tokens.tolist(), *written.tolist()],
        "n": n,
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "return_token_ids": True,
    }
    if sampling.ignore_eos:
        body["stop_token_ids"] = []
    if sampling.stop:
        # The text includes the stop, so that text and tokens say the same.
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.logprobs:
        body["logprobs"] = 0
    # Read by vllm/streams.py and vllm/expert_choices.py, which run in the engine.
    extra: dict[str, int] = {}
    if len(written):
        extra["drawn"] = len(written)
    if sampling.expert_choices is not None:
        extra["expert_choices"] = 1
    if extra:
        body["vllm_xargs"] = extra
    if images:
        body["images"] = as_fields(images)
    return _encoder.encode(body)


@dataclass(frozen=True, eq=False)
class DecodedAnswer:
    """The responses of an answer, in order of their seeds, as arrays over all their tokens.

    Args:
        request: the answer's id.
        texts: of the responses.
        finish_reasons: as the engine states them.
        lengths: tokens of each response.
        tokens: ids of all responses, one after another, int64 or int32.
        logprobs: float32, one after another too; None if the answer has none.
        num_logprobs: of each response.
        expert_choice_files: an .npy file of each response's expert choices; None for a response
            without.
        prompt_tokens: that the engine made of a prompt with images; None if it does not say.
    """

    request: str
    texts: list[str]
    finish_reasons: list[str | None]
    lengths: list[int]
    tokens: npt.NDArray[np.integer[Any]]
    logprobs: npt.NDArray[np.float32] | None
    num_logprobs: list[int]
    expert_choice_files: list[bytes | None]
    prompt_tokens: npt.NDArray[np.integer[Any]] | None = None


def decode_answer(
    data: bytes, n: int, engine: str, content_type: str = "application/json"
) -> DecodedAnswer:
    """Returns an answer with n responses. Raises EngineError if it is none."""
    if content_type == COMPACT_TYPE:
        answer = _decode_compact(data, engine)
    else:
        answer = _decode_json(data, n, engine)
    if len(answer.texts) != n:
        raise EngineError(f"engine {engine}: {len(answer.texts)} responses, but {n} were asked for")
    return answer


def _decode_json(data: bytes, n: int, engine: str) -> DecodedAnswer:
    try:
        answer = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"engine {engine}: answer to /v1/completions is malformed ({error}): {excerpt(data)}"
        ) from None
    return _as_arrays(answer.id, answer.choices, answer.prompt_token_ids, n, engine)


def _as_arrays(
    request: str,
    unordered: Sequence[Answered],
    prompt: Sequence[int] | None,
    n: int,
    engine: str,
) -> DecodedAnswer:
    """Returns the choices of an answer in JSON. Raises EngineError unless there are n of them."""
    choices = sorted(unordered, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(n)):
        raise EngineError(f"engine {engine}: {len(choices)} responses, but {n} were asked for")
    lengths = [len(choice.token_ids) for choice in choices]
    try:
        # fromiter, with type and length given, takes two thirds of the time of array, which has to
        # find them first.
        tokens = np.fromiter(
            chain.from_iterable(choice.token_ids for choice in choices), np.int64, sum(lengths)
        )
        prompt_tokens = None if prompt is None else np.fromiter(prompt, np.int64, len(prompt))
    except OverflowError:
        raise EngineError(
            f"engine {engine}: a token id has more than 64 bits; does it serve another model?"
        ) from None
    num_logprobs = [len(choice.token_logprobs) for choice in choices]
    # A value that float32 cannot hold becomes infinite, and is refused later.
    with np.errstate(over="ignore"):
        logprobs = np.fromiter(
            chain.from_iterable(choice.token_logprobs for choice in choices),
            np.float32,
            sum(num_logprobs),
        )
    return DecodedAnswer(
        request=request,
        texts=[choice.text for choice in choices],
        finish_reasons=[choice.finish_reason for choice in choices],
        lengths=lengths,
        tokens=tokens,
        logprobs=logprobs,
        num_logprobs=num_logprobs,
        expert_choice_files=[_base64(choice.routed_experts) for choice in choices],
        prompt_tokens=prompt_tokens,
    )


def _base64(text: str | None) -> bytes | None:
    """Returns the bytes; none for a text that is no base64, which no .npy file is either."""
    if text is None:
        return None
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""


def _decode_compact(data: bytes, engine: str) -> DecodedAnswer:
    try:
        answer = compact_answer.decode(data)
    except ValueError as error:
        raise EngineError(
            f"engine {engine}: compact answer is malformed: {error}; do engine and coordinator run "
            "the same pa_npu?"
        ) from None
    header = answer.header
    number = len(header.lengths)
    return DecodedAnswer(
        request=header.id,
        texts=header.texts,
        finish_reasons=list(header.finish_reasons),
        lengths=header.lengths,
        tokens=answer.tokens,
        logprobs=answer.logprobs,
        num_logprobs=header.lengths if header.has_logprobs else [0] * number,
        expert_choice_files=list(answer.expert_choices) or [None] * number,
        prompt_tokens=answer.prompt_tokens,
    )


def decode_response(
    data: bytes,
    n: int,
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
    content_type: str = "application/json",
) -> list[Generation]:
    """Returns the n responses in order of their seeds.

    Raises EngineError if a count, length, id or value is impossible.
    """
    answer = decode_answer(data, n, engine, content_type)
    return checked_generations(answer, sampling, vocab_size, engine, version)


def checked_generations(
    answer: DecodedAnswer,
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
) -> list[Generation]:
    """Returns all responses of an answer, in order.

    Arrays are checked for all responses together, which is several times cheaper than one by one,
    and are cut apart then.

    Raises EngineError if a length, id, value or reason is impossible.
    """
    for number in range(len(answer.texts)):
        if problem := _problem(answer, number, sampling):
            raise EngineError(f"engine {engine}: response {number} {problem}")
    bounds = [0, *accumulate(answer.lengths)]
    tokens = _checked_tokens(answer.tokens, bounds, vocab_size, engine)
    logprobs = np.empty(0, np.float32)
    if sampling.logprobs:
        assert answer.logprobs is not None, "every response has as many log-probs as tokens"
        logprobs = _checked_logprobs(answer.logprobs, bounds, engine)
    generations = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        generation = Generation(
            tokens=tokens[start:end],
            logprobs=logprobs[start:end],
            text=answer.texts[number],
            finish_reason=_REASONS[answer.finish_reasons[number]],
            version=version,
        )
        generations.append(generation)
    return generations


def _problem(answer: DecodedAnswer, number: int, sampling: Sampling) -> str | None:
    """Returns what is wrong with the shape of a response; None if nothing is."""
    length = answer.lengths[number]
    finish_reason = answer.finish_reasons[number]
    reason = _REASONS.get(finish_reason)
    if reason is None:
        return (
            f"ended with reason {finish_reason!r} instead of stop or length; see the engine's log"
        )
    min_tokens = 0 if reason == "cut" else 1
    if not min_tokens <= length <= sampling.max_tokens:
        return f"has {length} tokens, must be 1 to {sampling.max_tokens}"
    if sampling.logprobs and answer.num_logprobs[number] != length:
        return f"has {answer.num_logprobs[number]} log-probs for {length} tokens"
    return None


def _checked_tokens(
    tokens: npt.NDArray[np.integer[Any]], bounds: list[int], vocab_size: int, engine: str
) -> npt.NDArray[np.int32]:
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        position = int(((tokens < 0) | (tokens >= vocab_size)).argmax())
        raise EngineError(
            f"engine {engine}: response {_response_at(position, bounds)} has token id "
            f"{tokens[position]} outside of the vocabulary of {vocab_size}; does it serve another "
            "model?"
        )
    return tokens.astype(np.int32)


def _checked_logprobs(
    logprobs: npt.NDArray[np.float32], bounds: list[int], engine: str
) -> npt.NDArray[np.float32]:
    # NaN fails both comparisons
    if len(logprobs) and not (
        logprobs.min() > _LOGPROB_CLAMP and logprobs.max() <= LOGPROB_ROUNDING
    ):
        position = int((~((logprobs > _LOGPROB_CLAMP) & (logprobs <= LOGPROB_ROUNDING))).argmax())
        raise EngineError(
            f"engine {engine}: response {_response_at(position, bounds)} has log-prob "
            f"{logprobs[position]}, must be finite and at most 0; are the engine's weights finite?"
        )
    return logprobs


def _response_at(position: int, bounds: list[int]) -> int:
    """Returns the number of the response that has the token at `position` among all tokens."""
    return bisect_right(bounds, position) - 1


def decode_object(data: bytes, engine: str) -> dict[str, Any]:
    """Returns the JSON object of an answer that is no response; {} if its body is empty.

    Raises EngineError.
    """
    try:
        decoded = msgspec.json.decode(data) if data else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"engine {engine}: answer is malformed ({error}): {excerpt(data)}"
        ) from None
    if not isinstance(decoded, dict):
        raise EngineError(f"engine {engine}: answer is no JSON object: {excerpt(data)}")
    return decoded


def excerpt(data: bytes) -> str:
    """Returns the beginning of an answer, for messages."""
    return data[:200].decode("utf-8", "replace")
