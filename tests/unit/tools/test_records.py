"""Tools that read what a run has recorded: valid JSON that is no record, and records with other kinds of values, are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pa_npu.errors import UserError
from pa_npu.telemetry.chrome_trace import merge, read_spans
from pa_npu.telemetry.report import load_report
from tests.helpers.finished_run import make_run
from tools import bench_border, compare_runs, draw_idea, plot_runs
from tools.cluster import records

NO_RECORDS: tuple[Any, ...] = ([], [1, 2], 5, "text", None, True)
PROCESSES = ("coordinator", "trainer-0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def spoil(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces each line of a file by what `change` makes of it."""
    lines = [json.dumps(change(json.loads(line))) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{line}\n" for line in lines))


def read_by_every_tool(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads the timeline with each tool; whatever a tool refuses is one line."""
    merge(run)
    records._generated(run)
    records._trained(run)
    draw_idea.iterations(run)
    try:
        bench_border.main([str(run)])
    except SystemExit as refused:
        assert "\n" not in str(refused.code)
    assert "Traceback" not in capsys.readouterr().err


def test_lines_of_a_timeline_that_are_no_objects_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [run / "timeline" / f"{name}.jsonl" for name in PROCESSES]
    before = [read_spans(file) for file in files]
    others = "".join(f"{json.dumps(value)}\n" for value in NO_RECORDS)
    for file in files:
        file.write_text(f"{others}{file.read_text()}{others}")
    assert [read_spans(file) for file in files] == before and all(before)
    read_by_every_tool(run, capsys)


FIELDS = ("name", "lane", "start", "end", "args")
ARGUMENTS = ("version", "iteration", "lengths", "prompt", "computed")


@pytest.mark.parametrize("field", [*FIELDS, *ARGUMENTS])
def test_events_with_values_of_another_kind_are_left_out(
    field: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [run / "timeline" / f"{name}.jsonl" for name in PROCESSES]
    texts = [file.read_text() for file in files]
    for value in (*NO_RECORDS, {}, math.inf):

        def changed(event: dict[str, Any], value: Any = value) -> dict[str, Any]:
            if field in FIELDS:
                return {**event, field: value}
            return {**event, "args": {**event.get("args", {}), field: value}}

        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
            spoil(file, changed)
        read_by_every_tool(run, capsys)


@pytest.mark.parametrize("value", [[1, 2], 5], ids=repr)
def test_records_of_iterations_that_are_no_objects_are_one_line(
    value: Any, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "metrics.jsonl"
    file.write_text(f"{json.dumps(value)}\n{file.read_text()}")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl:1: is no object with an integer 'iteration'"
    ) as refused:
        load_report(str(run), 0)
    assert "\n" not in str(refused.value)
    assert plot_runs.main([str(run), "--out", str(tmp_path)]) == compare_runs.main([str(run)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("metrics.jsonl:1" in line for line in lines)
