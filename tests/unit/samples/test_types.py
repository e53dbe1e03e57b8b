"""A group survives the wire bit for bit; anything but a well-formed group is a GroupFormatError and nothing else."""

from __future__ import annotations

import gc
import re
import struct
import sys
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from pa_npu.samples.columns import GroupFormatError
from pa_npu.samples.group import IDENTITY, PER_SAMPLE, PER_TOKEN, Group
from pa_npu.samples.types import SampleBuilder
from pa_npu.samples.wire import FORMAT_VERSION, from_bytes, to_bytes

ENVELOPE_BYTES = 16


def make_group(
    prompt: int = 3, lengths: tuple[int, ...] = (2, 4, 1), seed: int = 0, **values: Any
) -> Group:
    """Several turns: between its first and its other trained tokens a sample has untrained ones, as
    many as its number.
    """
    random = np.random.default_rng(seed)
    start = random.integers(0, 2**31 - 1, prompt, dtype=np.int32)
    samples = []
    for number, length in enumerate(lengths):
        sample = SampleBuilder(start)
        for turn in (1, length - 1):
            written = random.integers(0, 150_000, turn, dtype=np.int32)
            sample.write(
                written, -random.random(turn, dtype=np.float32), int(random.integers(0, 6))
            )
            if turn == 1 and length > 1:
                sample.show(random.integers(0, 150_000, number, dtype=np.int32))
        samples.append(sample.finish(bool(random.integers(0, 2)), ""))
    group = Group.from_samples(
        samples,
        random.random(len(lengths), dtype=np.float32),
        random.standard_normal(len(lengths), dtype=np.float32),
        **{"run_seed": 9, "iteration": 5, "index": 2, "prompt_id": 11},
    )
    return replace(group, **values)


def assert_same(left: Group, right: Group) -> None:
    for name in (*IDENTITY, *PER_TOKEN, *PER_SAMPLE):
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
        else:
            assert a == b, name


def signed(payload: bytes) -> bytes:
    """An envelope whose checksum is right, so that the checks behind it are reached."""
    return struct.pack("<4sHHII", b"PAGR", FORMAT_VERSION, 0, zlib.crc32(payload), 0) + payload


@given(
    prompt=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9).map(tuple),
    header=st.tuples(*[st.integers(0, 2**63 - 1)] * 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_group_survives_the_wire_bit_for_bit(
    prompt: int, lengths: tuple[int, ...], header: tuple[int, ...], seed: int
) -> None:
    group = make_group(prompt, lengths, seed, **dict(zip(IDENTITY, header, strict=True)))
    parsed = from_bytes(to_bytes(group))
    assert_same(group, parsed)
    assert to_bytes(parsed) == to_bytes(group)


@given(data=st.data())
def test_damaged_bytes_are_refused_as_such(data: st.DataObject) -> None:
    good = bytearray(to_bytes(make_group()))
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
    if bytes(good) == to_bytes(make_group()):
        return
    with pytest.raises(GroupFormatError):
        from_bytes(bytes(good))


@given(data=st.data())
def test_hostile_payloads_with_a_right_checksum_raise_nothing_but_group_format_errors(
    data: st.DataObject,
) -> None:
    payload = bytearray(to_bytes(make_group())[ENVELOPE_BYTES:])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(payload) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    try:
        group = from_bytes(signed(bytes(payload)))
    except GroupFormatError:
        return
    # What the checks cannot tell from a real group is one: every rule holds on it.
    assert_same(group, from_bytes(to_bytes(group)))


def spans(row: int, column: int, value: int) -> np.ndarray:
    """Changed spans of make_group(): three samples, then two runs of the first, two of the second
    and one of the third.
    """
    good = load(to_bytes(make_group())[ENVELOPE_BYTES:])["spans"].copy()
    assert good[:, 0].tolist() == [5, 8, 4, 3, 4, 8, 10, 16], good
    good[row, column] = value
    return good


TENSOR_CHANGES: list[tuple[str, Any, str]] = [
    ("values", np.zeros(8, dtype=np.float64), "values is F64"),
    ("values", np.zeros((8, 1), dtype=np.float32), "expected F32 [n]"),
    ("values", np.zeros(7, dtype=np.float32), "8 spans and 7 values"),
    ("numbers", np.zeros(4, dtype=np.int64), "numbers has 4 values, expected 5"),
    ("numbers", np.zeros(5, dtype=np.int32), "numbers is I32"),
    ("numbers", np.array([-1, 0, 0, 0, 3]), "run_seed: -1 must be an integer"),
    ("numbers", np.array([0, 0, 0, 0, 0]), "for 0 samples"),
    ("numbers", np.array([0, 0, 0, 0, 10]), "8 spans and 8 values for 10 samples"),
    ("numbers", np.array([0, 0, 0, 0, 8]), "finished must be 0 or 1"),
    *(
        ("numbers", np.array([0, 0, 0, 0, 3, *part]), f"part: {part} are no samples of 3")
        for part in ([0, 0], [2, 4], [2, 1], [-1, 2])
    ),
    ("tokens", None, "expected ['numbers', 'spans', 'tokens', 'values']"),
    (
        "logprobs",
        None,
        "group 2 of iteration 5 (prompt 11): column logprobs, which the loss reads, is missing; "
        "the engine",
    ),
    (
        "surplus",
        np.zeros(1, dtype=np.float32),
        "column surplus is unknown, no feature of this run reads it",
    ),
    ("spans", np.zeros((8, 2), dtype=np.int32), "expected I32 [n, 3]"),
    ("spans", np.zeros(24, dtype=np.int32), "expected I32 [n, 3]"),
    ("spans", spans(0, 0, 2**31 - 1), "tokens, but samples of"),
    ("spans", spans(1, 0, -8), "does not fit to lengths"),
    ("spans", spans(0, 1, 1), "does not fit to lengths"),
    ("spans", spans(1, 1, 9), "does not fit to lengths"),
    ("spans", spans(1, 1, -1), "does not fit to lengths"),
    ("spans", spans(0, 2, 2), "finished must be 0 or 1"),
    ("spans", spans(3, 0, -1), "must follow one another"),
    ("spans", spans(3, 1, 0), "must follow one another"),
    ("spans", spans(3, 1, 9), "must follow one another"),
    ("spans", spans(7, 0, 17), "must follow one another"),
    ("spans", spans(7, 0, 13), "first token follows from nothing"),
    ("spans", spans(7, 2, -1), "logprobs: must be 0 for tokens that the policy did not write"),
    ("logprobs", np.zeros(6, dtype=np.float32), "logprobs has 6 values for"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), TENSOR_CHANGES, ids=lambda value: getattr(value, "dtype", value)
)
def test_tensors_of_another_shape_type_or_name_are_refused(
    name: str, value: Any, message: str
) -> None:
    tensors = load(to_bytes(make_group())[ENVELOPE_BYTES:])
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    with pytest.raises(GroupFormatError, match=re.escape(message)):
        from_bytes(signed(save(tensors)))


def changed(name: str, position: int, value: float) -> dict[str, Any]:
    array = getattr(make_group(), name).copy()
    array[position] = value
    return {name: array}


def with_mask(*first: int) -> dict[str, Any]:
    """Another mask for the first sample alone; its versions, log-probs and advantages stay."""
    component = make_group().component.copy()
    assert component[:5].tolist() == [0, 0, 0, 1, 1]
    component[:5] = first
    return {"component": component}


# make_group() has prompts of 3; tokens of its samples: p p p a a | p p p a e a a a | p p p a
INVALID: list[tuple[dict[str, Any], str]] = [
    (changed("tokens", 1, -2), "tokens: token ids must not be negative, lowest is -2"),
    ({"tokens": np.zeros(8, np.int32)}, "tokens: 8 values for 17 tokens; give one each"),
    (
        {"lengths": np.array([1, 12, 4], np.int32)},
        "a sample needs a prompt and a trained token, shortest is 1",
    ),
    ({"lengths": np.zeros(0, np.int32)}, "at least one sample"),
    (changed("logprobs", 3, np.nan), "logprobs: values must be finite, number 3 is nan"),
    (changed("rewards", 1, np.inf), "rewards: values must be finite, number 1 is inf"),
    ({"advantages": np.zeros(2, np.float32)}, "advantages: 2 values"),
    ({"advantages": [0.0, 0.0, 0.0]}, r"advantages: must be a float32 array \[n\], found list"),
    ({"rewards": np.zeros(3)}, "must be a float32 array"),
    ({"finished": np.array([0, 1, 1], np.uint8)}, "finished: must be a bool array"),
    (changed("component", 0, 1), "first token follows from nothing"),
    (changed("component", 16, 0), "sample 2 has no trained token"),
    (with_mask(0, 0, 1, 1, 0), "advantages: must be 0 for tokens that are not trained"),
    ({"weight": np.full(17, 0.5, np.float32)}, "weight: must be 1 for tokens that are not trained"),
    ({"weight": np.ones(16, np.float32)}, "weight: 16 values for 17 tokens"),
    (with_mask(0, 0, 0, 0, 1), "advantages: must be 0 for tokens that are not trained"),
    (changed("versions", 3, -1), "logprobs: must be 0 for tokens that the policy did not write"),
    (
        changed("versions", 3, -2),
        "versions: a weight version is at least 0, or -1 where the policy did not write",
    ),
    (changed("versions", 0, 4), "versions: must be -1 for tokens that are not trained"),
    (changed("advantages", 9, 0.5), "advantages: must be 0 for tokens that are not trained"),
    (changed("logprobs", 1, -0.5), "logprobs: must be 0 for tokens that the policy did not write"),
    ({"index": -1}, "index: -1 must be an integer"),
    ({"iteration": 1.0}, "iteration: 1.0 must be an integer"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    INVALID,
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_ill_formed_group_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupFormatError, match=message):
        replace(make_group(), **change)


def test_messages_name_the_group() -> None:
    with pytest.raises(GroupFormatError, match=r"group 2 of iteration 5 \(prompt 11\) rewards"):
        make_group(rewards=np.full(3, np.nan, np.float32))


def test_another_format_version_says_what_to_do() -> None:
    data = bytearray(to_bytes(make_group()))
    data[4] = 1
    with pytest.raises(
        GroupFormatError, match=r"format version 1 .* run coordinator and trainers from the same"
    ):
        from_bytes(bytes(data))


def test_derived_counts() -> None:
    group = make_group(prompt=3, lengths=(2, 4, 1))
    assert group.offsets().tolist() == [0, 5, 13, 17]
    assert group.trained_lengths.tolist() == [2, 4, 1] and group.prompt_lengths() == [3, 3, 3]
    assert (group.num_samples, group.num_trained, len(group.tokens)) == (3, 7, 17)
    versions = group.versions[group.trained]
    assert (
        group.version_range == (versions.min(), versions.max()) and versions.min() < versions.max()
    )


def test_a_slice_is_the_group_with_fewer_samples() -> None:
    group = make_group(lengths=(2, 4, 1, 3))
    middle = group[1:3]
    assert (middle.index, middle.num_samples, middle.lengths.tolist()) == (
        2,
        2,
        group.lengths[1:3].tolist(),
    )
    for number in (0, 1):
        assert middle.sequences()[number].tolist() == group.sequences()[number + 1].tolist()
    assert_same(group[0:4], group)


def test_what_samples_share_travels_once() -> None:
    long, short = make_group(prompt=5000, lengths=(4,) * 8), make_group(prompt=5, lengths=(4,) * 8)
    difference = len(to_bytes(long)) - len(to_bytes(short))
    assert 4995 * 4 <= difference < 4995 * 4 + 64, "a prompt token has 4 bytes, once"


def test_serialisation_does_not_loop_over_tokens_in_python() -> None:
    def lines_executed(length: int) -> int:
        group, count = make_group(prompt=512, lengths=(length,) * 8), 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += 1
            return trace

        gc.collect()  # what is collected while it counts would count too
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            from_bytes(to_bytes(group))
        finally:
            sys.settrace(before)
        return count

    lines_executed(1)  # imports and caches
    assert lines_executed(2000) == lines_executed(20) > 0


def with_second_component() -> Group:
    """make_group() whose prompts are trained by component 2, without versions, and with weights."""
    group = make_group()
    component = group.component.copy()
    component[(component == 0) & (np.arange(len(component)) % 3 == 1)] = 2
    component[group.offsets()[:-1]] = 0
    weight = np.where(component == 2, 0.25, 1).astype(np.float32)
    return replace(group, component=component, weight=weight)


def test_components_and_weights_travel_with_provenance_only_where_the_policy_wrote() -> None:
    group = with_second_component()
    assert {0, 1, 2} == set(group.component.tolist()) and not group.is_all_written
    arrived = from_bytes(to_bytes(group))
    for name in (
        "tokens",
        "component",
        "weight",
        "versions",
        "logprobs",
        "advantages",
        "lengths",
        "rewards",
    ):
        assert np.array_equal(getattr(arrived, name), getattr(group, name)), name
    assert arrived.prompt_lengths() == group.prompt_lengths() == make_group().prompt_lengths()
    assert arrived.version_range == make_group().version_range, "of tokens that the policy wrote"
    assert arrived.leading_lengths.tolist() == make_group().trained_lengths.tolist()
    plain = to_bytes(make_group())
    assert b"components" not in plain and b"weight" not in plain, (
        "they travel where they say something"
    )


def test_a_group_without_any_token_of_the_policy_travels() -> None:
    group = make_group()
    component = (group.component * 2).astype(np.uint8)
    none = {"versions": np.full_like(group.versions, -1), "logprobs": np.zeros_like(group.logprobs)}
    supervised = replace(
        group, component=component, advantages=np.zeros_like(group.advantages), **none
    )
    arrived = from_bytes(to_bytes(supervised))
    assert arrived.version_range == () and np.array_equal(arrived.component, component)


def test_groups_that_earlier_releases_left_are_read() -> None:
    """Version 3 is version 4 without components and weights."""
    group, data = make_group(), bytearray(to_bytes(make_group()))
    struct.pack_into("<H", data, 4, 3)
    assert to_bytes(from_bytes(data)) == to_bytes(group)
    struct.pack_into("<H", data, 4, FORMAT_VERSION + 1)
    with pytest.raises(GroupFormatError, match=r"format version 5 .* reads versions 3 and 4"):
        from_bytes(data)
