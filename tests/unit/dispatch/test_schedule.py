"""Schedules: orders are permutations, turns hold back until their time, windows change with the groups, engines fill by speed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from pa_npu.dispatch.schedule import (
    ORDERS,
    Dispatching,
    DispatchTurn,
    Schedule,
    Windows,
    dispatch_order,
    engine_with_room,
    same_windows,
)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shares", [1, 3])
def test_every_order_is_a_permutation_within_each_share(name, shares):
    numbers = random.Random(0)
    expected = [numbers.random() for _ in range(12)]
    order = dispatch_order(name, expected, shares)
    size = 12 // shares
    for start in range(0, 12, size):
        assert sorted(order[start : start + size]) == list(range(start, start + size))


def test_orders_by_length():
    expected = [3.0, 9.0, 1.0, 12.0, 5.0]
    assert dispatch_order("longest-first", expected) == [3, 1, 4, 0, 2]
    assert dispatch_order("shortest-first", expected) == [2, 0, 4, 1, 3]
    assert dispatch_order("in-order", expected) == [0, 1, 2, 3, 4]


def dispatching(turns: list[DispatchTurn], engines: int = 1) -> Dispatching:
    return Dispatching(
        Schedule("s", tuple(range(8)), (same_windows(["a"], 64),), tuple(turns)), engines
    )


def test_a_group_waits_for_its_completions_and_for_the_seconds_after_the_last_of_them():
    progress = dispatching(
        [DispatchTurn(0, 0.0), DispatchTurn(0, 2.5), DispatchTurn(1, 0.5), DispatchTurn(2, 0.0)]
    )
    assert progress.ready_at() == 0.0
    progress.note_dispatched()
    assert progress.ready_at() == 2.5, "seconds from the beginning"
    progress.note_dispatched()
    assert progress.ready_at() == math.inf, "not before a group completes"
    progress.note_completed(7.0)
    assert progress.ready_at() == 7.5
    progress.note_dispatched()
    progress.note_completed(9.0)
    assert progress.ready_at() == 9.0
    progress.note_dispatched()
    assert progress.ready_at() == 0.0, "replacements have no turns"


def test_an_engine_that_would_stand_idle_gets_a_group_whatever_its_turn():
    progress = dispatching(
        [DispatchTurn(0, 0.0), DispatchTurn(0, 99.0), DispatchTurn(2, 1.0), DispatchTurn(2, 1.0)],
        engines=2,
    )
    progress.note_dispatched()
    assert progress.ready_at() == 0.0, "one group in flight, two engines"
    progress.note_dispatched()
    assert progress.ready_at() == math.inf
    progress.note_completed(3.0)
    assert progress.ready_at() == 0.0


def test_windows_change_with_the_groups_dispatched():
    windows = (Windows({"a": 16, "b": 32}, 8), Windows({"a": 64}, 24, from_group=2))
    schedule = Schedule("s", (0, 1, 2), windows)
    progress = Dispatching(schedule, 2)
    assert [progress.window(name) for name in "abc"] == [16, 32, 8]
    progress.note_dispatched()
    assert progress.window("a") == 16
    progress.note_dispatched()
    assert [progress.window(name) for name in "abc"] == [64, 24, 24]
    assert schedule.largest_window == 64


@dataclass
class Load:
    in_flight_sequences: int
    in_flight_tokens: float
    shared: bool = False


def test_the_emptiest_engine_for_its_window_takes_the_group():
    loads = {"slow": Load(16, 1000.0), "fast": Load(32, 1900.0), "full": Load(64, 10.0)}
    windows = {"slow": 32, "fast": 64, "full": 64}
    assert engine_with_room(loads, 8, windows.__getitem__) == "fast", (
        "1900 of 64 are fewer than 1000 of 32"
    )
    assert engine_with_room(loads, 8, lambda _: 64) == "slow", (
        "negative control: with one window for all"
    )
    assert engine_with_room(loads, 40, windows.__getitem__) is None
    loads["idle"] = Load(0, 0.0)
    assert engine_with_room(loads, 400, lambda _: 8) == "idle", (
        "takes a group larger than its window"
    )
