"""Bars on a terminal of 80 columns: they fit, lines stand above them, and piped output has neither bars nor control characters."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.config.load import load_config
from pa_npu.launcher.process.run_progress import RunProgress
from pa_npu.telemetry.bars import Bar, Bars
from pa_npu.telemetry.progress import fitted, progress_line
from tests.unit.test_telemetry_progress import RECORD

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", self.getvalue())) if line.strip()]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    yield


def test_bars_fit_into_80_columns_and_lines_stand_above_them() -> None:
    terminal = Terminal()
    with Bars(terminal) as bars:
        bars.show([Bar("engine-0", 3, None, "3 s Loading " + "weights " * 20), Bar("iterations", 2, 20, "2 of 20")])
        bars.say("engine-0 ready after 3 s")
        bars.show([Bar("iterations", 3, 20, "3 of 20, 1m02s left")])
    assert max(map(len, terminal.lines)) <= 80
    assert "engine-0 ready after 3 s" in terminal.lines
    assert any("iterations" in line and "2 of 20" in line for line in terminal.lines)
    last = max(index for index, line in enumerate(terminal.lines) if "3 of 20, 1m02s left" in line)
    assert not any("engine-0" in line for line in terminal.lines[last:]), "a bar that is done is gone"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["piped", "dumb"])
def test_piped_output_is_plain_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    bars = Bars(stream)
    for step in bars.tracked("adding", 3):
        bars.say(f"step {step}")
    assert stream.getvalue() == "step 1\nstep 2\nstep 3\n"


def test_a_loop_that_is_left_takes_its_bar_along() -> None:
    terminal = Terminal()
    bars = Bars(terminal)
    for step in bars.tracked("adding", 10):
        if step == 2:
            break
    bars.say("done")
    assert terminal.lines[-1] == "done" and any("step 2 of 10" in line for line in terminal.lines)


@pytest.mark.parametrize("columns", [80, 100, 160, 300])
def test_a_progress_line_leaves_out_what_does_not_fit(columns: int) -> None:
    line = progress_line(RECORD, 20, 312.0).removeprefix("| ")
    shown = fitted(line, columns)
    assert len(shown) <= columns
    assert shown.startswith("iteration  2 ( 3/20) | reward  0.512") and shown.endswith("ETA   5m12s")
    assert (shown == line) == (columns >= len(line))
    assert fitted("evaluation of version 3: " + "x" * 200, 80).endswith("x" * 200), "other lines stay whole"


def test_the_bars_of_a_run_follow_its_timelines(tmp_path: Path) -> None:
    config = load_config(
        ["configs/grpo_tiny.yaml"], [f"run.dir={tmp_path}", "schedule.iterations=4", "schedule.prompts_per_iteration=2"]
    )
    progress = RunProgress(config)
    assert progress.bars() == ()

    def write(process: str, *events: dict[str, object]) -> None:
        (tmp_path / "timeline").mkdir(exist_ok=True)
        with (tmp_path / "timeline" / f"{process}.jsonl").open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def group(iteration: int) -> dict[str, object]:
        return {"name": "group 0", "lane": "engine a", "start": 1.0, "end": 2.0, "args": {"iteration": iteration}}

    microbatch = {"name": "group 0", "lane": "microbatches", "start": 1.0, "end": 2.0}
    write("trainer-0", microbatch, {"name": "probe", "lane": "main", "start": 1.0})
    write("coordinator", {"name": "publish", "lane": "main", "start": 1.0}, group(0), group(0))
    write("trainer-0", microbatch)
    texts = [(bar.label.strip(), bar.done, bar.total) for bar in progress.bars()]
    assert texts == [("iterations", 0, 4), ("generation", 2, 2), ("training", 1, 2)]
    write("trainer-0", microbatch, {"name": "iteration", "lane": "main", "start": 1.0})
    write("coordinator", group(1))
    iterations, generation, training = progress.bars()
    assert (iterations.done, generation.done, training.done) == (1, 1, 0)
    assert iterations.text.startswith("1 of 4, ") and generation.text == "1 of 2 groups"
    with (tmp_path / "timeline" / "coordinator.jsonl").open("a") as file:
        file.write('{"name": "group')  # a process is killed in the middle of a line
    assert progress.bars()[0].done == 1
