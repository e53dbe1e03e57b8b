"""tools/bench_schedule.py: its rows are all combinations; its optimum is no later than any constant window and within the bound."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from pa_npu.dispatch.schedule import Schedule, same_windows
from pa_npu.planning.iteration_model.cluster import Cluster, EngineSpeed, VirtualGroup
from tools.bench_schedule import CASES, RESPONSES, SHARED, VirtualBench, best_known_s, drawn_lengths, main, median_for
from tools.simulate import simulate


def test_every_combination_is_a_row_under_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES) == 26
    assert {(c.groups, c.ratio, c.heavy, c.engines) for c in CASES if c.prompt is None and c.groups != 128} == {
        (groups, ratio, heavy, engines)
        for groups in (16, 64)
        for ratio in (0.5, 1.0, 2.0)
        for heavy in (False, True)
        for engines in (1, 2)
    }


def test_the_optimum_is_below_every_constant_window_and_above_the_longer_side():
    cluster = Cluster({"0": EngineSpeed(0.005, 0.00025)}, 256)
    for heavy in (False, True):
        lengths = [
            drawn_lengths(i, 0, RESPONSES, median_for(64, 256), 256) if heavy else [64] * RESPONSES for i in range(16)
        ]
        groups = [VirtualGroup(i, 0, tuple(map(float, ls)), 1e-4 * sum(ls), 1.0) for i, ls in enumerate(lengths)]
        ends = []
        for places in range(1, 17):
            schedule = Schedule("", tuple(range(16)), (same_windows(("0",), places * RESPONSES),))
            ends.append(simulate(cluster, groups, schedule))
        best = best_known_s(cluster, groups)
        train_s = sum(group.train_s for group in groups)
        assert max(train_s, min(end.generated_s for end in ends)) <= best <= min(end.end_s for end in ends)


def test_groups_that_end_in_the_step_of_an_arrival_are_counted():
    """With room for four groups and training of two waves each: backwards, groups come as others end, but for rounding."""
    cluster = Cluster({"0": EngineSpeed(0.004, 0.00025)}, 32)
    groups = [VirtualGroup(i, 0, (64.0,) * RESPONSES, 0.384, 1.0) for i in range(16)]
    assert 16 * 0.384 < best_known_s(cluster, groups) < 16 * 0.384 + 16 * 64 * 0.004


@pytest.mark.parametrize("given", ["12", "12,0.5", "12,0.5,-1", "12,0.5,x", "12,0.5,nan", "12,0.5,inf"])
def test_a_speed_that_is_none_is_refused_in_one_line(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(["--paced", given], monkeypatch, capsys) == (
        f"argument --paced: {given} is not three numbers, as in 12,0.5,0.12"
    )


@pytest.mark.parametrize("other", [["--shared-prompt"], ["--simulate"], ["--staleness", "1"]])
def test_what_paced_devices_are_not_for_is_refused(
    other: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refusal(["--paced", "12,0.5,0.12", *other], monkeypatch, capsys)
    assert refused.startswith("--paced is for rows alone") and other[0] in refused


def refusal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["bench_schedule.py", *arguments])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]


@pytest.mark.parametrize(
    "other", [["--devices", "4"], ["--virtual"], ["--colocated", "--rows", "equal-16-two-engines"]]
)
def test_rows_that_cannot_be_are_refused(
    other: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(other, monkeypatch, capsys).startswith(other[0])


def test_in_virtual_time_roles_are_ahead_of_turns_and_of_every_split_where_lengths_vary(tmp_path: Path) -> None:
    """With the coordinator of a run; nothing is ahead of the floor."""
    pace = EngineSpeed(0.018, 0.000045, 0.00001)
    args = argparse.Namespace(paced=pace, devices=4, max_num_seqs=96, response=100, iterations=5, virtual=True)
    (case,) = [case for case in SHARED if case.name == "heavy-tails"]
    found = VirtualBench(tmp_path, args).shared_row(case, 2)
    assert found.floor_s < found.roles_s < 0.95 * min(found.turns_s, found.best_split_s), found
    assert list(found.splits_s) == [2] and found.changes == 1.0
