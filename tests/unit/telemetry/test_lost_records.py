"""Records that cannot be written are one line and a count, never an end; no record holds what a terminal would obey."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.errors import PaNpuError, printable
from pa_npu.launcher.process.console import Console
from pa_npu.launcher.process.process_tree import MarkedLines, last_lines
from pa_npu.telemetry import records
from pa_npu.telemetry.chrome_trace import read_events
from pa_npu.telemetry.logs import setup_logging
from pa_npu.telemetry.records import (
    EVALUATIONS,
    METRICS,
    MetricsWriter,
    RecordFile,
    drop_records,
    json_line,
    lost_records,
    read_records,
)
from pa_npu.telemetry.timeline import Timeline


@pytest.fixture(autouse=True)
def fresh_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_lost", 0)
    monkeypatch.setattr(records, "_reported", set())


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """The kernel cuts writes off at this size and refuses what is beyond, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_half_a_line_is_taken_back_and_later_lines_are_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(tmp_path / "new" / "records")
    file.write("a" * 50)
    with caplog.at_level(logging.WARNING), files_up_to(100):
        for _ in range(3):
            file.write("b" * 80)
        file.write("c" * 20)
    file.write("d" * 80)
    file.close()
    file.write("after the end")
    assert (tmp_path / "new" / "records").read_text().splitlines() == ["a" * 50, "c" * 20, "d" * 80]
    assert lost_records() == 3
    assert len(caplog.records) == 1 and "cannot be written (File too large)" in caplog.text


def test_a_run_whose_records_cannot_be_written_goes_on_and_counts_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / METRICS).symlink_to("/dev/full")
    (tmp_path / EVALUATIONS).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path) as writer:
        for iteration in range(3):
            writer.write({"iteration": iteration, "loss": 1.0})
        writer.write_evaluation(
            {"version": 3, "accuracy": 0.5, "questions": 1, "seconds": 1.0, "time": 0.0}
        )
    assert lost_records() == 3 + 1
    lines = [record.getMessage() for record in caplog.records if record.name == records.log.name]
    assert len(lines) == 2, "one line per file, not per record"
    assert all("No space left on device" in line for line in lines)


def test_the_count_is_in_the_records_that_are_written_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"iteration": 0})
        with files_up_to(20):
            writer.write({"iteration": 1, "note": "x" * 50})
        writer.write({"iteration": 2})
    first, last = read_records(tmp_path)
    assert "records_lost" not in first and last == {"iteration": 2, "records_lost": 1}


def test_a_resumed_run_forgets_later_records_also_on_a_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"iteration": number}) + "\n" for number in range(6)))
    with files_up_to(0):
        drop_records(file, "iteration", 4)
    assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [0, 1, 2, 3]
    assert not (tmp_path / "records.jsonl.tmp").exists()


def test_a_timeline_that_cannot_be_written_costs_its_events_only(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("in the way")
    with Timeline.for_run(tmp_path, "trainer-0") as timeline:
        with timeline.span("step"):
            pass
        with timeline.span("moment"):
            pass
    assert lost_records() >= 1
    (tmp_path / "timeline").unlink()
    with Timeline.for_run(tmp_path, "trainer-0") as timeline, timeline.span("step"):
        pass
    assert [
        event.get("name") for event in read_events(tmp_path / "timeline" / "trainer-0.jsonl")
    ] == [None, "step"]


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r| done\x00\x7f\u202egnp.exe\u2028next\ud800\x85<script>"


def test_no_record_log_line_or_console_line_holds_what_a_terminal_obeys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json_line({"text": HOSTILE, "letters": "é中😀"})
    assert line.isprintable() and "é中😀" in line
    assert json.loads(line) == {"text": HOSTILE, "letters": "é中😀"}
    log = tmp_path / "x.log"
    marked = MarkedLines(log, "| ")
    log.write_bytes(f"| {HOSTILE}\n".encode("utf-8", "surrogatepass"))
    with Console(tmp_path / "launcher.log") as console:
        for text in (*marked.new(), *last_lines(log, 5), HOSTILE):
            console.print_line(text)
    printed = capsys.readouterr().out
    for text in (printed, (tmp_path / "launcher.log").read_text(), str(PaNpuError(HOSTILE))):
        assert text and all(part.isprintable() for part in text.split("\n")), repr(text)
    assert "\\x1b[2J" in printed


def test_log_messages_hold_nothing_that_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = logging.root.handlers[:]
    level = logging.root.level
    try:
        setup_logging("a process")
        logging.getLogger("x").warning("zero for %s\nand a second line", HOSTILE)
    finally:
        logging.basicConfig(level=level, handlers=handlers, force=True)
        logging.captureWarnings(False)
    printed = capsys.readouterr().out
    assert "second line" in printed and "\\x1b[2J" in printed
    assert all(part.isprintable() for part in printed.split("\n"))


@given(text=st.text(st.characters(exclude_categories=()), max_size=30))
def test_any_text_is_one_printable_line_that_reads_back(text: str) -> None:
    assert printable(text).isprintable()
    line = json_line([text])
    assert line.isprintable() and json.loads(line) == [text]


def test_a_console_whose_stream_is_full_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full, Console(tmp_path / "launcher.log") as console:
        monkeypatch.setattr("sys.stdout", full)
        console.print_line("still here")
        records.print_line("| and here")
        monkeypatch.setattr("sys.stdout", io.StringIO())
        with contextlib.suppress(OSError):
            full.close()
    assert "still here" in (tmp_path / "launcher.log").read_text()
    assert lost_records() == 1
