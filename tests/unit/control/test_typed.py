"""A typed message arrives as it was sent, and nothing else passes for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.control.typed import Counter, MessageError, Topic
from pa_npu.errors import DeadlineExceeded


@dataclass(frozen=True)
class Part:
    tokens: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class Whole:
    version: int
    parts: tuple[Part, ...]
    reason: str | None
    extra: dict[str, float]
    pair: tuple[str, int]


SENT = Whole(3, (Part((1, 2), -0.1234567890123), Part((), 2)), None, {"a": 1.5}, ("store", 80))
TOPIC = Topic("publish/{version}/whole", Whole, "rank 0 to announce version {version}")


@pytest.fixture
def channel() -> StoreChannel:
    return StoreChannel(dist.HashStore(), "run/")


def test_a_message_comes_back_equal_with_its_types(channel: StoreChannel) -> None:
    assert not TOPIC.exists(channel, version=3) and TOPIC.get_if_there(channel, version=3) is None
    TOPIC.put(channel, SENT, version=3)
    received = [
        TOPIC.get(channel, version=3),
        TOPIC.wait(channel, 1.0, version=3),
        asyncio.run(TOPIC.wait_async(channel, 1.0, version=3)),
        TOPIC.get_if_there(channel, version=3),
    ]
    assert received == [SENT] * 4
    assert isinstance(received[0].parts[0].tokens, tuple) and isinstance(
        received[0].parts[1].logprob, float
    )
    assert TOPIC.exists(channel, version=3) and not TOPIC.exists(channel, version=4)


def test_a_wait_names_what_is_missing_and_a_read_does_not_wait(channel: StoreChannel) -> None:
    with pytest.raises(DeadlineExceeded, match=r"rank 0 to announce version 7.*publish/7/whole"):
        TOPIC.wait(channel, 0.01, version=7)
    with pytest.raises(DeadlineExceeded, match="rank 0 to announce version 7"):
        asyncio.run(TOPIC.wait_async(channel, 0.01, version=7))
    with pytest.raises(StoreError, match="publish/7/whole"):
        TOPIC.get(channel, version=7)


def _altered(change: Callable[[dict[str, Any]], Any]) -> bytes:
    store = StoreChannel(dist.HashStore())
    TOPIC.put(store, SENT, version=0)
    envelope = json.loads(store.get_bytes(TOPIC.at(version=0)))
    return json.dumps(change(envelope) or envelope).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "is no message"),
        (b'{"version": 3}', "is no message"),
        (_altered(lambda e: e.pop("message")), "is no message"),
        (
            _altered(lambda e: e.update(message="Members")),
            "holds Members, this program reads Whole",
        ),
        (_altered(lambda e: e["fields"].pop("reason")), "missing required field `reason`"),
        (_altered(lambda e: e["fields"].update(more=1)), "does not know, more"),
        (
            _altered(lambda e: e["fields"].update(version="3")),
            r"Expected `int`, got `str` - at `\$.version`",
        ),
        (
            _altered(lambda e: e["fields"].update(version=True)),
            r"Expected `int`, got `bool` - at `\$.version`",
        ),
        (
            _altered(lambda e: e["fields"].update(version=3.0)),
            r"Expected `int`, got `float` - at `\$.version`",
        ),
        (
            _altered(lambda e: e["fields"].update(version=None)),
            r"Expected `int`, got `null` - at `\$.version`",
        ),
        (_altered(lambda e: e["fields"].update(reason=1)), r"got `int` - at `\$.reason`"),
        (_altered(lambda e: e["fields"].update(pair=["store"])), r"length 2, got 1 - at `\$.pair`"),
        (_altered(lambda e: e["fields"].update(extra=[])), r"at `\$.extra`"),
        (
            _altered(lambda e: e["fields"]["parts"][1].pop("tokens")),
            r"missing required field `tokens` - at `\$.parts\[1\]`",
        ),
        (
            _altered(lambda e: e["fields"]["parts"][0].update(tokens=[1, "x"])),
            r"got `str` - at `\$.parts\[0\].tokens\[1\]`",
        ),
        (_altered(lambda e: e["fields"].update(parts="none")), r"got `str` - at `\$.parts`"),
    ],
)
def test_anything_else_is_one_line_that_names_key_and_field(
    channel: StoreChannel, data: bytes, message: str
) -> None:
    channel.put_bytes(TOPIC.at(version=3), data)
    with pytest.raises(MessageError, match=message) as raised:
        TOPIC.get(channel, version=3)
    text = str(raised.value)
    assert (
        "publish/3/whole" in text
        and "same installation" in text
        and "\n" not in text
        and len(text) < 500
    )


def test_a_place_that_the_key_does_not_have_is_an_error_of_the_program(
    channel: StoreChannel,
) -> None:
    for place in ({}, {"version": 1, "attempt": 2}, {"attempt": 1}):
        with pytest.raises(TypeError, match="version"):
            TOPIC.exists(channel, **place)
    with pytest.raises(TypeError, match="Part is not a Whole"):
        TOPIC.put(channel, Part((), 0.0), version=1)  # type: ignore[arg-type]


def test_a_counter_counts(channel: StoreChannel) -> None:
    counter = Counter("changes")
    assert [
        counter.value(channel),
        counter.add(channel),
        counter.add(channel, 2),
        counter.value(channel),
    ] == [
        0,
        1,
        3,
        3,
    ]
