"""The wire: requests are read strictly, every byte that is wrong is one line, and answers are what the client reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.service import wire
from pa_npu.service.wire import Datum, Refused, read_forward_backward, read_json
from tests.helpers.service import call_bytes, call_of, field_of, random_datum, tensor_bytes, varint

VOCAB = 50


def some_call() -> wire.ForwardBackward:
    random = np.random.default_rng(0)
    data = [random_datum(random, length, VOCAB, sampled=True) for length in (3, 7)]
    return call_of(data, "ppo", {"clip_low_threshold": 0.7})


def test_a_call_is_read_as_it_was_sent() -> None:
    sent = some_call()
    call = read_forward_backward(call_bytes(sent), 10)
    assert (call.model_id, call.seq_id, call.loss) == ("m", 1, "ppo")
    assert call.config == {"clip_low_threshold": 0.7} and not call.forward_only
    for datum, original in zip(call.data, sent.data, strict=True):
        np.testing.assert_array_equal(datum.tokens, original.tokens)
        assert datum.inputs.keys() == original.inputs.keys()
        for name, array in original.inputs.items():
            np.testing.assert_array_equal(datum.inputs[name], array)


UNKNOWN = field_of(90, b"new")
BROKEN = {
    "field 90 of Datum": (field_of(3, UNKNOWN), r"data\[2\]: field 90 is not known"),
    "field 90": (UNKNOWN, "forward_backward: field 90 is not known"),
    "an image": (field_of(3, field_of(1, field_of(2, b""))), "an image is not served"),
    "audio": (field_of(3, field_of(1, field_of(3, b""))), "audio is not served"),
    "odd bytes": (
        field_of(3, field_of(1, field_of(1, field_of(1, b"abc")))),
        "3 bytes are no int32",
    ),
    "cut off": (varint(3 << 3 | 2) + varint(99) + b"x", "cannot be read"),
    "endless varint": (b"\xff" * 20, "cannot be read"),
    "a number for a text": (field_of(4, 3), "another type"),
    "no text": (field_of(4, b"\xff\xfe"), "no text"),
    "sparse": (
        field_of(3, field_of(2, field_of(1, b"weights") + field_of(2, field_of(2, b"")))),
        r"weights: a sparse tensor",
    ),
    "another dtype": (
        field_of(3, field_of(2, field_of(1, b"w") + field_of(2, field_of(3, 4)))),
        "dtype 4",
    ),
    "another shape": (
        field_of(
            3,
            field_of(
                2,
                field_of(1, b"w")
                + field_of(2, tensor_bytes(np.zeros(3, np.float32)) + field_of(4, varint(7))),
            ),
        ),
        "do not have the shape",
    ),
    "seq_id 0": (field_of(2, 0), "seq_id: 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named(name: str) -> None:
    extra, words = BROKEN[name]
    with pytest.raises(Refused, match=words) as refusal:
        read_forward_backward(call_bytes(some_call(), extra), 10)
    assert 400 <= refusal.value.status < 500 and "\n" not in str(refusal.value)


def test_more_datums_than_are_served_are_refused_before_all_are_read() -> None:
    with pytest.raises(Refused, match="more than 1 datums"):
        read_forward_backward(call_bytes(some_call()), 1)


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_read_or_refused(noise: bytes, place: int, byte: int) -> None:
    """No other exception, whatever comes."""
    whole = bytearray(call_bytes(some_call()))
    whole[place % len(whole)] = byte
    for body in (noise, bytes(whole), bytes(whole[:place])):
        try:
            read_forward_backward(body, 10)
        except Refused as refusal:
            assert str(refusal)


def test_an_unknown_field_of_json_and_a_wrong_value_are_named() -> None:
    good = b'{"model_id":"m","seq_id":1,"adam_params":{"learning_rate":0.1}}'
    assert read_json(good, wire.OptimStep).adam_params.beta2 == 0.95
    for body, words in (
        (good.replace(b'"learning_rate"', b'"nesterov":true,"learning_rate"'), "nesterov"),
        (good.replace(b"0.1", b"-0.1"), "learning_rate"),
        (good.replace(b"0.1", b'"x"'), "learning_rate"),
        (b"[" * 5000, "OptimStep"),
        (b"\xff", "OptimStep"),
    ):
        with pytest.raises(Refused, match=words):
            read_json(body, wire.OptimStep)


def test_another_sdk_is_one_clear_line() -> None:
    wire.check_sdk("0.38.0")
    wire.check_sdk("0.38.7")
    for version in ("0.37.0", "0.3", "1.38.0", "", "x" * 500):
        with pytest.raises(Refused, match=r"install tinker==0\.38\.0"):
            wire.check_sdk(version)


def test_an_answers_bytes_are_these() -> None:
    """Worked out by hand from the numbers of the wire's fields."""
    logprobs = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    answer = wire.write_forward_backward(logprobs, {"loss:sum": 2.5})
    offsets = np.array([0, 8, 12], "<i8").tobytes()
    values = np.array([-1.0, -2.0, -3.0], "<f4").tobytes()
    batched = field_of(1, values) + field_of(2, offsets) + field_of(3, 1)
    entry = field_of(1, b"logprobs") + field_of(2, batched)
    record = field_of(2, entry) + field_of(3, 2)
    number = varint(2 << 3 | 1) + np.array(2.5, "<f8").tobytes()
    metric = field_of(1, b"loss:sum") + number
    assert answer == field_of(1, b"ArrayRecord") + field_of(2, record) + field_of(3, metric)


def test_datums_of_several_widths_are_in_records_of_their_own() -> None:
    arrays = [np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32), np.zeros(5, np.float32)]
    answer = wire.write_forward_backward(arrays, {})
    records = [content for number, content in wire._fields(memoryview(answer), "") if number == 2]
    assert len(records) == 2


def test_provenance_is_read() -> None:
    span = field_of(2, field_of(1, b"s:sample:0/3#1") + field_of(3, 2))
    datum = Datum(np.zeros(2, np.int32), {"target_tokens": np.zeros(2, np.int64)})
    body = call_bytes(call_of([datum], "ppo"))
    plain = read_forward_backward(body, 10)
    assert plain.data[0].sampled == ()
    chunk = field_of(1, field_of(1, np.zeros(2, "<i4").tobytes()))
    with_span = (
        field_of(1, b"m") + field_of(2, 1) + field_of(3, field_of(1, chunk) + field_of(4, span))
    )
    assert read_forward_backward(with_span, 10).data[0].sampled == ("s:sample:0/3#1",)
