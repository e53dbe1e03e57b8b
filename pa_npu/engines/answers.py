"""Checks every response of an engine before anything uses it: its length, token ids within the vocabulary, possible log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import EngineError, Generation, Sampling

# A log-prob may exceed 0 by rounding of the log-softmax; bf16 engines compute it in fp32.
_LOGPROB_ROUNDING = 1e-4
# vLLM replaces -inf by this, which a sampled token cannot have.
_LOGPROB_CLAMP = -9999.0


def checked_generation(
    number: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    text: str,
    finish_reason: str | None,
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
    instance: str | None = None,
) -> Generation:
    """Response `number` of an answer. Raises EngineError when a length, id, value or reason is impossible."""
    what = f"engine {engine}: response {number}"
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"{what} ended with reason {finish_reason!r} instead of stop or length; see the engine's log")
    length = len(token_ids)
    if not 1 <= length <= sampling.max_tokens:
        raise EngineError(f"{what} has {length} tokens, must be 1 to {sampling.max_tokens}")
    try:
        tokens = np.array(token_ids, dtype=np.int64)
    except OverflowError:
        raise EngineError(f"{what} has a token id of more than 64 bits; does it serve another model?") from None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise EngineError(
            f"{what} has token id {wrong} outside of the vocabulary of {vocab_size}; does it serve another model?"
        )
    return Generation(
        tokens=tokens.astype(np.int32),
        logprobs=_checked_logprobs(logprobs, length, what) if sampling.logprobs else np.empty(0, np.float32),
        text=text,
        finish_reason="stop" if finish_reason == "stop" else "length",
        version=version,
        instance=instance,
    )


def _checked_logprobs(values: Sequence[float], length: int, what: str) -> npt.NDArray[np.float32]:
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
