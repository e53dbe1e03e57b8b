"""SIGTERM to a real coordinator process: a completed iteration's record is whole, and the process still ends by the signal."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.control.messages import BORDER, REPORT, BorderReport
from pa_npu.control.tasks import LONGEST_S
from pa_npu.publish.messages import READY, TrainersReady
from pa_npu.telemetry.chrome_trace import read_events
from tests.helpers.coordinator_run import GROUPS, Run
from tests.helpers.reports import iteration_report
from tests.helpers.stand_in_engine import stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration

BORDER_TAKES_S = 0.5


@pytest.fixture
def at_the_end(tmp_path: Path) -> Iterator[Run]:
    """A coordinator whose first iteration is trained and published, of which the trainers' last word is missing yet."""
    with stand_in_engines(1, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(tmp_path, engines, schedule={"iterations": 2, "evaluate_every": 0}, data={"test": None})
        try:
            run.announce_weights()
            run.announce(0, None)
            assert run.published(0)["done"]
            run.consume(0)
            REPORT.put(run.channel, iteration_report(0, train_s=1.0), iteration=0)
            READY.put(run.channel, TrainersReady(1), version=1)
            assert run.published(1)["done"]
            yield run
        finally:
            run.process.kill()
            run.process.wait(10)


def terminate(run: Run) -> tuple[str, float]:
    """Ends a run and returns its output, and the seconds that this took."""
    began_s = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    output = run.end()
    return output, time.monotonic() - began_s


def test_the_record_of_a_completed_iteration_is_whole_when_the_run_is_ended_right_after_it(at_the_end: Run) -> None:
    run = at_the_end
    assert (run.dir / "metrics.jsonl").read_text() == "", "negative control: there is no record yet"
    border = BorderReport(border_wait_s=0.125)
    later = threading.Timer(BORDER_TAKES_S, lambda: BORDER.put(run.channel, border, version=1))
    later.start()
    output, took_s = terminate(run)
    later.join()
    assert run.process.returncode == -signal.SIGTERM, output
    (record,) = run.lines("metrics.jsonl")
    assert (record["iteration"], record["groups"], record["border_wait_s"]) == (0, GROUPS, 0.125)
    assert len(run.lines("samples.jsonl")) > 0
    assert "| iteration 0 (1/2)" in output, "the console has it too"
    timeline = run.dir / "timeline" / "coordinator.jsonl"
    assert all(json.loads(line) for line in timeline.read_text().splitlines()), "every line is whole"
    events = read_events(timeline)
    published = [event["args"]["version"] for event in events if event.get("name") == "publish"]
    produced = [event for event in events if event.get("name") == "produce"]
    assert published == [0, 1] and [event["args"]["iteration"] for event in produced] == [0, 1]
    assert produced[-1]["args"]["error"] == "CancelledError", "what was cut off is there, and says so"
    assert BORDER_TAKES_S <= took_s < LONGEST_S, "it waited for what was missing, and no longer"
    assert "Traceback" not in output and "never retrieved" not in output, output


def test_what_never_comes_is_not_waited_for_beyond_the_limit(at_the_end: Run) -> None:
    output, took_s = terminate(at_the_end)
    assert at_the_end.process.returncode == -signal.SIGTERM, output
    assert took_s < LONGEST_S + 1.0
    assert (at_the_end.dir / "metrics.jsonl").read_text() == "", "nothing half"
    assert "Traceback" not in output, output
