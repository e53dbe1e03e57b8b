"""Estimates of response lengths learn what a prompt does, and longest-first keeps Graham's bound and every index."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from pa_npu.coordinator.admission import ResponseLengths
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.schedule import dispatch_order


def prompt(number: int, length: int = 10) -> Prompt:
    return Prompt(number, np.full(length, 3, np.int32), "", "", {})


def test_the_limit_is_assumed_before_anything_was_seen_and_the_mean_for_prompts_not_seen():
    lengths = ResponseLengths(512)
    assert (lengths.mean(prompt(0)), lengths.longest(prompt(0))) == (512, 512)
    lengths.observe([(prompt(number), [50, 150]) for number in range(10)])
    assert lengths.mean(prompt(99)) == pytest.approx(100)
    assert lengths.longest(prompt(99)) == pytest.approx(150)


def test_a_prompts_estimate_goes_to_what_its_groups_were_and_follows_a_change():
    lengths = ResponseLengths(4096)
    for _ in range(8):
        lengths.observe(
            [(prompt(number), [400, 600] if number == 7 else [100, 120]) for number in range(50)]
        )
    assert lengths.mean(prompt(7)) == pytest.approx(500, rel=0.1)
    assert lengths.longest(prompt(7)) == pytest.approx(600, rel=0.1)
    for _ in range(8):
        lengths.observe([(prompt(7), [100, 120])])
    assert lengths.mean(prompt(7)) == pytest.approx(100, rel=0.15)


def test_lengths_that_grow_for_all_prompts_move_an_estimate_that_was_not_refreshed():
    lengths = ResponseLengths(10**6)
    lengths.observe([(prompt(number), [100 if number else 200]) for number in range(500)])
    for _ in range(20):
        lengths.observe([(prompt(number), [300]) for number in range(1, 500)])
    # prompt 0 counts as 1.5 times the others (half of the way from 1 to 2), whose length has
    # tripled
    assert lengths.mean(prompt(0)) == pytest.approx(450, rel=0.05)


def test_prompts_not_seen_yet_are_told_apart_by_their_length_where_that_says_something():
    lengths, numbers = ResponseLengths(4096), random.Random(0)
    sizes = [numbers.randint(20, 100) for _ in range(200)]
    lengths.observe(
        [
            (prompt(i, size), [3 * size + numbers.randint(-10, 10) for _ in range(8)])
            for i, size in enumerate(sizes)
        ]
    )
    assert lengths.mean(prompt(999, 40)) == pytest.approx(120, rel=0.05)
    assert lengths.mean(prompt(999, 90)) == pytest.approx(270, rel=0.05)
    assert lengths.mean(prompt(999, 100_000)) <= 4 * 180 * 1.05, (
        "nothing is extrapolated without end"
    )


def test_a_constant_prompt_length_is_no_slope():
    lengths = ResponseLengths(4096)
    lengths.observe([(prompt(number), [100 + number % 3]) for number in range(100)])
    assert lengths.mean(prompt(999, 50)) == pytest.approx(101, rel=0.01)


def test_longest_first_is_a_permutation_stable_for_equals_and_within_shares():
    assert dispatch_order("longest-first", [1.0, 3.0, 2.0, 3.0]) == [1, 3, 2, 0]
    assert dispatch_order("longest-first", [5.0] * 6) == list(range(6)), (
        "nothing known: the order of the prompts"
    )
    assert dispatch_order("longest-first", [1.0, 9.0, 2.0, 8.0, 7.0, 3.0], shares=2) == [
        1,
        2,
        0,
        3,
        4,
        5,
    ]
    numbers = random.Random(0)
    for _ in range(200):
        shares = numbers.randint(1, 4)
        count = shares * numbers.randint(1, 20)
        order = dispatch_order("longest-first", [numbers.random() for _ in range(count)], shares)
        assert sorted(order) == list(range(count))
        size = count // shares
        assert [index // size for index in order] == sorted(index // size for index in range(count))


def makespan(jobs: list[float], machines: int) -> float:
    """When the last machine is done, each taking the next job as soon as it is free."""
    free = [0.0] * machines
    for job in jobs:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free)


def shortest(jobs: list[int], machines: int) -> int:
    """The best makespan there is, by trying every assignment."""
    best = [sum(jobs)]

    def place(number: int, loads: list[int]) -> None:
        if max(loads) >= best[0]:
            return
        if number == len(jobs):
            best[0] = max(loads)
            return
        for machine in range(machines):
            if loads[machine] not in loads[:machine]:
                loads[machine] += jobs[number]
                place(number + 1, loads)
                loads[machine] -= jobs[number]

    place(0, [0] * machines)
    return best[0]


def test_longest_first_ends_within_four_thirds_of_the_best_order_and_arrival_order_does_not():
    numbers, worst_in_order = random.Random(3), 0.0
    for _ in range(150):
        machines = numbers.randint(2, 3)
        jobs = [
            round(10 * numbers.lognormvariate(1.0, 0.8)) + 1 for _ in range(numbers.randint(4, 9))
        ]
        best = shortest(jobs, machines)
        dispatched = [
            float(jobs[index])
            for index in dispatch_order("longest-first", [float(job) for job in jobs])
        ]
        assert makespan(dispatched, machines) <= (4 / 3 - 1 / (3 * machines)) * best + 1e-9, (
            jobs,
            machines,
        )
        worst_in_order = max(
            worst_in_order, makespan([float(job) for job in jobs], machines) / best
        )
    assert worst_in_order > 4 / 3, "the bound would hold for any order, so the check shows nothing"
