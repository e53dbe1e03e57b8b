"""The automatic window finds and keeps the smallest number of sequences in flight that loses no throughput."""

from __future__ import annotations

import functools
import logging
import statistics

import pytest
from helpers.engine_sim import simulate

from pa_npu.dispatch.window import AutoWindow, FixedWindow, GroupTiming, make_window

ENGINES = {
    "affine": lambda c: 0.0053 + 0.00046 * c,  # fitted to a tiny model on one core
    "knee": lambda c: max(0.02, 0.02 / 64 * c),  # memory-bound up to 64, then compute-bound
    "saturated at once": lambda c: 0.0001 + 0.001 * c,
    "never saturated": lambda c: 0.02,
}


@functools.cache
def ground_truth(engine: str, tokens: tuple[int, int], groups: int) -> dict[int, float]:
    """Share of the best throughput of an iteration of `groups` groups by fixed window, on the engine without noise."""
    rates = {
        window: simulate(ENGINES[engine], FixedWindow(window), iterations=1, groups=groups, tokens=tokens, seed=9)[0]
        for window in range(8, min(256, 8 * groups) + 1, 8)
    }
    best = max(rate.tokens_per_s for rate in rates.values())
    return {window: rate.tokens_per_s / best for window, rate in rates.items()}


@pytest.mark.parametrize("groups", [32, 96])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tokens", [(64, 64), (16, 64)], ids=["equal lengths", "mixed lengths"])
def test_auto_window_keeps_nearly_all_throughput_and_no_more_sequences_than_that_needs(engine, tokens, groups):
    share = ground_truth(engine, tokens, groups)
    smallest = min(window for window in share if share[window] >= 0.95)
    kept, chosen = [], []
    for seed in range(3):
        window = AutoWindow(8, 256, 8 * groups)
        runs = simulate(ENGINES[engine], window, iterations=6, groups=groups, tokens=tokens, noise=0.15, seed=seed)
        # the first iteration climbs; the windows of the others are what a run gets
        kept += [share[run.window_at_end] for run in runs[1:]]
        chosen += [run.window_at_end for run in runs[1:]]
    assert statistics.mean(kept) >= 0.92, f"throughput kept {kept} with windows {chosen}, smallest good one {smallest}"
    assert min(kept) >= 0.8, f"throughput kept {kept} with windows {chosen}"
    assert statistics.mean(chosen) <= max(2 * smallest, 64), f"windows {chosen}, smallest good one {smallest}"


def test_few_waves_are_even_ones():
    """Two waves take what they take: a window of half the iteration loses nothing against one of three quarters."""
    window = AutoWindow(8, 256, 256)
    runs = simulate(ENGINES["affine"], window, iterations=5, groups=32)
    share = ground_truth("affine", (64, 64), 32)
    assert [run.window_at_end for run in runs[2:]] == [128] * 3, [run.window_at_end for run in runs]
    assert share[128] > share[192] - 0.01 and share[128] >= 0.95


def test_small_windows_lose_throughput_on_these_engines():
    """Negative control: the promise above is not met by any window."""
    share = ground_truth("affine", (64, 64), 96)
    assert share[8] < 0.5 and share[64] < 0.9


def test_one_wave_that_fits_at_once_needs_no_search():
    window = AutoWindow(8, 256, 16)
    assert window.sequences == 16 and window.settled


def test_window_is_never_below_one_group_nor_above_the_cap():
    window = AutoWindow(16, 40, 12 * 16)
    runs = simulate(ENGINES["never saturated"], window, iterations=4, groups=12, responses=16)
    assert all(16 <= run.window_at_end <= 32 for run in runs)
    assert AutoWindow(16, 4, 1000).sequences == 16


def test_engine_that_becomes_faster_is_noticed_by_the_recheck():
    """Long responses saturate the engine early; once it is faster, the window grows again."""
    window = AutoWindow(8, 256, 512)
    simulate(ENGINES["saturated at once"], window, iterations=2, groups=64)
    before = window.sequences
    simulate(ENGINES["knee"], window, iterations=24, groups=64, noise=0.05)
    assert before <= 32
    share = ground_truth("knee", (64, 64), 64)
    assert share[window.sequences] >= 0.85, f"{before} -> {window.sequences}"


def test_one_stalled_group_does_not_move_the_window():
    disturbed, control = AutoWindow(8, 256, 512), AutoWindow(8, 256, 512)
    for window in (disturbed, control):
        simulate(ENGINES["knee"], window, iterations=2, groups=64)
    disturbed.observe(GroupTiming(in_flight=float(disturbed.sequences), duration_s=1000.0, longest=64))
    for window in (disturbed, control):
        window.end_iteration()
    assert disturbed.sequences == control.sequences


def test_decisions_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="pa_npu.dispatch.window"):
        simulate(ENGINES["knee"], AutoWindow(8, 256, 512), iterations=2, groups=64)
    messages = [record.getMessage() for record in caplog.records]
    assert any("trying 64 sequences" in message for message in messages), messages
    assert any("sequences per engine (climbed)" in message for message in messages), messages


def test_fixed_window_and_the_choice_between_both():
    assert make_window(48, 8, 256, 1024).sequences == 48
    auto = make_window("auto", 8, 64, 1024)
    simulate(ENGINES["never saturated"], auto, iterations=2, groups=64)
    assert auto.sequences <= 64, "max_num_seqs bounds the automatic window"
    assert make_window("auto", 8, 256, 16).sequences == 16, "an iteration's own sequences bound it too"


def test_engines_that_join_and_leave_change_the_waves_and_the_window_at_once():
    """64 groups on one engine run well 10 at a time; 32 on each of two do not, because 2 of them would be a wave of their own."""
    window = AutoWindow(8, 256, 512)
    simulate(ENGINES["knee"], window, iterations=5, groups=64, noise=0.1)
    alone = window.sequences
    share_of_two = ground_truth("knee", (64, 64), 32)
    assert share_of_two[alone] < 0.9, f"negative control: the window {alone} of one engine does not fit two"
    window.begin_iteration(2)
    assert share_of_two[window.sequences] >= 0.95, window.sequences
    simulate(ENGINES["knee"], window, iterations=3, groups=32, noise=0.1)
    assert share_of_two[window.sequences] >= 0.95, window.sequences
    window.begin_iteration(1)
    assert ground_truth("knee", (64, 64), 64)[window.sequences] >= 0.95, window.sequences


def test_window_is_bounded_by_what_is_left_for_one_engine_and_grows_when_engines_leave():
    window = AutoWindow(8, 256, 256, num_engines=4)
    simulate(ENGINES["never saturated"], window, iterations=2, groups=8)
    assert window.sequences == 64, "256 sequences on four engines"
    window.begin_iteration(1)
    runs = simulate(ENGINES["never saturated"], window, iterations=8, groups=32)
    assert [run.window_at_end for run in runs][-1] == 256, "found by the rechecks"
    window.begin_iteration(8)
    assert window.sequences == 32
    window.begin_iteration(5)
    assert window.sequences == 56, "32 groups on five engines are seven for one of them"


def test_the_same_number_of_engines_changes_nothing():
    told, control = AutoWindow(8, 256, 512), AutoWindow(8, 256, 512)
    for _ in range(4):
        told.begin_iteration(1)
        for window in (told, control):
            simulate(ENGINES["affine"], window, iterations=1, groups=64, noise=0.1)
        assert told.sequences == control.sequences
