"""`pa-npu report` and the final summary show the numbers of metrics.jsonl, and refuse what is no run in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.telemetry.records import MetricsWriter, read_records
from pa_npu.telemetry.report import each_run, load_report, render_text, table_rows
from pa_npu.telemetry.run_summary import (
    by_rule_line,
    nothing_learned_line,
    overlap_line,
    summarise,
)
from tools import plot_runs
from tools.plot_runs import iteration_parts

ROOT = Path(__file__).resolve().parents[3]


def make_run(run_dir: Path, seconds: float, iterations: int = 4, balance: bool = True) -> Path:
    with MetricsWriter(run_dir) as writer:
        for iteration in range(iterations):
            writer.write(
                {
                    "iteration": iteration,
                    "version": iteration,
                    "tokens_prompt": 1000,
                    "tokens_response": 3000,
                    "tokens_computed": 3200,
                    "iteration_s": seconds * (10 if iteration == 0 else 1),
                    "devices": 2,
                    "generate_s": 0.75 * seconds,
                    "train_s": 0.5 * seconds,
                    "publish_s": 0.125,
                    "evaluation_s": 0.0,
                    "checkpoint_s": 0.25,
                    "trainer_idle": 0.5,
                    "engine_idle": 0.25,
                    **({"tail_waste": 0.125, "replica_imbalance": 0.0625} if balance else {}),
                }
            )
    (run_dir / "config.yaml").write_text("run: {device: cpu}\n")
    return run_dir


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pa_npu.launcher", "report", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, env={"PYTHONPATH": str(ROOT)}
    )


def test_json_holds_the_definition_with_warm_up_dropped(tmp_path: Path) -> None:
    done = report(make_run(tmp_path / "sync", 8.0), make_run(tmp_path / "periodic", 5.0), "--json")
    assert done.returncode == 0, done.stderr
    sync, periodic = json.loads(done.stdout)["runs"]
    assert sync["run"] == "sync" and periodic["run"] == "periodic"
    assert sync["tpspd"] == pytest.approx(4000 / 8.0 / 2)
    assert sync["tpspd_response"] == pytest.approx(3000 / 8.0 / 2)
    assert sync["tpspd_computed"] == pytest.approx(3200 / 8.0 / 2)
    assert (sync["ratio"], periodic["ratio"]) == (1.0, pytest.approx(8.0 / 5.0))
    assert (sync["iterations"], sync["dropped_iterations"], sync["device"]) == (3, 1, "cpu")
    assert (sync["generate_s"], sync["train_s"], sync["checkpoint_s"]) == (6.0, 4.0, 0.25)


def test_the_table_says_what_was_dropped(tmp_path: Path) -> None:
    runs = (
        make_run(tmp_path / "sync", 8.0),
        make_run(tmp_path / "a-rather-long-run-directory-name", 5.0),
    )
    text = report(*runs).stdout
    cells = {
        line.split("|")[1].strip(): line.split("|")[2:4]
        for line in text.splitlines()
        if line.count("|") >= 4
    }
    assert [cell.strip() for cell in cells["ratio to the first run"]] == ["1.000", "1.600"]
    assert [cell.strip() for cell in cells["trainer idle"]] == ["50.0%", "50.0%"]
    assert text.lower().count("warm-up iterations dropped") == 1, "the table has the numbers"
    assert "a device is one CPU core" in text
    (row,) = [line for line in text.splitlines() if "TPSPD " in line and "250.0" in line]
    assert "400.0" in row


def test_what_a_run_has_learned_and_its_synchronous_iterations_have_rows_of_their_own(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "turns", 5.0, iterations=8)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {
            "periodic": bool(number % 2),
            "reward_mean": number - 6.25,
            "accuracy": number / 10,
        }
        record["iteration_s"] = 4.0 if record["periodic"] else 6.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = dict(table_rows(each_run([load_report(run, 0)])))
    assert (rows["iteration s"], rows["  synchronous iteration s"]) == (["4.000"], ["6.000"])
    assert (rows["reward, last quarter"], rows["accuracy, last quarter"]) == (["0.250"], ["0.650"])


def test_engines_on_devices_of_another_kind_are_named_below_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mixed", 8.0)
    with (run / "config.yaml").open("a") as file:
        file.write("rollout: {engine_settings: [{engines: [1], device: cuda A100}]}\n")
    assert (
        "Engines of mixed by device: cuda A100 (engine 1)."
        in render_text(each_run([load_report(run)])).splitlines()
    )


def test_warm_up_can_be_overridden_and_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a" / "run", 8.0), make_run(tmp_path / "b" / "run", 8.0)
    result = json.loads(report(*runs, "--warmup", 0, "--json").stdout)["runs"]
    assert [entry["run"] for entry in result] == ["run #1", "run #2"]
    assert result[0]["tpspd"] == pytest.approx(4 * 4000 / (13 * 8.0) / 2)


def test_a_bad_run_directory_gives_one_line_and_exit_code_2(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", 8.0)
    (tmp_path / "empty").mkdir()
    short = make_run(tmp_path / "short", 8.0, iterations=1)
    broken = make_run(tmp_path / "broken", 8.0)
    (broken / "config.yaml").write_text("run: [\n")
    for run, message in (
        (tmp_path / "missing", "is not a directory"),
        (tmp_path / "empty", "has no metrics.jsonl"),
        (short, "all within the warm-up of 1"),
        (broken, "config.yaml:2: not valid YAML"),
    ):
        done = report(good, run)
        assert done.returncode == 2 and done.stdout == "", done
        assert (
            len(done.stderr.splitlines()) == 1
            and message in done.stderr
            and str(run) in done.stderr
        )


def test_the_summary_names_accuracy_throughput_and_what_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny", 8.0)
    with MetricsWriter(run, first_iteration=4) as writer:
        for version, accuracy in ((0, 0.412), (2, 0.7), (4, 0.903)):
            writer.write_evaluation({"version": version, "accuracy": accuracy})
    text = summarise(run)
    assert "0.412 before (version 0), 0.903 after (version 4)" in text
    assert "250.0" in text and str(run / "metrics.jsonl") in text
    assert f"advice: pa-npu view {run}\n" in f"{text}\n"
    assert "checkpoints" not in text.partition("Written:")[2]


def test_the_summary_of_a_run_too_short_for_throughput_still_names_its_files(
    tmp_path: Path,
) -> None:
    text = summarise(make_run(tmp_path / "short", 8.0, iterations=1))
    assert "no evaluation" in text and "Throughput: none" in text and "metrics.jsonl" in text


def turns(kinds: list[bool], slow_first: float = 0.0) -> list[dict[str, object]]:
    return [
        {
            "iteration": i,
            "periodic": kind,
            "iteration_s": (2.0 if kind else 3.2) + (slow_first if i < 2 else 0.0),
            "generate_s": 2.0 if kind else 1.8,
            "train_s": 1.2,
            "evaluation_s": None,
        }
        for i, kind in enumerate(kinds)
    ]


def test_a_run_that_took_turns_says_what_synchronous_iterations_take() -> None:
    """1.6x of (1.8 + 1.2) / 1.8 = 1.67x; iterations before the turns are not counted."""
    line = overlap_line(turns([True, True, True, False, True, False, True], slow_first=9.0))
    assert line is not None
    assert "take 3.20 s" in line and "periodic ones 2.00 s (medians of 2 and 3" in line
    assert "1.60x as fast, of a possible 1.67x" in line and "96% of it" in line
    for kinds in ([True] * 8, [False] * 8, [True, True, False, True], []):
        assert overlap_line(turns(kinds)) is None


def test_the_last_iterations_are_synchronous_in_turn_where_they_are_to_be_compared() -> None:
    schedule = {"iterations": 10, "compare_iterations": 4}
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "schedule": schedule}
    config = Config.model_validate(tree)
    assert [i for i in range(10) if not config.schedule.streams(i)] == [6, 8]
    synchronous = Config.model_validate({**tree, "schedule": {**schedule, "stream": False}})
    assert not any(synchronous.schedule.streams(i) for i in range(10))


def test_tail_waste_and_imbalance_are_shown_where_the_records_have_them(tmp_path: Path) -> None:
    older = make_run(tmp_path / "older", 8.0, balance=False)
    rows = render_text(
        each_run([load_report(older), load_report(make_run(tmp_path / "run", 8.0))])
    ).splitlines()
    cells = {
        line.split("|")[1].strip(): line.split("|")[2:4] for line in rows if line.count("|") >= 4
    }
    assert [cell.strip() for cell in cells["tail waste"]] == ["-", "12.5%"]
    assert [cell.strip() for cell in cells["replica imbalance"]] == ["-", "6.2%"]


def test_an_iterations_seconds_are_divided_without_loss_and_overlap_is_counted_once() -> None:
    record = {
        "iteration_s": 10.0,
        "generate_s": 6.0,
        "train_s": 5.0,
        "publish_s": 1.0,
        "evaluation_s": None,
        "checkpoint_s": 0.5,
    }
    parts = iteration_parts(record)
    assert parts == {
        "generate while trainers wait": 3.5,
        "generate and train at once": 2.5,
        "train alone": 2.5,
        "publish and border": 1.0,
        "evaluate": 0.0,
        "checkpoint": 0.5,
        "other": 0.0,
    }
    synchronous = iteration_parts({"iteration_s": 12.0, "generate_s": 6.0, "train_s": 5.0})
    assert synchronous["generate and train at once"] == 0.0 and synchronous[
        "other"
    ] == pytest.approx(1.0)


def test_pictures_and_a_page_of_runs_side_by_side(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "sync", 8.0), make_run(tmp_path / "periodic", 5.0)
    assert plot_runs.main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    names = {"tpspd", "parts"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"{name}{suffix}" for name in names for suffix in (".png", ".svg")),
        "throughput.html",
    }
    page = (tmp_path / "out" / "throughput.html").read_text()
    assert page.count("<svg") == 2 and "<td>TPSPD</td><td>250.0</td><td>400.0</td>" in page


def test_a_last_line_that_is_torn_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"iteration": 1}\n{"iteration": 2, "rew'
    )
    assert [record["iteration"] for record in read_records(tmp_path)] == [0, 1]
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"iteration": 1, "rew\n{"iteration": 2}\n'
    )
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: is not JSON"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([(0.0, 0.0), (0.0, 0.0)], "Note: every reward of the run is 0"),
        ([(1.0, 0.0), (0.5, 0.0)], "Note: all rewards inside each group were equal"),
        ([(0.0, 0.0), (0.5, 0.1)], None),
        ([], None),
    ],
)
def test_a_run_that_could_learn_nothing_says_so_once(
    rewards: list[tuple[float, float]], message: str | None, tmp_path: Path
) -> None:
    records = [{"reward_mean": mean, "reward_std": deviation} for mean, deviation in rewards]
    line = nothing_learned_line(records, tmp_path)
    assert (line is None) if message is None else (line is not None and line.startswith(message))


def test_the_summary_says_what_was_not_computed_and_what_means_are_over():
    records = [{"groups": 8, "groups_skipped": 3}, {"groups": 8}]
    line = by_rule_line(records)
    assert line is not None
    assert line.startswith("Not computed: 3 of 16 groups")
    assert "means over the tokens of the others" in line
    assert by_rule_line([{"groups": 8}]) is None
    assert by_rule_line([{"groups": 8, "groups_skipped": 8}]) is None, "said already"
