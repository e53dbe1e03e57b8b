"""How a run began and ended, as its directory says it: also of a launcher that had no time to say it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pa_npu.telemetry.records import JsonLines
from pa_npu.telemetry.run_end import (
    BEGIN,
    RunEnd,
    engine_names,
    owner_is_gone,
    owner_mark,
    read_end,
    record_end,
    record_engines,
    recorded_begin,
)
from pa_npu.telemetry.timeline import Timeline

LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes are told apart by /proc"
)


def events(directory: Path) -> list[dict[str, Any]]:
    return JsonLines(directory / "timeline" / "launcher.jsonl").read()


def attempt(directory: Path) -> Timeline:
    return Timeline.for_run(directory, "launcher")


def test_the_end_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    end = RunEnd("failed", "trainer-0 ended: killed by SIGKILL", "trainer-0", ("its last line",))
    with attempt(tmp_path) as timeline, recorded_begin(timeline):
        record_end(timeline, 0.0, end)
    assert read_end(events(tmp_path)) == end
    with attempt(tmp_path) as timeline, recorded_begin(timeline):
        assert read_end(events(tmp_path)) is None, "it was started again"


def test_an_error_that_ends_a_run_is_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ValueError), attempt(tmp_path) as timeline, recorded_begin(timeline):
        raise ValueError("port 80 cannot be used")
    assert read_end(events(tmp_path)) == RunEnd("failed", "port 80 cannot be used")


def test_an_end_without_an_outcome_is_one_that_went_well() -> None:
    """Earlier launchers recorded only that."""
    assert read_end([{"process": "launcher"}, {"name": "run", "end": 2.0}]) == RunEnd("finished")
    strange = [{"name": "run", "args": {"outcome": [], "cause": 3, "lines": "text"}}]
    assert read_end(strange) == RunEnd("finished", "3")
    assert read_end([]) is None and read_end([{"name": "run", "args": "text"}]) == RunEnd(
        "finished"
    )


@LINUX
def test_a_launcher_that_was_killed_is_gone_and_one_that_runs_is_not(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pa_npu.telemetry.run_end import recorded_begin\n"
        "from pa_npu.telemetry.timeline import Timeline\n"
        "with recorded_begin(Timeline.for_run(sys.argv[1], 'launcher')):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert not owner_is_gone(events(tmp_path))
    process.kill()
    process.wait(10)
    assert owner_is_gone(events(tmp_path)) and read_end(events(tmp_path)) is None


@LINUX
def test_a_process_of_elsewhere_or_of_another_boot_says_nothing_and_a_later_one_of_the_same_number_is_another() -> (
    None
):
    mark = owner_mark()
    assert mark is not None

    def gone(**changes: Any) -> bool:
        return owner_is_gone(
            [{"name": BEGIN, "args": {"owner": json.loads(json.dumps(mark)) | changes}}]
        )

    assert not gone() and gone(started=1)
    assert not gone(boot="another", started=1) and not gone(space="another", started=1)
    for pid in ("x", None, -1, 0, 2**40, True, []):
        assert not gone(pid=pid)
    assert not owner_is_gone([{"name": BEGIN, "args": {"owner": "text"}}, {"name": BEGIN}])


def test_engines_have_the_names_of_their_logs_by_every_address_they_had(tmp_path: Path) -> None:
    with attempt(tmp_path) as timeline:
        record_engines(timeline, ["http://a:1/", "http://a:2"])
        record_engines(timeline, ["http://a:3", "http://a:2"])
    assert engine_names([*events(tmp_path), {"name": "engines", "args": {"urls": [[], 3]}}]) == {
        **{"http://a:1": "engine-0", "http://a:2": "engine-1", "http://a:3": "engine-0"}
    }
