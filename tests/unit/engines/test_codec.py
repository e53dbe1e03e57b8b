"""Requests to an engine, and the answers that are accepted from it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pa_npu.engines import compact_answer
from pa_npu.engines.codec import (
    checked_generations,
    decode_answer,
    decode_response,
    encode_request,
)
from pa_npu.engines.compact_answer import CompactResponse
from pa_npu.engines.http_server import COMPACT_TYPE
from pa_npu.engines.protocol import EngineError, Sampling
from pa_npu.samples.seeds import group_seed

SAMPLING = Sampling(max_tokens=4, temperature=0.7, stop_token_ids=(2, 5))


def choice(index: int = 0, **changes: object) -> dict[str, object]:
    base = {
        "index": index,
        "text": "ab",
        "token_ids": [7, 2],
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": {
            "token_logprobs": [-0.5, -1.25],
            "tokens": ["a", "b"],
            "text_offset": [0, 1],
            "top_logprobs": [{}, {}],
        },
        "prompt_token_ids": [1, 2, 3],
    }
    return {**base, **changes}


def decode(*choices: dict[str, object], n: int = 1, sampling: Sampling = SAMPLING):
    data = json.dumps({"id": "x", "choices": choices, "usage": {"total_tokens": 5}}).encode()
    return decode_response(data, n, sampling, vocab_size=100, engine="http://e")


def test_request_states_every_sampling_parameter_so_that_no_model_default_applies():
    body = json.loads(encode_request(np.array([3, 4], np.int32), 8, 11, SAMPLING))
    assert (
        body["prompt"] == [3, 4]
        and body["n"] == 8
        and body["seed"] == 11
        and body["max_tokens"] == 4
    )
    assert body["temperature"] == 0.7 and body["stop_token_ids"] == [2, 5] and body["logprobs"] == 0
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (
        1.0,
        -1,
        0.0,
        1.0,
    )
    assert "stream" not in body and "timeout" not in body


def test_ignoring_the_end_token_also_drops_stop_tokens_which_would_end_a_response():
    body = json.loads(
        encode_request(
            np.array([3], np.int32), 1, 0, Sampling(4, 1.0, (2,), ignore_eos=True, logprobs=False)
        )
    )
    assert body["ignore_eos"] is True and body["stop_token_ids"] == [] and "logprobs" not in body


def test_completions_come_in_order_of_their_seeds_with_types_of_the_buffer():
    first, second = decode(
        choice(
            1,
            token_ids=[9, 9, 9, 9],
            finish_reason="length",
            logprobs={"token_logprobs": [0.0] * 4},
        ),
        choice(0),
        n=2,
    )
    assert first.tokens.tolist() == [7, 2] and first.finished and first.text == "ab"
    assert first.tokens.dtype == np.int32 and first.logprobs.dtype == np.float32
    np.testing.assert_array_equal(first.logprobs, np.array([-0.5, -1.25], np.float32))
    assert second.tokens.tolist() == [9, 9, 9, 9] and not second.finished


def test_logprobs_are_empty_where_they_were_not_asked_for():
    (completion,) = decode(choice(logprobs=None), sampling=Sampling(4, 0.0, logprobs=False))
    assert completion.logprobs.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [7, 100]}, "token id 100 outside of the vocabulary of 100"),
        ({"token_ids": [7, -1]}, "token id -1 outside"),
        ({"token_ids": []}, "has 0 tokens"),
        ({"token_ids": [1] * 5}, "has 5 tokens, must be 1 to 4"),
        ({"finish_reason": "error"}, "ended with reason 'error'"),
        ({"finish_reason": None}, "ended with reason None"),
        ({"logprobs": None}, "0 log-probs for 2 tokens"),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "1 log-probs for 2 tokens"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.1]}}, "log-prob 0.1"),
        ({"logprobs": {"token_logprobs": [-0.5, -9999.0]}}, "log-prob -9999"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "malformed"),
        ({"token_ids": [7, 2.5]}, "malformed"),
        ({"token_ids": None}, "malformed"),
    ],
)
def test_impossible_answers_are_refused_with_engine_and_value(changes, message):
    with pytest.raises(EngineError, match=r"engine http://e") as caught:
        decode(choice(**changes))
    assert message in str(caught.value)


def test_wrong_number_of_responses_is_refused():
    with pytest.raises(EngineError, match="1 responses, but 2 were asked for"):
        decode(choice(0), n=2)
    with pytest.raises(EngineError, match="2 responses, but 2 were asked for"):
        decode(choice(0), choice(0), n=2)


def test_not_a_number_is_refused_in_the_last_line_of_defence():
    data = compact_answer.encode("x", [CompactResponse("", [1, 2], "stop", [-0.5, math.nan])])
    answer = decode_answer(data, 1, "http://e", COMPACT_TYPE)
    with pytest.raises(EngineError, match="log-prob nan"):
        checked_generations(answer, SAMPLING, 100, "http://e")


def test_a_compact_answer_gives_the_responses_of_the_json():
    responses = [
        CompactResponse(f"text {number}", [7, 8 + number], "stop", [-0.5, -1.25 - number])
        for number in range(3)
    ]
    choices = [
        choice(
            number,
            text=response.text,
            token_ids=list(response.token_ids),
            logprobs={"token_logprobs": list(response.logprobs)},
        )
        for number, response in enumerate(responses)
    ]
    data = compact_answer.encode("x", responses)
    compact = decode_response(data, 3, SAMPLING, 100, "http://e", content_type=COMPACT_TYPE)
    for by_arrays, by_json in zip(compact, decode(*choices, n=3), strict=True):
        np.testing.assert_array_equal(by_arrays.tokens, by_json.tokens)
        np.testing.assert_array_equal(by_arrays.logprobs, by_json.logprobs)
        assert (by_arrays.text, by_arrays.finish_reason) == (by_json.text, by_json.finish_reason)
        assert by_arrays.tokens.dtype == np.int32 and by_arrays.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (CompactResponse("", [7, 100], "stop", [-1, -1]), "token id 100 outside"),
        (CompactResponse("", [7, -1], "stop", [-1, -1]), "token id -1 outside"),
        (CompactResponse("", [7, 8], "stop", [-1, 0.1]), "log-prob 0.1"),
        (CompactResponse("", [7, 8], "stop", [-1, -math.inf]), "log-prob -inf"),
        (CompactResponse("", [7, 8], "stop"), "0 log-probs for 2 tokens"),
        (CompactResponse("", [7, 8], "error", [-1, -1]), "ended with reason 'error'"),
        (CompactResponse("", [7] * 5, "length", [-1] * 5), "has 5 tokens, must be 1 to 4"),
        (CompactResponse("", [], "stop", []), "has 0 tokens"),
    ],
)
def test_impossible_values_of_a_compact_answer_are_refused(response, message):
    data = compact_answer.encode("x", [response])
    with pytest.raises(EngineError, match=message):
        decode_response(data, 1, SAMPLING, 100, "http://e", content_type=COMPACT_TYPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [7, 100]}, "response 1 has token id 100 outside"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.1]}}, "response 1 has log-prob 0.1"),
    ],
)
def test_what_is_impossible_is_named_with_its_response(changes, message):
    """Checked together with the others, the second of three is still the one that is named."""
    with pytest.raises(EngineError, match=message):
        decode(choice(0), choice(1, **changes), choice(2), n=3)


def test_group_seeds_are_31_bit_distinct_and_stable():
    seeds = [
        group_seed(run, iteration, index)
        for run in (1, 2)
        for iteration in range(20)
        for index in range(64)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    # a change of this number changes every run that is resumed across it
    assert group_seed(1, 0, 0) == 856614432
