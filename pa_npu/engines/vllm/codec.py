"""vLLM's JSON for /v1/completions: building the request and decoding the response."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.answers import Answered, checked_generations, excerpt
from pa_npu.engines.protocol import EngineError, Generation, Sampling

SERVED_MODEL = "policy"
"""The name under which every engine serves the model."""


class _LogProbs(msgspec.Struct, gc=False):
    token_logprobs: list[float]


class _Choice(msgspec.Struct, gc=False):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None


class _Response(msgspec.Struct, gc=False):
    choices: list[_Choice]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Response)

# Where the token strings and top log-probs of a response begin, which are half of its bytes, and what follows them. Neither can
# stand inside of a JSON string, where a quote has a backslash before it, nor begin with the end of one, which no letter follows.
_STRINGS, _AFTER_STRINGS = b',"tokens":[', b'},"finish_reason":'
_OFFSETS, _AFTER_OFFSETS = b'"text_offset":[', b"],"


def encode_request(prompt_tokens: npt.NDArray[np.int32], n: int, seed: int, sampling: Sampling) -> bytes:
    """Every sampling parameter is explicit, so that no generation_config.json of a model changes the distribution."""
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": prompt_tokens.tolist(),
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
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "return_token_ids": True,
    }
    if sampling.stop:
        # the text is what the tokens say, the stop included, so that nothing is lost between text and tokens
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.logprobs:
        body["logprobs"] = 0
    return _encoder.encode(body)


def decode_response(
    data: bytes,
    n: int,
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
    instance: str | None = None,
) -> list[Generation]:
    """The n responses in order of their seeds. Raises EngineError when a count, length, id or value is impossible."""
    try:
        choices = _choices(data, n)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"engine {engine}: answer to /v1/completions is malformed ({error}): {excerpt(data)}"
        ) from None
    choices.sort(key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(n)):
        raise EngineError(f"engine {engine}: {len(choices)} responses, but {n} were asked for")
    responses = [
        Answered(
            choice.token_ids,
            choice.logprobs.token_logprobs if choice.logprobs is not None else (),
            choice.text,
            choice.finish_reason,
        )
        for choice in choices
    ]
    return checked_generations(responses, sampling, vocab_size, engine, version, instance)


def _choices(data: bytes, n: int) -> list[_Choice]:
    """The choices of an answer. What nobody reads is cut out before, as a search skips it faster than a parser.

    A cut that meets fields in another order than vLLM's takes a log-prob or a whole choice with it; then all is parsed.
    """
    try:
        choices = _decoder.decode(_without_strings(data)).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        choices = []
    return choices if len(choices) == n else _decoder.decode(data).choices


def _without_strings(data: bytes) -> bytes:
    """An answer without the token strings, top log-probs and text offsets of its responses."""
    kept, start = [], 0
    while (strings := data.find(_STRINGS, start)) >= 0:
        after = data.find(_AFTER_STRINGS, strings)
        if after < 0:
            break
        offsets = data.find(_OFFSETS, start, strings)
        after_offsets = data.find(_AFTER_OFFSETS, offsets, strings) if offsets >= 0 else -1
        if after_offsets >= 0:
            kept.append(data[start:offsets])
            start = after_offsets + len(_AFTER_OFFSETS)
        kept.append(data[start:strings])
        start = after
    kept.append(data[start:])
    return b"".join(kept)
