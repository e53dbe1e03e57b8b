"""Samples and groups with arrays behind placeholder tokens, chosen and drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.samples.columns import STORED
from pa_npu.samples.group import Group
from pa_npu.samples.types import Sample, SampleBuilder

IDENTITY = {"run_seed": 0, "iteration": 0, "index": 0, "prompt_id": 0}
IMAGE = 9
"""The id of all placeholder tokens."""


def image(number: int, length: int = 4, features: int = 6) -> tuple[Attachment, ...]:
    """pixels [4 * length, features] and grid [1, 3] of a picture; its size is that of others."""
    pixels = np.random.default_rng(number).random((4 * length, features), dtype=np.float32)
    return (
        Attachment("pixels", pixels),
        Attachment("grid", np.array([[1, 2, 2 * length]], np.int64)),
    )


def two_images(first: int, second: int, seed: int = 0) -> Sample:
    """An image in the prompt, and another one that the environment shows after the first turn."""
    random = np.random.default_rng(seed)
    prompt = np.array([1, 2, IMAGE, IMAGE, IMAGE, IMAGE, 3], np.int32)
    sample = SampleBuilder(prompt, placeholders=[Placeholders(2, 4, image(first))])
    sample.write(random.integers(20, 90, 5, np.int32), -random.random(5, np.float32), 0)
    shown = np.array([4, IMAGE, IMAGE, IMAGE, IMAGE, 5], np.int32)
    sample.show(shown, placeholders=[Placeholders(1, 4, image(second))])
    sample.write(random.integers(20, 90, 3, np.int32), -random.random(3, np.float32), 0)
    return sample.finish(True, "")


def group_of(samples: list[Sample], index: int = 0) -> Group:
    rewards = np.arange(len(samples), dtype=np.float32)
    return Group.from_samples(samples, rewards, rewards + 1, **{**IDENTITY, "index": index})


def shows(placeholders: Any) -> list[tuple[int, int, list[tuple[str, bytes]]]]:
    """Where runs are and what they stand for, in plain values."""
    return [
        (
            run.start,
            run.length,
            [(attachment.name, attachment.digest) for attachment in run.attachments],
        )
        for run in placeholders
    ]


def assert_same_attachments(left: Group, right: Group) -> None:
    assert shows(left.placeholders) == shows(right.placeholders)
    assert len(left.attachments) == len(right.attachments)
    for attachment, another in zip(left.attachments, right.attachments, strict=True):
        assert (attachment.name, attachment.digest) == (another.name, another.digest)
        assert (
            attachment.array.dtype == another.array.dtype
            and attachment.array.shape == another.array.shape
        )
        assert attachment.array.tobytes() == another.array.tobytes()


@st.composite
def attachments(draw: st.DrawFn) -> Attachment:
    """Any name, type and shape, a number and an empty array among them."""
    dtype = np.dtype(draw(st.sampled_from(sorted(STORED))))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 5)))
    values = random.integers(0, 2 if dtype.kind == "b" else 100, shape)
    return Attachment(draw(st.sampled_from(["pixels", "grid", "sound"])), values.astype(dtype))


@st.composite
def shown_runs(draw: st.DrawFn, length: int, known: list[Attachment]) -> list[Placeholders]:
    """Runs of `length` tokens that do not overlap, adjacent ones among them."""
    runs, start = [], 0
    while True:
        start += draw(st.integers(0, 3))
        tokens = draw(st.integers(1, 3))
        if start + tokens > length:
            return runs
        shown = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        by_name = {attachment.name: attachment for attachment in shown}
        runs.append(Placeholders(start, tokens, tuple(by_name.values())))
        start += tokens


@st.composite
def attached_groups(draw: st.DrawFn) -> Group:
    known = draw(st.lists(attachments(), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = np.full(draw(st.integers(2, 8)), IMAGE, np.int32)
        runs = draw(shown_runs(len(prompt), known))
        sample = SampleBuilder(prompt, placeholders=runs)
        for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)):
            # few ids, so that samples part and meet; IMAGE is one that the policy may write too
            tokens = random.integers(IMAGE, IMAGE + 2, length, dtype=np.int32)
            sample.write(tokens, -random.random(length, dtype=np.float32), 0)
            shown = np.full(draw(st.integers(0, 5)), IMAGE, np.int32)
            sample.show(shown, placeholders=draw(shown_runs(len(shown), known)))
        samples.append(sample.finish(True, ""))
    return group_of(samples)
