"""Faults in the samples of a gateway's sessions end the coordinator before their group is dispatched.

Coordinator, gateway and agent are real, engines stand-ins, trainers played. The same faults in runs
whose every process is real: test_faults_in_runs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.coordinator_configurations import Sections, of_agents
from tests.helpers.coordinator_run import coordinator_run
from tests.helpers.fault_in_run import SESSIONS, VARIABLE

pytestmark = pytest.mark.integration


def two_iterations(inputs: Path, directory: Path) -> Sections:
    """A fault is in the second."""
    sections = of_agents(directory, killed=inputs)
    sections["schedule"]["iterations"] = 2
    return sections


@pytest.mark.parametrize("fault", SESSIONS)
def test_a_fault_in_a_groups_sessions_ends_the_run_before_the_group_is_dispatched(
    fault: str, inputs: Path, tmp_path: Path
) -> None:
    sections = two_iterations(inputs, tmp_path)
    with coordinator_run(tmp_path, inputs, variables={VARIABLE: fault}, **sections) as run:
        run.begin()
        run.consume(0)
        run.publish(1, loss=0.0)
        output = run.end()
    assert run.process.returncode != 0, f"nobody saw it:\n{output}"
    assert re.search(SESSIONS[fault], output), output
    assert re.search(r"group \d+ of iteration 1 ", output), output


def test_without_a_fault_the_same_run_ends_well(inputs: Path, tmp_path: Path) -> None:
    with coordinator_run(tmp_path, inputs, **two_iterations(inputs, tmp_path)) as run:
        run.play()
    assert set(run.trained) == {0, 1}
