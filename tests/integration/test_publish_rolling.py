"""publish.mode=rolling in whole runs of the coordinator: when engines swap, and what is trained whatever dies meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pa_npu.samples.group import Group
from pa_npu.samples.wire import to_bytes
from tests.helpers.coordinator_run import GROUPS, REPLICAS, RESPONSES, Run
from tests.helpers.stand_in_engine import Served, stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ITERATIONS, ENGINES, SAVED = 6, 3, 3
LENGTH = 64
SLOW = Speed(step_s=0.01)  # a group takes up to 0.64 s, and some engine is through that much before another
HANGS = Speed(step_s=1000.0)
SURELY_LEFT = 5  # steps of an engine that is to be stopped with something in flight


@dataclass
class Outcome:
    """trained: by iteration. requests: for groups, as the stand-ins keep them. records: of metrics.jsonl."""

    trained: dict[int, list[Group]]
    requests: list[dict[str, Any]]
    records: list[dict[str, Any]]
    output: str
    killed: int

    def bytes_of(self, iteration: int) -> list[bytes]:
        return [to_bytes(group) for group in self.trained[iteration]]

    @property
    def overlapping(self) -> set[int]:
        """Versions that wrote before the one before them had written everything."""
        return {
            new["version"]
            for new in self.requests
            if any(old["version"] < new["version"] and old["end_s"] > new["begin_s"] for old in self.requests)
        }


def run_coordinator(directory: Path, mode: str, kill: int = 0) -> Outcome:
    """Trainers are played here. kill: so many engines that are at work for a version when another one has swapped to the next."""
    directory.mkdir()
    data = {"train": str(directory.parent / "together" / "train.jsonl"), "test": None}
    trained: dict[int, list[Group]] = {}
    with stand_in_engines(ENGINES, SLOW) as served:
        run = Run(
            directory,
            served,
            data=data,
            rollout={"max_response_tokens": LENGTH},
            schedule={"iterations": ITERATIONS, "prompts_per_iteration": GROUPS, "order": "prompt", "max_staleness": 1},
            publish={"probe_tokens": 5, "mode": mode},
            checkpoint={"every": SAVED},
        )
        killer = Killer(served, kill)
        try:
            run.announce_weights()
            for version in range(ITERATIONS + 1):
                run.announce(version, {"loss": 0.0} if version else None)
                run.published(version)
                if version < ITERATIONS:
                    trained[version] = run.consume(version, GROUPS // REPLICAS)
            output = run.end()
        finally:
            killer.end()
            run.process.kill()
            run.process.wait(10)
        assert run.process.returncode == 0, output
        requests = [r for engine in served for r in engine.engine.requests if r["n"] == RESPONSES]
    return Outcome(trained, requests, run.lines("metrics.jsonl"), output, killer.killed)


class Killer:
    """Stops engines once one has swapped to a version for which others are not free yet."""

    def __init__(self, served: list[Served], number: int) -> None:
        self._served = served
        self._number = number
        self._over = threading.Event()
        self.killed = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while self._number and not self._over.is_set() and not self.killed:
            time.sleep(0.002)
            versions = [-1 if (v := served.engine.identity.version) is None else v for served in self._served]
            behind = [s for s, version in zip(self._served, versions, strict=True) if 0 <= version < max(versions)]
            at_work = [served for served in behind if served.left() >= SURELY_LEFT]
            if len(at_work) >= self._number:
                for served in at_work[: self._number]:
                    served.engine.speed = HANGS  # what it has in flight will not end before it is stopped
                for served in at_work[: self._number]:
                    served.stop()
                    self.killed += 1


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def together(parent: Path) -> Outcome:
    return run_coordinator(parent / "together", "delayed")


def test_engines_go_on_to_the_next_version_before_others_are_through_and_nothing_else_changes(
    together: Outcome, parent: Path
) -> None:
    rolling = run_coordinator(parent / "rolling", "rolling")
    for iteration in range(ITERATIONS):
        assert rolling.bytes_of(iteration) == together.bytes_of(iteration), f"iteration {iteration}"
        written = {group.version_range for group in rolling.trained[iteration]}
        assert written == {(max(0, iteration - 1),) * 2}, "I1: by the version that the rule names"
    assert not together.overlapping and rolling.overlapping
    assert SAVED not in rolling.overlapping, "the iteration before has to be complete: it is in the checkpoint"
    assert [record["iteration"] for record in rolling.records] == list(range(ITERATIONS))
    assert all(record["engine_still_s"] < 1.0 for record in rolling.records)


def test_a_group_whose_engine_dies_after_others_have_swapped_is_written_by_the_same_version(
    together: Outcome, parent: Path
) -> None:
    rolling = run_coordinator(parent / "killed", "rolling", kill=1)
    assert rolling.killed == 1 and "is lost" in rolling.output
    for iteration in range(ITERATIONS):
        assert rolling.bytes_of(iteration) == together.bytes_of(iteration), f"iteration {iteration}"


def test_where_nobody_has_the_version_any_more_the_next_one_writes_its_groups(together: Outcome, parent: Path) -> None:
    rolling = run_coordinator(parent / "both", "rolling", kill=2)
    assert rolling.killed == 2 and "no engine has weight version" in rolling.output
    for iteration, groups in rolling.trained.items():
        assert [group.index for group in groups] == list(range(GROUPS)), "I2: every group once"
        oldest = max(0, iteration - 1)
        assert all(set(group.version_range) <= {oldest, iteration} for group in groups), "I1: as old as k allows"
    assert any(
        group.version_range == (iteration, iteration)
        for iteration, groups in rolling.trained.items()
        if iteration
        for group in groups
    )
