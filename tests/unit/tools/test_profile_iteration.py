"""Profiles of an iteration: processor time goes to the code that takes it, and only that of the iterations counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.iteration_profile.sitecustomize import VARIABLE, cause_of
from tools.profile_iteration import process_name, read_profile, render

HOOK = Path(__file__).resolve().parents[3] / "tools" / "iteration_profile"
BUSY = """
import time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))
"""


def test_a_process_says_where_its_processor_time_goes_and_that_waiting_takes_none(
    tmp_path: Path,
) -> None:
    module = tmp_path / "pa_npu" / "rewards"
    module.mkdir(parents=True)
    (module / "busy.py").write_text(BUSY)
    folder = tmp_path / "profile"
    folder.mkdir()
    code = (
        f"import sys, time; sys.path.insert(0, {str(module)!r}); import busy; "
        "busy.burn(1.0); time.sleep(1.5)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOOK), VARIABLE: str(folder)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    (file,) = folder.glob("*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    rewards = sum(event["causes"].get("rewards", 0.0) for event in events if "causes" in event)
    assert rewards == pytest.approx(1.0, rel=0.25)
    everything = sum(sum(event["causes"].values()) for event in events if "causes" in event)
    assert everything < 2.0, "the sleep took no processor time"


def test_a_frame_that_the_table_does_not_know_is_other() -> None:
    assert cause_of(sys._getframe()) == "other Python"
    assert cause_of(None) == "other Python"


def test_only_what_lies_in_the_iterations_counts(tmp_path: Path) -> None:
    lines = [
        {"command": ["python", "-m", "pa_npu.trainer.main"], "pid": 1},
        {"time": 90.0, "causes": {"forward": 50.0}},
        {"time": 105.0, "causes": {"forward": 2.0, "backward": 4.0}},
        {"time": 119.0, "causes": {"forward": 2.0}},
        {"time": 121.0, "causes": {"forward": 50.0}},
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"ti')
    records = [{"time": 110.0, "iteration_s": 10.0}, {"time": 120.0, "iteration_s": 10.0}]
    profile = read_profile(tmp_path, records)
    assert profile.iteration_s == 10.0
    assert profile.seconds == {("trainer", "forward"): 2.0, ("trainer", "backward"): 2.0}
    table = render({"short": profile})
    assert "| trainer | forward | 2.000 s (50%) |" in table
    assert "| all | all | 4.000 s |" in table


def test_processes_are_told_apart_by_their_command_lines() -> None:
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "x"]
    assert process_name(server) == "engine's API server"
    assert (
        process_name(["python", "-c", "from multiprocessing.spawn import spawn_main"]) == "engine"
    )
    assert process_name(["bash"]) == "others"
