"""The JSON of /v1/completions with prompt log-probs, as vLLM's server has it: requests for scores, and their answers.

vLLM answers with a dictionary for each token of the prompt: the token itself and the k most likely
ones, by id. Log-probs are of the model's distribution at temperature 1. An engine of this package
gives them at another temperature where a request asks for it (vllm/scores.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.codec import (
    LOGPROB_ROUNDING,
    excerpt,
)
from pa_npu.engines.protocol import EngineError, Scores, Scoring

TEMPERATURE = "score_temperature"
"""The name under which a request asks for log-probs at a temperature."""
# The log-probs of the k most likely tokens are fp32, so that a rest below this is their rounding.
SMALLEST_REST = 1e-6
_ENTRY_BYTES = 512
# vLLM replaces -inf by this: a token that the model cannot write.
_LOGPROB_CLAMP = -9999.0


class Scored(msgspec.Struct, gc=False):
    """A token at one place of a prompt. decoded_token: its text, where the server sends it."""

    logprob: float
    decoded_token: str | None = None


class _Choice(msgspec.Struct, gc=False):
    prompt_logprobs: list[dict[str, Scored] | None] | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Answer)


def encode_score_request(
    tokens: npt.NDArray[np.int32], scoring: Scoring, served_model: str
) -> bytes:
    """Returns the body of a request for the log-probs of all tokens.

    A server always writes too: one token, which nobody reads.
    """
    body: dict[str, Any] = {
        "model": served_model,
        "prompt": tokens.tolist(),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": scoring.num_choices,
    }
    if scoring.temperature != 1.0:
        body["vllm_xargs"] = {TEMPERATURE: scoring.temperature}
    return msgspec.json.encode(body)


def decode_places(data: bytes, num_tokens: int, engine: str) -> list[Mapping[str, Scored] | None]:
    """Returns what the answer says at each place of the prompt; None at the first, which follows
    from nothing.

    Raises EngineError if it says nothing of some place.
    """
    try:
        choices = _decoder.decode(data).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"engine {engine}: answer to a request for scores is malformed ({error}): "
            f"{excerpt(data)}"
        ) from None
    places = choices[0].prompt_logprobs if choices else None
    if places is None:
        raise EngineError(
            f"engine {engine}: its answer has no prompt_logprobs; it has to score given tokens, "
            "as vLLM's server does"
        )
    if len(places) != num_tokens or any(not place for place in places[1:]):
        raise EngineError(
            f"engine {engine}: {len(places)} places with log-probs for {num_tokens} tokens, or one "
            "without any"
        )
    return list(places)


def decode_scores(
    data: bytes,
    tokens: npt.NDArray[np.int32],
    scoring: Scoring,
    vocab_size: int,
    engine: str,
    version: int | None = None,
) -> Scores:
    """Returns the scores of the tokens of a request.

    Raises EngineError if a count, id or value is impossible.
    """
    places = decode_places(data, len(tokens), engine)
    logprobs = np.zeros(len(tokens), np.float32)
    count = scoring.num_choices
    ids = np.full((len(tokens), count), -1, np.int32)
    of_choices = np.zeros((len(tokens), count + 1 if count else 0), np.float32)
    for place, (token, by_token) in enumerate(zip(tokens.tolist(), places, strict=True)):
        if place == 0 or by_token is None:
            continue
        scored = by_token.get(str(token))
        if scored is None:
            raise EngineError(
                f"engine {engine}: place {place} has no log-prob of its own token {token}"
            )
        logprobs[place] = scored.logprob
        if count:
            ids[place], of_choices[place, :count] = _most_likely(
                by_token, token, count, vocab_size, engine
            )
    _check(logprobs, engine)
    if count:
        _check(of_choices[:, :count], engine)
        of_choices[1:, count] = _log_rest(of_choices[1:, :count])
        of_choices[:1] = 0.0
    return Scores(logprobs, ids, of_choices, version)


def _most_likely(
    by_token: Mapping[str, Scored], token: int, count: int, vocab_size: int, engine: str
) -> tuple[list[int], list[float]]:
    """Returns ids and log-probs of the `count` most likely tokens, the likeliest first.

    The place's own token comes besides, where it is none of them.
    """
    try:
        entries = [(entry.logprob, int(name)) for name, entry in by_token.items()]
    except ValueError:
        raise EngineError(f"engine {engine}: a token id is no number") from None
    if len(entries) == count + 1:
        entries = [entry for entry in entries if entry[1] != token]
    if len(entries) != count:
        raise EngineError(
            f"engine {engine}: {len(entries)} of the {count} most likely tokens of a place; start "
            f"the server with --max-logprobs {count} or more, or lower algorithm.distill_top_k"
        )
    entries.sort(key=lambda entry: (-entry[0], entry[1]))
    ids = [number for _, number in entries]
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise EngineError(
            f"engine {engine}: a most likely token is {max(ids)}, outside of the vocabulary of "
            f"{vocab_size}; does it serve another model?"
        )
    return ids, [logprob for logprob, _ in entries]


def _log_rest(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns the log-prob of all other tokens together, [N]: of 1 minus these, and at least that
    of SMALLEST_REST.
    """
    rest = 1.0 - np.exp(logprobs.astype(np.float64)).sum(-1)
    return np.asarray(np.log(np.maximum(rest, SMALLEST_REST)), np.float32)


def _check(logprobs: npt.NDArray[np.float32], engine: str) -> None:
    # NaN fails both comparisons
    is_possible = (logprobs > _LOGPROB_CLAMP) & (logprobs <= LOGPROB_ROUNDING)
    if not is_possible.all():
        value = logprobs[~is_possible].flat[0]
        raise EngineError(
            f"engine {engine}: a given token has log-prob {value}, must be finite and at most 0; "
            "can its model not write a token of the policy, or are its weights not finite?"
        )


def score_bytes(num_tokens: int, num_choices: int) -> int:
    """Returns the largest size of an answer: an entry has id, log-prob, rank and text."""
    return num_tokens * (num_choices + 1) * _ENTRY_BYTES


def texts(places: Sequence[Mapping[str, Scored] | None]) -> list[Mapping[int, str]]:
    """Returns for each place the texts of the tokens that the server names there, by id."""
    texts_by_token: list[Mapping[int, str]] = []
    for place in places:
        named: dict[int, str] = {}
        for name, entry in (place or {}).items():
            if entry.decoded_token is not None and name.isdigit():
                named[int(name)] = entry.decoded_token
        texts_by_token.append(named)
    return texts_by_token
