"""The compact answer of engines: what comes back is what was sent, and nothing incomplete is read."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pa_npu.engines.compact_answer import MAGIC, CompactResponse, decode, encode
from pa_npu.engines.http_server import COMPACT_TYPE, accepts_compact

RESPONSES = [
    CompactResponse("two\n", [7, 2**31 - 1], "stop", [-0.5, -1e-7], b"file 0"),
    CompactResponse("", [], "abort", [], b"file number 1"),
    CompactResponse("ü ☃", [1, 2, 3], "length", [-1.0, -2.0, -3.0], b"2"),
]


def test_an_answer_comes_back_as_it_was_sent() -> None:
    answer = decode(encode("request", RESPONSES))
    assert answer.header.id == "request"
    assert answer.header.texts == ["two\n", "", "ü ☃"]
    assert answer.header.finish_reasons == ["stop", "abort", "length"]
    assert answer.header.lengths == [2, 0, 3]
    assert answer.tokens.tolist() == [7, 2**31 - 1, 1, 2, 3]
    assert answer.logprobs is not None
    np.testing.assert_array_equal(answer.logprobs, np.array([-0.5, -1e-7, -1, -2, -3], np.float32))
    assert answer.expert_choices == [b"file 0", b"file number 1", b"2"]


def test_what_was_not_asked_for_is_not_there() -> None:
    answer = decode(
        encode("", [CompactResponse("a", [1], "stop"), CompactResponse("b", [2], "stop")])
    )
    assert answer.logprobs is None and answer.expert_choices == []
    assert answer.prompt_tokens is None


def test_a_prompt_that_an_engine_expanded_comes_back() -> None:
    answer = decode(encode("", RESPONSES, [3, 322, 322, 7]))
    assert answer.prompt_tokens is not None and answer.prompt_tokens.tolist() == [3, 322, 322, 7]
    assert answer.tokens.tolist() == [7, 2**31 - 1, 1, 2, 3]
    assert answer.expert_choices == [b"file 0", b"file number 1", b"2"]


def test_every_truncation_and_extension_is_refused() -> None:
    data = encode("request", RESPONSES, [3, 4])
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"header|begin|bytes follow"):
            decode(data[:length])
    with pytest.raises(ValueError, match="bytes follow its header"):
        decode(data + b"\0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [2, 0]}, "other numbers"),
        ({"lengths": [2, 0, "3"]}, "another type"),
        ({"lengths": [2, 0, True]}, "another type"),
        ({"lengths": [5, -3, 3]}, "below 0"),
        ({"choices_bytes": [20]}, "some responses only"),
        ({"texts": None}, "another type"),
        ({"has_logprobs": 1}, "another type"),
        ({"num_prompt_tokens": None}, "another type"),
        ({"num_prompt_tokens": -2}, "below 0"),
        ({"num_prompt_tokens": 2}, "bytes follow"),
        ({"more": 1}, "cannot be read"),
        ({"lengths": [2**62, 2**62, 2**62]}, "bytes follow"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    changes: dict[str, object], message: str
) -> None:
    data = encode("request", RESPONSES)
    start = len(MAGIC) + 4
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    header = json.dumps({**json.loads(data[start : start + length]), **changes}).encode()
    changed = MAGIC + len(header).to_bytes(4, "little") + header + data[start + length :]
    with pytest.raises(ValueError, match=message):
        decode(changed)


def test_only_the_form_itself_is_asked_for() -> None:
    assert accepts_compact([b"text/html", COMPACT_TYPE.encode()])
    assert not accepts_compact([]) and not accepts_compact([b"*/*", b"application/json"])
