"""Parts of a group: they make it up, end together, and are there only where that ends the iteration earlier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.dispatch.assignment import common_end_s, divide_group
from pa_npu.dispatch.roles import trained_s

TIMES = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6)
PROMPT_S = 0.5


@given(free_s=TIMES, work_s=st.floats(0.0, 500.0))
def test_a_common_end_has_all_the_work_between_when_replicas_are_free_and_it(
    free_s: list[float], work_s: float
) -> None:
    end_s = common_end_s(free_s, work_s)
    assert sum(max(0.0, end_s - at_s) for at_s in free_s) == pytest.approx(work_s, abs=1e-6)


def seconds_of(samples: list[float], prompt_s: float = PROMPT_S) -> object:
    return lambda first, last: prompt_s + sum(samples[first:last])


@given(
    samples=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=16),
    free_s=TIMES,
    others_s=st.floats(0.0, 50.0),
)
def test_parts_make_up_the_group_and_end_no_later_than_all_of_it_on_the_first_free_replica(
    samples: list[float], free_s: list[float], others_s: float
) -> None:
    seconds = seconds_of(samples)
    free = dict(enumerate(free_s))
    whole_s = min(free_s) + seconds(0, len(samples))  # type: ignore[operator]
    parts = divide_group(len(samples), seconds, free, common_end_s(free_s, sum(samples) + others_s))  # type: ignore[arg-type]
    spans = sorted(parts.values())
    assert [0, *(last for _, last in spans)] == [*(first for first, _ in spans), len(samples)], (
        "each sample once"
    )
    ends = [free[replica] + seconds(*part) for replica, part in parts.items()]  # type: ignore[operator]
    assert max(ends) <= whole_s * (1 + 1e-9)


def test_one_group_is_divided_among_replicas_that_wait_and_left_whole_where_others_keep_them_busy() -> (
    None
):
    seconds = seconds_of([1.0] * 8, prompt_s=0.0)
    free = dict.fromkeys(range(4), 0.0)
    alone = divide_group(8, seconds, free, common_end_s([0.0] * 4, 8.0))  # type: ignore[arg-type]
    assert sorted(alone.values()) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert divide_group(8, seconds, free, common_end_s([0.0] * 4, 32.0)) == {0: (0, 8)}, (
        "four groups, four replicas"
    )  # type: ignore[arg-type]
    dear = seconds_of([1.0] * 8, prompt_s=100.0)
    assert len(divide_group(8, dear, free | {1: 99.0, 2: 99.0, 3: 99.0}, 0.0)) == 1, (
        "a prompt costs more than is gained"
    )  # type: ignore[arg-type]


def test_a_replica_trains_no_group_before_it_is_there() -> None:
    """Replicas that are free from the start wait for what comes late; a long wait of one must not
    count for another's start.
    """
    arriving = [(10.0, 4.0)] * 6
    assert trained_s(arriving, [0.0, 0.0, 0.0]) == 18.0
    assert trained_s(arriving, [0.0, 0.0, 0.0, 0.0]) == 18.0
    assert trained_s(arriving, [0.0, 0.0, 0.0, 0.0], 8) == 16.0, (
        "24 s of work from 10 s on, on four"
    )
    assert trained_s([(1.0, 2.0), (5.0, 4.0)], [0.0, 0.0], 8) == 7.0
    assert trained_s([(1.0, 2.0), (5.0, 4.0)], [0.0] * 100, 8) == 5.5, (
        "no more replicas than samples"
    )


@given(
    arriving=st.lists(
        st.tuples(st.floats(0.0, 50.0), st.floats(0.1, 20.0)), min_size=1, max_size=8
    ),
    free_s=TIMES,
)
def test_no_prediction_is_below_what_the_work_allows(
    arriving: list[tuple[float, float]], free_s: list[float]
) -> None:
    arriving = sorted(arriving)
    costs = np.asarray([cost for _, cost in arriving])
    whole = trained_s(arriving, list(free_s))
    divided = trained_s(arriving, list(free_s), 8)
    for end_s in (whole, divided):
        assert end_s >= common_end_s(free_s, float(costs.sum())) - 1e-6
    assert whole >= max(at + cost for at, cost in arriving) - 1e-6
    assert divided <= whole + 1e-6
