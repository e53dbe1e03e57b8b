"""`pa-npu report --groups`: medians and bands over runs that differ in their seed only, as table, JSON, pictures and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pa_npu.launcher.cli import main
from pa_npu.telemetry.report import bands, grouped, load_report, render_text
from tools import plot_runs
from tools.plot_runs import mean_parts, tpspd_over_time

SECONDS = {"sync": (8.0, 10.0, 9.0), "periodic": (5.0, 4.0, 6.0)}


def make_run(directory: Path, seconds: float, seed: int, stream: str, memory: int | None) -> Path:
    directory.mkdir(parents=True)
    records = [
        {
            **{
                "iteration": number,
                "version": number,
                "devices": 2,
                "iteration_s": seconds,
                "tpspd": 4000 / seconds / 2,
            },
            **{
                "tokens_prompt": 1000,
                "tokens_response": 3000,
                "tokens_computed": 3200,
                "generate_s": 3.0,
                "train_s": 2.0,
            },
            **{"publish_s": 0.25, "evaluation_s": 0.5, "checkpoint_s": 0.125, "trainer_idle": 0.5, "engine_idle": 0.25},
            **({"memory_engine_host_bytes": memory * 2**20 * (1 + 8 * (number == 0))} if memory else {}),
        }
        for number in range(4)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "config.yaml").write_text(
        f"run: {{device: cpu, seed: {seed}, dir: {directory}}}\nschedule: {{stream: {stream}}}\n"
        f"telemetry: {{warmup_iterations: 1}}\n"
    )
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    found = []
    for name, stream in (("sync", "false"), ("periodic", "true")):
        for seed, seconds in enumerate(SECONDS[name]):
            found.append(
                make_run(
                    tmp_path / f"{name}-{seed}", seconds, seed, stream, memory=100 + seed if stream == "true" else None
                )
            )
    return found


def test_a_group_has_the_median_of_its_runs_and_the_band_between_them(runs: list[Path]) -> None:
    sync, periodic = grouped([load_report(run) for run in runs])
    assert (sync.label, periodic.label) == ("stream=False", "stream=True")
    assert [report.name for report in periodic.reports] == ["periodic-0", "periodic-1", "periodic-2"]
    found = bands(periodic, [sync, periodic])
    assert (found["tpspd"].median, found["tpspd"].low, found["tpspd"].high) == pytest.approx((400, 2000 / 6, 500))
    assert found["ratio"].median == pytest.approx((2000 / 5) / (2000 / 9)), "to the median of the first group"
    assert found["memory_engine_host_bytes"].median == 101, "MiB, the warm-up left out"
    assert bands(sync, [sync, periodic])["memory_engine_host_bytes"].median is None
    text = render_text([sync, periodic])
    assert "400.0 (333.3 to 500.0)" in text and "ratio to the first group" in text
    assert (
        "Runs by group: stream=False: sync-0, sync-1, sync-2; stream=True: periodic-0, periodic-1, periodic-2. Medians"
        in text
    )


def test_curves_and_bars_are_of_whole_groups(runs: list[Path]) -> None:
    sync, periodic = grouped([load_report(run) for run in runs])
    seconds, *band = tpspd_over_time(periodic)[1]
    assert seconds == 10.0 and band == pytest.approx([400, 2000 / 6, 500])
    parts = mean_parts(sync)
    assert sum(parts.values()) == pytest.approx(9.0) and (parts["evaluate"], parts["checkpoint"]) == (0.5, 0.125)


def test_the_command_prints_groups_and_the_tool_draws_them(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pictures = tmp_path / "pictures"
    assert main(["report", *map(str, runs), "--groups", "--json"]) == 0
    sync, periodic = json.loads(capsys.readouterr().out)["groups"]
    assert periodic["iteration_s"] == {"median": 5.0, "low": 4.0, "high": 6.0} and sync["runs"][0] == "sync-0"
    assert plot_runs.main([*map(str, runs), "--groups", "--out", str(pictures)]) == 0
    assert "Written: " in capsys.readouterr().out
    names = {path.name for path in pictures.iterdir()}
    assert names == {"tpspd.png", "tpspd.svg", "parts.png", "parts.svg", "throughput.html"}
    text = (pictures / "throughput.html").read_text()
    assert text.count("<svg") == 2 and "Runs by group: stream=False" in text
    assert main(["report", *map(str, runs), "--groups", "--markdown"]) == 0
    assert "| iteration s | 9.000 (8.000 to 10.000) | 5.000 (4.000 to 6.000) |" in capsys.readouterr().out
