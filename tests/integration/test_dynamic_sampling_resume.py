"""Resumed runs of the coordinator take, discard and train what the undisturbed do: dynamic sampling, several datasets, a filter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pa_npu.checkpoints.directories import META_FILE, CheckpointMeta, directory_name
from pa_npu.control.messages import DATA_POSITION
from pa_npu.samples.group import Group
from pa_npu.samples.wire import to_bytes
from tests.helpers.coordinator_run import WAIT_S
from tests.helpers.groups import prompt_tokens
from tests.helpers.stand_in_engine import stand_in_engines
from tests.integration.test_coordinator_run import GROUPS, RESPONSES, Run
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ITERATIONS, RESUMED_AT = 4, 2
# about two of five groups of stand-in responses are all wrong under it, so that an iteration takes about 20 prompts of 40
PATTERN = "t77|t78"


@dataclass
class Outcome:
    """By iteration, or by weight version (positions, states of the prompt stream); sampled: seeds of training requests."""

    trained: dict[int, list[Group]]
    positions: dict[int, int]
    states: dict[int, dict[str, Any]]
    dispatched: dict[int, int]
    sampled: set[int]
    records: dict[int, dict[str, Any]]


def produce(
    directory: Path,
    order: str,
    first: int,
    speed: Speed,
    engines: int,
    checkpoint: Path | None,
    iterations: int = ITERATIONS,
    **changes: Any,
) -> Outcome:
    """A run from version `first`, its trainers played here. changes: sections in place of those below."""
    directory.mkdir()
    with stand_in_engines(engines, speed) as served:
        schedule = {"iterations": iterations, "prompts_per_iteration": GROUPS, "order": order, "dynamic_sampling": True}
        sections = {
            "data": {"train": str(directory / "train.jsonl"), "test": None, "max_prompt_tokens": 16},
            "reward": {"functions": [{"name": "format", "pattern": PATTERN}]},
            "schedule": schedule,
            "checkpoint": {"load": str(checkpoint) if checkpoint else None},
            **changes,
        }
        run = Run(directory, served, **sections)
        try:
            run.announce_weights()
            trained, states = {}, {}
            for version in range(first, iterations + 1):
                run.announce(version, None if version == first else {"loss": 0.0})
                run.published(version)
                if version < iterations:
                    trained[version] = run.consume(version)
                    # what a trainer puts into the checkpoint of the next version
                    states[version + 1] = DATA_POSITION.wait(run.channel, WAIT_S, iteration=version + 1).state
            output = run.end()
        finally:
            run.process.kill()
            run.process.wait(10)
        assert run.process.returncode == 0, output
        requests = [request for engine in served for request in engine.engine.requests if request["n"] == RESPONSES]
    records = {record["iteration"]: record for record in run.lines("metrics.jsonl")}
    dispatched = {iteration: record["groups_dispatched"] for iteration, record in records.items()}
    positions = {version: int(state.get("position", -1)) for version, state in states.items()}
    return Outcome(trained, positions, states, dispatched, {request["seed"] for request in requests}, records)


def write_checkpoint(parent: Path, data: dict[str, Any]) -> Path:
    """Writes the part of a checkpoint that the coordinator reads: its meta data."""
    directory = parent / directory_name(RESUMED_AT)
    directory.mkdir()
    meta = CheckpointMeta(
        version=RESUMED_AT,
        updates=RESUMED_AT,
        data=data,
        seed=3,
        layout={},
        model={"path": "", "fingerprint": ""},
        reference=None,
        config={},
        config_digest="",
        files={},
        digests={},
    )
    (directory / META_FILE).write_text(meta.dump())
    return directory


def content(groups: list[Group]) -> list[tuple[Any, ...]]:
    """All of a group but its place, which with order=completion is the order of arrival."""
    return sorted(
        (
            group.prompt_id,
            prompt_tokens(group).tolist(),
            group.tokens[group.trained].tolist(),
            group.logprobs.tolist(),
            group.rewards.tolist(),
            group.advantages.tolist(),
        )
        for group in groups
    )


def whole_and_resumed(directory: Path, order: str, iterations: int, **changes: Any) -> tuple[Outcome, Outcome]:
    """A run, and one that goes on from its checkpoint: with another number and speed of engines, in another order of arrival."""
    whole = produce(directory / "whole", order, 0, Speed(step_s=0.0005, stride=4), 2, None, iterations, **changes)
    checkpoint = write_checkpoint(directory, whole.states[RESUMED_AT])
    slower = Speed(step_s=0.002, stride=8)
    resumed = produce(directory / "resumed", order, RESUMED_AT, slower, 1, checkpoint, iterations, **changes)
    assert set(resumed.trained) == set(range(RESUMED_AT, iterations))
    for iteration, ours in resumed.trained.items():
        expected = whole.trained[iteration]
        assert content(ours) == content(expected), f"iteration {iteration}"
        if order == "prompt":
            assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected]
        assert resumed.states[iteration + 1] == whole.states[iteration + 1]
        assert resumed.dispatched[iteration] == whole.dispatched[iteration]
    return whole, resumed


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_resumed_run_goes_on_as_the_undisturbed_one(order: str, tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(tmp_path, order, ITERATIONS)
    assert resumed.sampled < whole.sampled, "the discarded groups are sampled alike too"
    assert len(resumed.sampled) == sum(resumed.dispatched.values())

    # what would make the above empty
    assert all(count > GROUPS for count in whole.dispatched.values()), "some groups were replaced in every iteration"
    assert whole.positions == {v: sum(whole.dispatched[i] for i in range(v)) for v in range(1, ITERATIONS + 1)}
    assert whole.positions[ITERATIONS] > 40, "the prompts went into their second epoch"
    for groups in whole.trained.values():
        assert len(groups) == GROUPS and all(len(set(group.rewards.tolist())) > 1 for group in groups)
    taken = [group.prompt_id for iteration in resumed.trained for group in whole.trained[iteration]]
    assert taken != [group.prompt_id for iteration in (0, 1) for group in whole.trained[iteration]]


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_resumed_run_of_several_datasets_asks_what_the_undisturbed_one_does(order: str, tmp_path: Path) -> None:
    iterations, names = 5, {"many": range(40), "few": range(40, 70)}
    for name, numbers in names.items():
        rows = [{"q": f"w{3 + i} w{4 + i}", "a": {"final": str(i)}} for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "data": {
            "train": [
                {"path": str(tmp_path / "many.jsonl"), "weight": 1},
                {"path": str(tmp_path / "few.jsonl"), "weight": 2},
            ],
            "test": None,
            "max_prompt_tokens": 16,
            "question_column": "q",
            "answer_column": "a.final",
        },
        "schedule": {"iterations": iterations, "prompts_per_iteration": GROUPS, "order": order},
    }
    whole, resumed = whole_and_resumed(tmp_path, order, iterations, **changes)
    for iteration in resumed.trained:
        assert resumed.records[iteration]["sources"] == whole.records[iteration]["sources"]

    # the weights, by what was trained
    asked: list[int] = []
    for iteration in range(iterations):
        sources, groups = whole.records[iteration]["sources"], whole.trained[iteration]
        assert [sources[name]["prompts"] for name in names] == [GROUPS // 3, 2 * GROUPS // 3]
        assert sources["few"]["share"] == pytest.approx(2 / 3)
        own = [float((group.rewards > 0).mean()) for group in groups if group.prompt_id >= 40]
        assert sources["few"]["accuracy"] == pytest.approx(sum(own) / len(own))
        asked += [group.prompt_id for group in groups]
    assert len(asked) > len(set(asked)), "later epochs came"
