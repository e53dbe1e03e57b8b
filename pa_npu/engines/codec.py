"""JSON of /v1/completions as vLLM's server has it: building the request and decoding the response."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.answers import Answered, checked_generations, excerpt
from pa_npu.engines.handing_on import NOTHING
from pa_npu.engines.protocol import EngineError, Generation, Sampling

SERVED_MODEL = "policy"
"""The name under which every engine serves the model."""


class _Response(msgspec.Struct, gc=False):
    choices: list[Answered]
    id: str = ""


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
    # vllm/streams.py and vllm/routes.py, which run in the engine
    extra = {"drawn": len(written)} if len(written) else {}
    if sampling.routes is not None:
        extra["routes"] = 1
    if extra:
        body["vllm_xargs"] = extra
    return _encoder.encode(body)


def decode_response(
    data: bytes,
    n: int,
    sampling: Sampling,
    vocab_size: int,
    engine: str,
    version: int | None = None,
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
    return checked_generations(choices, sampling, vocab_size, engine, version)


def recorded_routes(data: bytes, layers: Sequence[int]) -> tuple[str, list[npt.NDArray[np.uint16]] | None]:
    """(the answer's id, each response's routes uint16 [tokens, layers, experts per token], where the engine answers with them).

    layers: those with experts; the engine may have rows for all. Raises ValueError where these are no arrays.
    """
    answer = _decoder.decode(data)
    texts = [choice.routed_experts for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    if None in texts:
        return answer.id, None
    arrays = [np.load(io.BytesIO(base64.b64decode(text or ""))) for text in texts]
    return answer.id, [
        one[:, layers if one.shape[1] > len(layers) else slice(None)].astype(np.uint16) for one in arrays
    ]
