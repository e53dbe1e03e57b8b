"""The engine's JSON for /v1/completions: building the request, decoding and checking the response."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import EngineError, Generation, Sampling

SERVED_MODEL = "policy"
"""The name under which every engine serves the model."""

# A log-prob may exceed 0 by rounding of the log-softmax; bf16 engines compute it in fp32.
_LOGPROB_ROUNDING = 1e-4
# vLLM replaces -inf by this, which a sampled token cannot have.
_LOGPROB_CLAMP = -9999.0


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


def encode_request(prompt_tokens: npt.NDArray[np.int32], n: int, seed: int, sampling: Sampling) -> bytes:
    """Every sampling parameter is explicit, so that no generation_config.json of a model changes the distribution."""
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
        "prompt": prompt_tokens.tolist(),
        "n": n,
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
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


def decode_response(data: bytes, n: int, sampling: Sampling, vocab_size: int, engine: str) -> list[Generation]:
    """The n responses in order of their seeds. Raises EngineError when a count, length, id or value is impossible."""
    try:
        choices = _decoder.decode(data).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"engine {engine}: answer to /v1/completions is malformed ({error}): {_excerpt(data)}"
        ) from None
    choices.sort(key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(n)):
        raise EngineError(f"engine {engine}: {len(choices)} responses, but {n} were asked for")
    return [_generation(choice, sampling, vocab_size, engine) for choice in choices]


def decode_object(data: bytes, engine: str) -> dict[str, Any]:
    """The JSON object of any other answer, {} where its body is empty. Raises EngineError."""
    try:
        decoded = msgspec.json.decode(data) if data else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"engine {engine}: answer is malformed ({error}): {_excerpt(data)}") from None
    if not isinstance(decoded, dict):
        raise EngineError(f"engine {engine}: answer is no JSON object: {_excerpt(data)}")
    return decoded


def _generation(choice: _Choice, sampling: Sampling, vocab_size: int, engine: str) -> Generation:
    what = f"engine {engine}: response {choice.index}"
    if choice.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"{what} ended with reason {choice.finish_reason!r} instead of stop or length; see the engine's log"
        )
    length = len(choice.token_ids)
    if not 1 <= length <= sampling.max_tokens:
        raise EngineError(f"{what} has {length} tokens, must be 1 to {sampling.max_tokens}")
    try:
        tokens = np.array(choice.token_ids, dtype=np.int64)
    except OverflowError:
        raise EngineError(f"{what} has a token id of more than 64 bits; does it serve another model?") from None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise EngineError(
            f"{what} has token id {wrong} outside of the vocabulary of {vocab_size}; does it serve another model?"
        )
    logprobs = _logprobs(choice, length, what) if sampling.logprobs else np.empty(0, np.float32)
    return Generation(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs,
        text=choice.text,
        finish_reason="stop" if choice.finish_reason == "stop" else "length",
    )


def _logprobs(choice: _Choice, length: int, what: str) -> npt.NDArray[np.float32]:
    values = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if len(values) != length:
        raise EngineError(f"{what} has {len(values)} log-probs for {length} tokens")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        logprobs = np.array(values, dtype=np.float32)
    # NaN fails both comparisons
    if not (logprobs.min() > _LOGPROB_CLAMP and logprobs.max() <= _LOGPROB_ROUNDING):
        wrong = logprobs[~((logprobs > _LOGPROB_CLAMP) & (logprobs <= _LOGPROB_ROUNDING))][0]
        raise EngineError(
            f"{what} has log-prob {wrong}, must be finite and at most 0; are the engine's weights finite?"
        )
    return logprobs


def _excerpt(data: bytes) -> str:
    return data[:200].decode("utf-8", "replace")
