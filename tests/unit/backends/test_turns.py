"""Turns: ranks that compute together open, train and close at the same time, whatever each has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.backends.in_step import Turn, Turns
from pa_npu.samples.microbatch import Microbatch, filler
from tests.helpers.stems import depth_first, long_group

# of a group: how many stems, 0 for none, and how many pieces
Shape = tuple[int, int]
NOTHING = filler(1, torch.device("cpu"))


def microbatches_of(shapes: Sequence[Shape]) -> list[Microbatch]:
    made: list[Microbatch] = []
    for index, (stems, pieces) in enumerate(shapes):
        group = long_group(9, [2] * max(2, pieces), index=index)
        stem_tokens = -(-8 // stems) if stems else None
        parts = depth_first(group, 1, stem_tokens=stem_tokens)
        if not stems:
            parts = [part.whole() for part in parts if not part.is_stem]
        made += parts
    return made


class Lockstep:
    """An all-reduce of threads, in the place of torch.distributed's."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._lock = threading.Lock()
        self._sum: torch.Tensor | None = None

    def all_reduce(self, state: torch.Tensor, **_: Any) -> None:
        with self._lock:
            self._sum = state.clone() if self._sum is None else torch.maximum(self._sum, state)
        self._barrier.wait()
        assert self._sum is not None
        state.copy_(self._sum)
        if self._barrier.wait() == 0:
            self._sum = None
        self._barrier.wait()


def is_last_of(source: list[Microbatch]) -> Callable[[], bool]:
    return lambda: not source


def turns_of_ranks(streams: list[list[Microbatch]]) -> list[list[Turn]]:
    turns: list[list[Turn]] = [[] for _ in streams]
    group: Any = "a group"

    def run(rank: int) -> None:
        left = list(streams[rank])
        arriving = (left.pop(0) for _ in range(len(left)))
        turns[rank] += Turns(arriving, group, lambda: NOTHING, is_last_of(left))

    lockstep = Lockstep(len(streams))
    with patch("pa_npu.backends.in_step.dist.all_reduce", lockstep.all_reduce):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return turns


def check_rank(turns: Sequence[Turn], stream: Sequence[Microbatch]) -> None:
    """Each microbatch once and in order, pieces behind their open stems, stems closed from the last."""
    computed = [turn.microbatch for turn in turns if turn.kind != "close"]
    assert [m for m in computed if m is not NOTHING] == list(stream)
    opened: list[Microbatch] = []
    for turn in turns:
        if turn.kind == "open":
            opened.append(turn.microbatch)
        elif turn.kind == "close":
            assert opened.pop() is turn.microbatch
        elif turn.microbatch is not NOTHING:
            stems = [stem for stem in opened if stem is not NOTHING]
            assert len(stems) >= len(turn.microbatch.before)
            for stem, before in zip(stems, turn.microbatch.before, strict=False):
                assert stem is before
    assert not opened


SHAPES = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 3)), max_size=3)


@given(ranks=st.lists(SHAPES, min_size=2, max_size=3))
@settings(max_examples=20, deadline=None)
def test_all_ranks_have_the_same_turns_and_each_its_own_microbatches(
    ranks: list[list[Shape]],
) -> None:
    streams = [microbatches_of(shapes) for shapes in ranks]
    turns = turns_of_ranks(streams)
    kinds = [[turn.kind for turn in of_rank] for of_rank in turns]
    assert all(of_rank == kinds[0] for of_rank in kinds)
    for of_rank, stream in zip(turns, streams, strict=True):
        check_rank(of_rank, stream)
        backwards = [turn.is_last for turn in of_rank if turn.kind != "open"]
        assert not any(backwards[:-1]), "gradients would be reduced before the last backward"
        assert backwards[-1:] in ([], [True])


def test_a_rank_alone_closes_its_stems_before_it_waits_for_the_next_group() -> None:
    taken: list[int] = []
    stream = microbatches_of([(2, 2), (0, 2), (1, 2)])
    arriving = (taken.append(number) or m for number, m in enumerate(stream))
    turns = Turns(arriving, None, lambda: NOTHING, lambda: len(taken) == len(stream))  # type: ignore[misc]
    seen = []
    for turn in turns:
        seen.append(f"{turn.kind} {len(taken)}{' last' if turn.is_last else ''}")
    first = ["open 1", "open 2", "train 3", "train 4", "close 4", "close 4"]
    assert seen == [*first, "train 5", "train 6", "open 7", "train 8", "train 9", "close 9 last"]


def test_keys_are_forgotten_when_a_stem_is_closed() -> None:
    (stem, *_) = stream = microbatches_of([(1, 2)])
    layout: Any = stem.layout
    layout.own.keep(("policy", 0), torch.zeros(8, 1, 2), torch.zeros(8, 1, 2))
    list(Turns(iter(stream), None, lambda: NOTHING, None))
    assert not layout.own._pairs
