"""compare_runs: curves, bands and differences are those of the records, and pictures are made and equal for equal numbers."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pa_npu.errors import DataError, UserError
from tools import plots
from tools.run_curves import curve, differences, group_runs, load_runs, welch_half_width

ROOT = Path(__file__).resolve().parents[3]


def make_run(
    run_dir: Path, seed: int, stream: bool, rewards: list[float], accuracies: dict[int, float]
) -> Path:
    run_dir.mkdir(parents=True)
    config = {
        "run": {"dir": str(run_dir), "seed": seed},
        "schedule": {"stream": stream},
        "rollout": {"responses_per_prompt": 8},
    }
    (run_dir / "config.yaml").write_text(json.dumps(config))
    seconds = 1.0 if stream else 2.0
    records = [
        {
            "iteration": i,
            "version": i,
            "reward_mean": reward,
            "groups": 4,
            "iteration_s": seconds,
            "tpspd": 100.0 / seconds,
        }
        for i, reward in enumerate(rewards)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    entries = [
        {"version": version, "accuracy": accuracy} for version, accuracy in accuracies.items()
    ]
    (run_dir / "evaluations.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries)
    )
    return run_dir


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={"PYTHONPATH": str(ROOT)},
    )


def make_seeds(directory: Path) -> list[Path]:
    return [
        make_run(
            directory / f"{'periodic' if stream else 'sync'}-{seed}",
            seed,
            stream,
            [0.1 * seed + 0.1 * i for i in range(8)],
            {0: 0.25, 8: 0.5 + 0.1 * seed},
        )
        for stream in (False, True)
        for seed in (1, 2, 3)
    ]


def test_runs_that_differ_in_their_seed_form_a_group_named_by_what_tells_it_apart(
    tmp_path: Path,
) -> None:
    groups = group_runs(load_runs(make_seeds(tmp_path)))
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("stream=False", [1, 2, 3]),
        ("stream=True", [1, 2, 3]),
    ]


def test_a_curve_is_the_mean_over_seeds_and_its_band_the_range(tmp_path: Path) -> None:
    sync, periodic = group_runs(load_runs(make_seeds(tmp_path)))
    points = curve(periodic, "reward_mean", "samples")
    assert points[2] == pytest.approx(
        (3 * 4 * 8, 0.4, 0.3, 0.5)
    )  # third iteration: 3 x 4 groups x 8 samples are trained
    assert [x for x, *_ in curve(sync, "reward_mean", "seconds")] == pytest.approx(
        [2.0 * i for i in range(1, 9)]
    )
    # evaluations are of weight versions: the one before training stands at 0, the last after all
    # iterations
    assert curve(sync, "eval_accuracy", "iteration") == [
        (0.0, 0.25, 0.25, 0.25),
        (8.0, pytest.approx(0.7), 0.6, 0.8),
    ]


def test_differences_are_of_the_last_quarter_and_equal_runs_have_no_gap(tmp_path: Path) -> None:
    actual = {
        (d.metric.key, d.label): d for d in differences(group_runs(load_runs(make_seeds(tmp_path))))
    }
    reward = actual["reward_mean", "stream=True"]
    assert reward.mean == pytest.approx(
        statistics.fmean(0.1 * seed + 0.1 * i for seed in (1, 2, 3) for i in (6, 7))
    )
    assert reward.largest_gap == 0.0
    assert actual["tpspd", "stream=True"].mean - actual[
        "tpspd", "stream=True"
    ].first_mean == pytest.approx(50.0)
    assert actual["tpspd", "stream=True"].largest_gap == pytest.approx(
        50.0
    )  # the control: a gap is seen where there is one
    # the first group has nothing to differ from
    assert actual["reward_mean", "stream=False"].half_width is None


def test_the_interval_of_a_difference_covers_the_true_one_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        a = random.normal(1.0, 1.0, 3)
        b = random.normal(0.0, 3.0, 5)
        half = welch_half_width(list(a), list(b))
        assert half is not None
        covered += abs((a.mean() - b.mean()) - 1.0) <= half
    # quantiles of whole degrees of freedom, rounded down, err to the safe side
    assert 0.94 <= covered / 4000 <= 0.985
    assert welch_half_width([1.0], [1.0, 2.0]) is None


def test_the_tool_writes_picture_and_page_that_need_nothing_else(tmp_path: Path) -> None:
    runs = make_seeds(tmp_path / "runs")
    done = compare(*runs, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "| mean reward (reward) | stream=True | 0.85 | +0 | -" in done.stdout
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert page.count("<svg") == 3
    assert (
        "http" not in page.replace("http://www.w3.org", "") and "src=" not in page
    )  # names of formats, nothing to fetch
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    bad = compare(tmp_path)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) == 1 and str(tmp_path) in bad.stderr


def test_equal_numbers_make_equal_pictures_and_other_suffixes_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        figure, (panel,) = plots.new_figure()
        panel.plot([0, 1, 2], [1.0, math.pi if name != "c" else 3.0, 2.0], **plots.line_style(0))
        plots.save(figure, tmp_path / name)
    for suffix in (".png", ".svg"):
        a, b, c = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b", "c"))
        assert a == b != c
    with pytest.raises(UserError, match=r"is \.png or \.svg"):
        plots.save(figure, tmp_path / "picture.gif")


def test_a_directory_that_holds_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing: is not a directory"):
        load_runs([tmp_path / "missing"])
