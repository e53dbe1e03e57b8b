"""A group survives the wire bit for bit; anything but a well-formed group is a GroupFormatError and nothing else."""

from __future__ import annotations

import struct
import time
import zlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from pa_npu.samples.group import Group, GroupFormatError

ENVELOPE_BYTES = 16


def make_group(prompt: int = 3, lengths: tuple[int, ...] = (2, 4, 1), seed: int = 0, **values: Any) -> Group:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    arrays = {
        "prompt_tokens": random.integers(0, 2**31 - 1, prompt, dtype=np.int32),
        "response_tokens": random.integers(0, 150_000, total, dtype=np.int32),
        "response_lengths": np.array(lengths, dtype=np.int32),
        "logprobs": -random.random(total, dtype=np.float32),
        "rewards": random.random(len(lengths), dtype=np.float32),
        "advantages": random.standard_normal(len(lengths), dtype=np.float32),
        "finished": random.integers(0, 2, len(lengths), dtype=np.uint8),
    }
    return Group(**{"iteration": 5, "version": 5, "index": 2, "prompt_id": 11, **arrays, **values})


def assert_same(left: Group, right: Group) -> None:
    for field in fields(Group):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
        else:
            assert a == b, field.name


def signed(payload: bytes) -> bytes:
    """An envelope whose checksum is right, so that the checks behind it are reached."""
    return struct.pack("<4sHHII", b"PAGR", 1, 0, zlib.crc32(payload), 0) + payload


@given(
    prompt=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9).map(tuple),
    header=st.tuples(*[st.integers(0, 2**63 - 1)] * 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_every_group_survives_the_wire_bit_for_bit(
    prompt: int, lengths: tuple[int, ...], header: tuple[int, ...], seed: int
) -> None:
    names = ("iteration", "version", "index", "prompt_id")
    group = make_group(prompt, lengths, seed, **dict(zip(names, header, strict=True)))
    parsed = Group.from_bytes(group.to_bytes())
    assert_same(group, parsed)
    assert parsed.to_bytes() == group.to_bytes()


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_damaged_bytes_are_refused_as_such(data: st.DataObject) -> None:
    good = bytearray(make_group().to_bytes())
    damage = data.draw(st.sampled_from(["flip", "cut", "insert", "replace"]))
    position = data.draw(st.integers(0, len(good) - 1))
    if damage == "flip":
        good[position] ^= data.draw(st.integers(1, 255))
    elif damage == "cut":
        del good[position:]
    elif damage == "insert":
        good[position:position] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        good = bytearray(data.draw(st.binary(max_size=400)))
    if bytes(good) == make_group().to_bytes():
        return
    with pytest.raises(GroupFormatError):
        Group.from_bytes(bytes(good))


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_hostile_payloads_with_a_right_checksum_raise_nothing_but_group_format_errors(data: st.DataObject) -> None:
    payload = bytearray(make_group().to_bytes()[ENVELOPE_BYTES:])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    try:
        group = Group.from_bytes(signed(bytes(payload)))
    except GroupFormatError:
        return
    # What the checks cannot tell from a real group is one: every rule holds on it.
    assert_same(group, Group.from_bytes(group.to_bytes()))


TENSOR_CHANGES: list[tuple[str, Any]] = [
    ("rewards", np.zeros(3, dtype=np.float64)),
    ("rewards", np.zeros((3, 1), dtype=np.float32)),
    ("header", np.zeros(3, dtype=np.int64)),
    ("header", np.zeros(4, dtype=np.int32)),
    ("header", np.array([-1, 0, 0, 0])),
    ("finished", None),
    ("surplus", np.zeros(1, dtype=np.float32)),
    ("response_lengths", np.array([2**31 - 1, 2**31 - 1, 9], dtype=np.int32)),
]


@pytest.mark.parametrize(("name", "value"), TENSOR_CHANGES, ids=lambda value: getattr(value, "dtype", value))
def test_tensors_of_another_shape_type_or_name_are_refused(name: str, value: Any) -> None:
    tensors = load(make_group().to_bytes()[ENVELOPE_BYTES:])
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    with pytest.raises(GroupFormatError):
        Group.from_bytes(signed(save(tensors)))


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"prompt_tokens": np.zeros(0, np.int32)}, "at least one token"),
    ({"prompt_tokens": np.array([1, -2, 3], np.int32)}, "prompt_tokens: token ids must not be negative, lowest is -2"),
    (
        {"response_tokens": np.array([1, 2, 3, 4, 5, 6, -1], np.int32)},
        "response_tokens: token ids must not be negative",
    ),
    ({"response_tokens": np.zeros(8, np.int32)}, "8 values, but 3 responses of together 7 tokens need 7"),
    ({"response_lengths": np.array([0, 4, 3], np.int32)}, "every response needs at least one token, shortest is 0"),
    ({"response_lengths": np.zeros(0, np.int32)}, "at least one response"),
    (
        {"logprobs": np.array([0, 0, np.nan, 0, 0, 0, 0], np.float32)},
        "logprobs: values must be finite, number 2 is nan",
    ),
    ({"rewards": np.array([0, np.inf, 0], np.float32)}, "rewards: values must be finite, number 1 is inf"),
    ({"advantages": np.zeros(2, np.float32)}, "advantages: 2 values"),
    ({"advantages": [0.0, 0.0, 0.0]}, r"advantages: must be a float32 array \[n\], found list"),
    ({"rewards": np.zeros(3)}, "must be a float32 array"),
    ({"finished": np.array([0, 1, 2], np.uint8)}, "finished: must be 0 or 1, found 2"),
    ({"index": -1}, "index: -1 must be an integer"),
    ({"version": 1.0}, "version: 1.0 must be an integer"),
]


@pytest.mark.parametrize(
    ("change", "message"), INVALID, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_an_ill_formed_group_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupFormatError, match=message):
        replace(make_group(), **change)


def test_messages_name_the_group() -> None:
    with pytest.raises(GroupFormatError, match=r"group 2 of iteration 5 \(prompt 11, version 5\) finished"):
        make_group(finished=np.full(3, 9, np.uint8))


def test_another_format_version_says_what_to_do() -> None:
    data = bytearray(make_group().to_bytes())
    data[4] = 2
    with pytest.raises(GroupFormatError, match=r"format version 2 .* run coordinator and trainers from the same"):
        Group.from_bytes(bytes(data))


def test_derived_counts() -> None:
    group = make_group(prompt=3, lengths=(2, 4, 1))
    assert group.response_offsets().tolist() == [0, 2, 6, 7]
    assert (group.num_responses, group.num_response_tokens, group.num_sample_tokens) == (3, 7, 3 * 3 + 7)


def test_serialisation_sustains_millions_of_tokens_per_second() -> None:
    group = make_group(prompt=512, lengths=(2000,) * 8)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        Group.from_bytes(group.to_bytes())
        rates.append(group.num_response_tokens / (time.perf_counter() - start))
    assert max(rates) > 5e6, f"{max(rates) / 1e6:.1f} million tokens/s; is there a Python loop over tokens?"
