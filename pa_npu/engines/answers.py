"""Checks every response of an engine before anything uses it: its length, token ids within the vocabulary, possible log-probs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.samples.routes import NO_ROUTE, Routes

# A log-prob may exceed 0 by rounding of the log-softmax; bf16 engines compute it in fp32.
_LOGPROB_ROUNDING = 1e-4
# vLLM replaces -inf by this, which a sampled token cannot have.
_LOGPROB_CLAMP = -9999.0
# abort: how vLLM ends what it hands on
_REASONS: dict[str | None, Literal["stop", "length", "cut"]] = {"stop": "stop", "length": "length", "abort": "cut"}


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


def checked_generations(
    responses: Sequence[Answered],
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
) -> list[Generation]:
    """All responses of an answer, in order. Raises EngineError when a length, id, value or reason is impossible.

    Arrays are made and checked for all together, which is several times cheaper than one by one, and cut apart.
    """
    for number, response in enumerate(responses):
        if problem := _problem(response, sampling):
            raise EngineError(f"engine {engine}: response {number} {problem}")
    bounds = [0, *accumulate(len(response.token_ids) for response in responses)]
    tokens = _checked_tokens([response.token_ids for response in responses], bounds, vocab_size, engine)
    logprobs = np.empty(0, np.float32)
    if sampling.logprobs:
        logprobs = _checked_logprobs([response.token_logprobs for response in responses], bounds, engine)
    return [
        Generation(
            tokens=tokens[start:end],
            logprobs=logprobs[start:end],
            text=response.text,
            finish_reason=_REASONS[response.finish_reason],
            version=version,
        )
        for response, (start, end) in zip(responses, pairwise(bounds), strict=True)
    ]


def _problem(response: Answered, sampling: Sampling) -> str | None:
    """Name what is wrong with the shape of a response; None where nothing is."""
    length = len(response.token_ids)
    reason = _REASONS.get(response.finish_reason)
    if reason is None:
        return f"ended with reason {response.finish_reason!r} instead of stop or length; see the engine's log"
    if not (0 if reason == "cut" else 1) <= length <= sampling.max_tokens:
        return f"has {length} tokens, must be 1 to {sampling.max_tokens}"
    if sampling.logprobs and len(response.token_logprobs) != length:
        return f"has {len(response.token_logprobs)} log-probs for {length} tokens"
    return None


def _checked_tokens(
    token_ids: Sequence[Sequence[int]], bounds: list[int], vocab_size: int, engine: str
) -> npt.NDArray[np.int32]:
    try:
        # fromiter, told the type and the length, takes two thirds of the time of array, which looks for them first
        tokens = np.fromiter(chain.from_iterable(token_ids), np.int64, bounds[-1])
    except OverflowError:
        raise EngineError(f"engine {engine}: a token id has more than 64 bits; does it serve another model?") from None
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        position = int(((tokens < 0) | (tokens >= vocab_size)).argmax())
        raise EngineError(
            f"engine {engine}: response {_response_at(position, bounds)} has token id {tokens[position]} outside of the vocabulary "
            f"of {vocab_size}; does it serve another model?"
        )
    return tokens.astype(np.int32)


def _checked_logprobs(values: Sequence[Sequence[float]], bounds: list[int], engine: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        logprobs = np.fromiter(chain.from_iterable(values), np.float32, bounds[-1])
    # NaN fails both comparisons
    if len(logprobs) and not (logprobs.min() > _LOGPROB_CLAMP and logprobs.max() <= _LOGPROB_ROUNDING):
        position = int((~((logprobs > _LOGPROB_CLAMP) & (logprobs <= _LOGPROB_ROUNDING))).argmax())
        raise EngineError(
            f"engine {engine}: response {_response_at(position, bounds)} has log-prob {logprobs[position]}, must be finite and at "
            f"most 0; are the engine's weights finite?"
        )
    return logprobs


def with_routes(
    generation: Generation, recorded: npt.NDArray[np.uint16], given: int, routes: Routes, engine: str
) -> Generation:
    """The generation with the routes that an engine recorded of it, from its prompt's first token on; tokens beyond have none.

    recorded: uint16 of any shape, NO_ROUTE for a token without. given: tokens of prompt and beginning.
    Raises EngineError where these are no routes.
    """
    column, length = routes.column, given + len(generation.tokens)
    if recorded.size % int(np.prod(column.shape)) or len(rows := recorded.reshape(-1, *column.shape)) > length:
        raise EngineError(
            f"engine {engine}: {recorded.size} expert ids for {length} tokens of {list(column.shape)}; does it serve another model?"
        )
    if rows.size and rows.max() >= routes.num_experts:
        of_tokens = rows.reshape(len(rows), -1)
        wrong = (of_tokens >= routes.num_experts).any(axis=1) & (of_tokens != NO_ROUTE).any(axis=1)
        if wrong.any():
            raise EngineError(
                f"engine {engine}: token {int(wrong.argmax())} has expert ids {rows[wrong.argmax()].tolist()!r:.200}, but a layer "
                f"has {routes.num_experts} experts; does it serve another model?"
            )
    values = column.blank(length)
    values[: len(rows)] = rows.astype(column.type)  # NO_ROUTE becomes what the column has for none
    return replace(generation, columns={**generation.columns, column: values})


def _response_at(position: int, bounds: list[int]) -> int:
    """The number of the response that has this token of all."""
    return bisect_right(bounds, position) - 1


def decode_object(data: bytes, engine: str) -> dict[str, Any]:
    """The JSON object of an answer that is no response, {} where its body is empty. Raises EngineError."""
    try:
        decoded = msgspec.json.decode(data) if data else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"engine {engine}: answer is malformed ({error}): {excerpt(data)}") from None
    if not isinstance(decoded, dict):
        raise EngineError(f"engine {engine}: answer is no JSON object: {excerpt(data)}")
    return decoded


def excerpt(data: bytes) -> str:
    """The beginning of an answer, for messages."""
    return data[:200].decode("utf-8", "replace")
