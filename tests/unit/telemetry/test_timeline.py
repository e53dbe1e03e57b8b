"""The merged timeline is a valid Chrome trace with one clock, whatever threads, processes and kills wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pa_npu.telemetry.chrome_trace import merge
from pa_npu.telemetry.timeline import Timeline, now

ROOT = Path(__file__).resolve().parents[3]


def events(run_dir: Path, name: str | None = None) -> list[dict[str, Any]]:
    trace = json.loads(merge(run_dir).read_text())["traceEvents"]
    return [event for event in trace if event["ph"] != "M" and name in (None, event["name"])]


def lanes(run_dir: Path) -> dict[int, str]:
    trace = json.loads(merge(run_dir).read_text())["traceEvents"]
    return {
        event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"
    }


def test_a_span_lasts_as_long_as_its_block_and_keeps_its_arguments(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "trainer-0") as timeline:
        start = time.perf_counter()
        with timeline.span("step", version=3) as args:
            time.sleep(0.02)
            args["grad_norm"] = 1.5
        lasted_s = time.perf_counter() - start
    (event,) = events(tmp_path)
    assert event["ph"] == "X" and event["args"] == {"version": 3, "grad_norm": 1.5}
    assert 0.02 <= event["dur"] / 1e6 <= lasted_s


def test_a_span_that_raises_is_recorded_with_its_error(tmp_path: Path) -> None:
    with (
        Timeline.for_run(tmp_path, "a") as timeline,
        pytest.raises(KeyError),
        timeline.span("publish"),
    ):
        raise KeyError("x")
    (event,) = events(tmp_path)
    assert event["args"] == {"error": "KeyError"}


def test_two_processes_share_one_clock(tmp_path: Path) -> None:
    child = (
        "import sys; from pa_npu.telemetry.timeline import Timeline\n"
        "timeline = Timeline.for_run(sys.argv[1], 'child')\n"
        "with timeline.span('inside'): pass\n"
    )
    with Timeline.for_run(tmp_path, "parent") as timeline, timeline.span("around"):
        subprocess.run(
            [sys.executable, "-c", child, str(tmp_path)], cwd=ROOT, check=True, timeout=60
        )
    (around,), (inside,) = events(tmp_path, "around"), events(tmp_path, "inside")
    assert around["pid"] != inside["pid"]
    assert (
        around["ts"] <= inside["ts"] <= inside["ts"] + inside["dur"] <= around["ts"] + around["dur"]
    )


def test_nested_events_stay_in_one_row_and_overlapping_ones_get_their_own(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "coordinator") as timeline:
        base = now()
        timeline.complete("iteration", base, base + 10.0, lane="main")
        timeline.complete("step", base + 2.0, base + 3.0, lane="main")
        for start, end in ((0.0, 4.0), (1.0, 5.0), (2.0, 3.0), (4.0, 6.0)):
            timeline.complete("request", base + start, base + end, lane="requests")
    names = lanes(tmp_path)
    assert sorted(names.values()) == ["main", "requests", "requests (2)", "requests (3)"]
    rows: dict[str, list[tuple[float, float]]] = {}
    for event in events(tmp_path, "request"):
        rows.setdefault(names[event["tid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), rows
    assert len(rows["requests"]) == 2


def test_threads_lose_no_event(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "a") as timeline:

        def work(lane: str) -> None:
            for number in range(500):
                with timeline.span("tick", lane=lane, number=number):
                    pass

        threads = [
            threading.Thread(target=work, args=(f"lane {n}",), name=f"tick-{n}") for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events(tmp_path, "tick")) == 2000


def test_a_killed_process_loses_only_its_last_line_and_a_restart_appends(tmp_path: Path) -> None:
    with Timeline.for_run(tmp_path, "a") as timeline, timeline.span("first"):
        pass
    with (tmp_path / "timeline" / "a.jsonl").open("a") as file:
        file.write('{"name":"cut","la\n')
    with Timeline.for_run(tmp_path, "a") as timeline, timeline.span("second"):
        pass
    assert [event["name"] for event in events(tmp_path)] == ["first", "second"]


def test_a_disabled_timeline_writes_nothing(tmp_path: Path) -> None:
    timeline = Timeline(None, "a")
    with timeline.span("x"):
        pass
    timeline.close()
    assert list(tmp_path.iterdir()) == []
    assert json.loads(merge(tmp_path).read_text())["traceEvents"] == []
