"""Scores of given tokens on the wire: what is read of a server's answer, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pa_npu.engines.protocol import EngineError, Scoring
from pa_npu.engines.score_codec import (
    SMALLEST_REST,
    decode_scores,
    encode_score_request,
)

TOKENS = np.array([4, 2, 7], np.int32)


def answer(*places: dict[int, float] | None) -> bytes:
    lines: list[Any] = [
        place and {str(token): {"logprob": logprob, "rank": 1} for token, logprob in place.items()}
        for place in places
    ]
    return msgspec.json.encode({"choices": [{"text": "x", "prompt_logprobs": lines}]})


def read(data: bytes, count: int = 0) -> Any:
    return decode_scores(data, TOKENS, Scoring(1.0, count), 10, "E")


def test_the_tokens_own_logprobs_are_read_and_the_first_follows_from_nothing() -> None:
    scores = read(answer(None, {2: -0.5}, {7: -1.5}))
    assert scores.logprobs.tolist() == [0.0, -0.5, -1.5]
    assert scores.choices.shape == (3, 0) and scores.choice_logprobs.shape == (3, 0)


def test_the_most_likely_tokens_come_in_order_with_the_rest_behind_them() -> None:
    """At the first place the own token is among them, at the second it comes besides."""
    data = answer(
        None, {2: math.log(0.3), 5: math.log(0.6)}, {7: math.log(0.05), 1: math.log(0.5), 3: -1}
    )
    scores = read(data, 2)
    assert scores.choices.tolist() == [[-1, -1], [5, 2], [1, 3]]
    rest = [0.1, 1 - 0.5 - np.exp(-1)]
    assert np.exp(scores.choice_logprobs[1:, 2]).tolist() == pytest.approx(rest, rel=1e-5)
    assert np.exp(scores.choice_logprobs[1]).sum() == pytest.approx(1, abs=1e-6)


def test_a_rest_below_the_rounding_of_its_terms_is_the_smallest() -> None:
    scores = read(answer(None, {2: -1e-9, 5: -20.0}, {7: -1e-9, 5: -20.0}), 2)
    assert np.exp(scores.choice_logprobs[1:, 2]).tolist() == pytest.approx([SMALLEST_REST] * 2)


@pytest.mark.parametrize(
    ("data", "count", "line"),
    [
        (b'{"choices": [{"text": "x"}]}', 0, "no prompt_logprobs"),
        (b'{"choices": []}', 0, "no prompt_logprobs"),
        (b"<html>", 0, "malformed"),
        (answer(None, {2: -0.5}), 0, "2 places with log-probs for 3 tokens"),
        (answer(None, {2: -0.5}, None), 0, "or one without any"),
        (answer(None, {3: -0.5}, {7: -1.5}), 0, "no log-prob of its own token 2"),
        (answer(None, {2: -0.5}, {7: -9999.0}), 0, "can its model not write a token"),
        (answer(None, {2: float("nan")}, {7: -1.0}), 0, "malformed|finite"),
        (answer(None, {2: 0.5}, {7: -1.0}), 0, "must be finite and at most 0"),
        (answer(None, {2: -0.5, 5: -1}, {7: -1, 5: -1}), 3, "--max-logprobs 3"),
        (answer(None, {2: -0.5, 50: -1}, {7: -1, 5: -1}), 2, "outside of the vocabulary of 10"),
    ],
)
def test_an_impossible_answer_is_one_line(data: bytes, count: int, line: str) -> None:
    with pytest.raises(EngineError, match=line) as refused:
        read(data, count)
    assert str(refused.value).startswith("engine E: ")


def test_a_temperature_is_asked_for_only_where_it_is_not_the_servers_own() -> None:
    plain = msgspec.json.decode(encode_score_request(TOKENS, Scoring(1.0, 3), "m"))
    hot = msgspec.json.decode(encode_score_request(TOKENS, Scoring(0.5), "m"))
    assert plain["prompt_logprobs"] == 3 and "vllm_xargs" not in plain
    assert hot["vllm_xargs"] == {"score_temperature": 0.5} and hot["model"] == "m"
