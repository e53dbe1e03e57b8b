"""vLLM's JSON for /v1/completions: building the request and decoding the response."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.answers import Answered, checked_generations, excerpt
from pa_npu.engines.handing_on import NOTHING
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
# Typed decoding skips the fields that are most of the bytes (token strings, offsets, top log-probs, the echoed prompt).
_decoder = msgspec.json.Decoder(_Response)


def encode_request(
    prompt_tokens: npt.NDArray[np.int32],
    n: int,
    seed: int,
    sampling: Sampling,
    written: npt.NDArray[np.int32] = NOTHING,
) -> bytes:
    """Every sampling parameter is explicit, so that no generation_config.json of a model changes the distribution.

    written: the beginning of the one response that is asked for, which the engine computes as a part of the prompt.
    """
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
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
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "return_token_ids": True,
    }
    if sampling.stop:
        # the text is what the tokens say, the stop included, so that nothing is lost between text and tokens
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.logprobs:
        body["logprobs"] = 0
    if len(written):
        body["vllm_xargs"] = {"drawn": len(written)}  # vllm/streams.py, which runs in the engine
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
        choices = _decoder.decode(data).choices
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
            "cut" if choice.finish_reason == "abort" else choice.finish_reason,
        )
        for choice in choices
    ]
    return checked_generations(responses, sampling, vocab_size, engine, version, instance)
