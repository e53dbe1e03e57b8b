"""Producing ahead in whole runs of the coordinator: who generates what, and a resumed run that trains what the whole one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pa_npu.checkpoints.ahead import write_ahead
from pa_npu.checkpoints.directories import META_FILE, CheckpointMeta, directory_name
from pa_npu.checkpoints.provenance import config_tree
from pa_npu.config.schema import Config
from pa_npu.control.messages import DATA_POSITION
from pa_npu.samples.types import Group
from pa_npu.samples.wire import to_bytes
from pa_npu.trainer.ahead import RolloutsAhead
from tests.helpers.coordinator_run import GROUPS, REPLICAS, RESPONSES, WAIT_S, Run
from tests.helpers.stand_in_engine import stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ITERATIONS, RESUMED_AT = 5, 2


@dataclass
class Outcome:
    """trained: by iteration. records: of metrics.jsonl, by iteration. sampled: seeds of the requests for groups."""

    trained: dict[int, list[Group]] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    sampled: set[int] = field(default_factory=set)


def run_coordinator(
    directory: Path, staleness: int, speed: Speed, engines: int, first: int = 0, checkpoints: Path | None = None
) -> Outcome:
    """From version `first`, its trainers played here. first = 0: leaves a checkpoint of RESUMED_AT in `checkpoints`."""
    directory.mkdir()
    outcome = Outcome()
    load = checkpoints / directory_name(RESUMED_AT) if checkpoints and first else None
    with stand_in_engines(engines, speed) as served:
        run = Run(
            directory,
            served,
            data={"train": str(directory / "train.jsonl"), "test": None, "max_prompt_tokens": 16},
            schedule={
                **{"iterations": ITERATIONS, "prompts_per_iteration": GROUPS, "order": "prompt"},
                **{"max_staleness": staleness, "dynamic_sampling": True},
            },
            reward={"functions": [{"name": "format", "pattern": "t77|t78"}]},
            checkpoint={"load": str(load) if load else None},
        )
        try:
            run.announce_weights()
            for version in range(first, ITERATIONS + 1):
                run.announce(version, None if version == first else {"loss": 0.0})
                run.published(version)
                if version == RESUMED_AT and not first and checkpoints:
                    save_checkpoint(checkpoints, run)
                if version < ITERATIONS:
                    outcome.trained[version] = run.consume(version)
            output = run.end()
        finally:
            run.process.kill()
            run.process.wait(10)
        assert run.process.returncode == 0, output
        requests = [request for engine in served for request in engine.engine.requests if request["n"] == RESPONSES]
    outcome.sampled = {request["seed"] for request in requests}
    outcome.records = {record["iteration"]: record for record in run.lines("metrics.jsonl")}
    return outcome


def save_checkpoint(parent: Path, run: Run) -> None:
    """What the coordinator reads of a checkpoint, taken as trainers take it: before anything of the version is trained."""
    directory = parent / directory_name(RESUMED_AT)
    directory.mkdir(parents=True)
    write_ahead(directory, RolloutsAhead(run.config, run.channel, run.buffer)(RESUMED_AT))
    tree = config_tree(Config.model_validate({**config_tree(run.config)}))
    meta = CheckpointMeta(
        version=RESUMED_AT,
        updates=RESUMED_AT,
        data=DATA_POSITION.wait(run.channel, WAIT_S, iteration=RESUMED_AT).state,
        seed=3,
        layout={},
        model={},
        reference=None,
        config=tree,
        config_digest="",
        files={},
    )
    (directory / META_FILE).write_text(meta.dump())


def versions(groups: list[Group]) -> set[tuple[int, int]]:
    return {group.version_range for group in groups}


@pytest.mark.parametrize("staleness", [1, 2])
def test_iterations_come_from_the_version_that_the_rule_names_and_a_resumed_run_trains_the_same(
    staleness: int, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    whole = run_coordinator(tmp_path / "whole", staleness, Speed(step_s=0.0005, stride=4), 2, 0, checkpoints)
    assert set(whole.trained) == set(range(ITERATIONS)) == set(whole.records)
    for iteration, groups in whole.trained.items():
        version = max(0, iteration - staleness)
        assert versions(groups) == {(version, version)}, f"I1: who generated iteration {iteration}"
        assert [group.index for group in groups] == list(range(GROUPS)), "I2: every group once, in its slot"

    # another number of engines and another speed
    speed = Speed(step_s=0.002, stride=8)
    resumed = run_coordinator(tmp_path / "resumed", staleness, speed, 1, RESUMED_AT, checkpoints)
    later = range(RESUMED_AT, ITERATIONS)
    assert set(resumed.trained) == set(later) == set(resumed.records)
    for iteration in later:
        ours, expected = resumed.trained[iteration], whole.trained[iteration]
        assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected], f"iteration {iteration}"
        for name in ("reward_mean", "accuracy", "groups_dispatched", "tokens_response"):
            assert resumed.records[iteration][name] == whole.records[iteration][name]
    dispatched = {i: record["groups_dispatched"] for i, record in whole.records.items()}
    assert len(resumed.sampled) == sum(dispatched[i] for i in later if i >= RESUMED_AT + staleness), (
        "what the checkpoint has is not generated again"
    )
    assert all(count > GROUPS for count in dispatched.values()), "some groups were replaced in every iteration"
    assert REPLICAS == 2


def test_a_run_that_may_not_train_what_a_checkpoint_has_produces_it_anew(tmp_path: Path) -> None:
    """The checkpoint of a run with k = 2 has iterations 2 and 3, by versions 0 and 1; with k = 1 only version 1 will do."""
    checkpoints = tmp_path / "checkpoints"
    run_coordinator(tmp_path / "whole", 2, Speed(stride=8), 1, 0, checkpoints)
    resumed = run_coordinator(tmp_path / "resumed", 1, Speed(stride=8), 1, RESUMED_AT, checkpoints)
    assert {iteration: versions(groups) for iteration, groups in resumed.trained.items()} == {
        2: {(2, 2)},
        3: {(2, 2)},
        4: {(3, 3)},
    }
    prompts = [group.prompt_id for groups in resumed.trained.values() for group in groups]
    assert len(prompts) == 3 * GROUPS
