"""Producing ahead in whole runs of the coordinator: who generates what, and a resumed run that trains what the whole one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pa_npu.checkpoints.ahead import write_ahead
from pa_npu.checkpoints.directories import META_FILE, CheckpointMeta, directory_name
from pa_npu.checkpoints.provenance import config_tree
from pa_npu.control.messages import DATA_POSITION, UPDATE_SIZE
from pa_npu.samples.group import Group
from pa_npu.samples.wire import to_bytes
from pa_npu.trainer.border import rollouts_ahead
from tests.helpers.coordinator_run import GROUPS, REPLICAS, RESPONSES, WAIT_S, Run
from tests.helpers.stand_in_engine import stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
ITERATIONS, RESUMED_AT = 5, 2


@dataclass
class Outcome:
    """trained: by iteration. records: of metrics.jsonl, by iteration. sampled: seeds of the requests for groups.
    probes: by version. calls: of the engines' workers."""

    trained: dict[int, list[Group]] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    sampled: set[int] = field(default_factory=set)
    probes: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)


def run_coordinator(
    directory: Path,
    staleness: int,
    speed: Speed,
    engines: int,
    first: int = 0,
    checkpoints: Path | None = None,
    skipped: frozenset[int] = frozenset(),
    budget: int | None = None,
    mode: str = "blocking",
) -> Outcome:
    """From version `first`, its trainers played here. first = 0: leaves a checkpoint of RESUMED_AT in `checkpoints`.

    skipped: versions that the trainers do not publish. budget: schedule.tokens_per_update.
    mode: publish.mode.
    """
    directory.mkdir()
    data = directory.parent / "whole" / "train.jsonl"  # the same prompts, or it would be another run
    outcome = Outcome()
    load = checkpoints / directory_name(RESUMED_AT) if checkpoints and first else None
    with stand_in_engines(engines, speed) as served:
        run = Run(
            directory,
            served,
            data={"train": str(data), "test": None, "max_prompt_tokens": 16},
            schedule={
                **{"iterations": ITERATIONS, "prompts_per_iteration": GROUPS, "order": "prompt"},
                **{"max_staleness": staleness, "tokens_per_update": budget},
                "dynamic_sampling": budget is None,
            },
            reward={"functions": [{"name": "format", "pattern": "t77|t78"}]},
            checkpoint={"load": str(load) if load else None, "every": RESUMED_AT},
            publish={"probe_tokens": 5, "mode": mode, **({"divergence": 0.1} if skipped else {})},
        )
        try:
            run.announce_weights()
            for version in range(first, ITERATIONS + 1):
                run.announce(version, None if version == first else {"loss": 0.0}, publishes=version not in skipped)
                if version not in skipped:
                    outcome.probes[version] = run.published(version)["probe"]
                if version == RESUMED_AT and not first and checkpoints:
                    save_checkpoint(checkpoints, run)
                if version < ITERATIONS:
                    slots = run.message(UPDATE_SIZE, iteration=version).groups if budget else GROUPS // REPLICAS
                    outcome.trained[version] = run.consume(version, slots)
            output = run.end()
        finally:
            run.process.kill()
            run.process.wait(10)
        assert run.process.returncode == 0, output
        outcome.calls = [call for engine in served for call in engine.engine.calls]
        requests = [request for engine in served for request in engine.engine.requests if request["n"] == RESPONSES]
    outcome.sampled = {request["seed"] for request in requests}
    outcome.records = {record["iteration"]: record for record in run.lines("metrics.jsonl")}
    return outcome


def save_checkpoint(parent: Path, run: Run) -> None:
    """Writes the part of a checkpoint that the coordinator reads, as trainers do: before anything of the version is trained."""
    directory = parent / directory_name(RESUMED_AT)
    directory.mkdir(parents=True)
    write_ahead(directory, rollouts_ahead(run.config, run.channel, run.buffer, RESUMED_AT))
    meta = CheckpointMeta(
        version=RESUMED_AT,
        updates=RESUMED_AT,
        data=DATA_POSITION.wait(run.channel, WAIT_S, iteration=RESUMED_AT).state,
        seed=3,
        layout={},
        model={"path": "", "fingerprint": ""},
        reference=None,
        config=config_tree(run.config),
        config_digest="",
        files={},
        digests={},
    )
    (directory / META_FILE).write_text(meta.dump())


def versions(groups: list[Group]) -> set[tuple[int, int]]:
    return {group.version_range for group in groups}


STALENESS = 2


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(parent: Path) -> Outcome:
    """The run that nobody interrupts; leaves a checkpoint."""
    speed = Speed(step_s=0.0005, stride=4)
    return run_coordinator(parent / "whole", STALENESS, speed, 2, 0, parent / "checkpoints")


def test_iterations_come_from_the_version_that_the_rule_names(whole: Outcome) -> None:
    assert set(whole.trained) == set(range(ITERATIONS)) == set(whole.records)
    for iteration, groups in whole.trained.items():
        version = max(0, iteration - STALENESS)
        assert versions(groups) == {(version, version)}, f"I1: who generated iteration {iteration}"
        assert [group.index for group in groups] == list(range(GROUPS)), "I2: every group once, in its slot"


def test_a_resumed_run_trains_what_the_whole_one_does(whole: Outcome, parent: Path) -> None:
    # another number of engines and another speed
    speed = Speed(step_s=0.002, stride=8)
    resumed = run_coordinator(parent / "resumed", STALENESS, speed, 1, RESUMED_AT, parent / "checkpoints")
    later = range(RESUMED_AT, ITERATIONS)
    assert set(resumed.trained) == set(later) == set(resumed.records)
    for iteration in later:
        ours, expected = resumed.trained[iteration], whole.trained[iteration]
        assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected], f"iteration {iteration}"
        for name in ("reward_mean", "accuracy", "groups_dispatched", "tokens_response"):
            assert resumed.records[iteration][name] == whole.records[iteration][name]
    dispatched = {i: record["groups_dispatched"] for i, record in whole.records.items()}
    assert len(resumed.sampled) == sum(dispatched[i] for i in later if i >= RESUMED_AT + STALENESS), (
        "what the checkpoint has is not generated again"
    )
    assert all(count > GROUPS for count in dispatched.values()), "some groups were replaced in every iteration"


def test_a_run_that_may_not_train_what_a_checkpoint_has_produces_it_anew(whole: Outcome, parent: Path) -> None:
    """The checkpoint of a run with k = 2 has iterations 2 and 3, by versions 0 and 1: no groups of a run with k = 1."""
    speed = Speed(stride=8)
    resumed = run_coordinator(parent / "another", 1, speed, 1, RESUMED_AT, parent / "checkpoints")
    assert {iteration: versions(groups) for iteration, groups in resumed.trained.items()} == {
        2: {(2, 2)},
        3: {(2, 2)},
        4: {(3, 3)},
    }
    # stand-ins sample by seed alone, so that the same prompts are chosen as of the whole run's iteration
    first = [group.prompt_id for group in resumed.trained[RESUMED_AT]]
    assert first == [group.prompt_id for group in whole.trained[RESUMED_AT]]


def test_engines_go_on_with_the_version_they_have_where_trainers_do_not_publish(tmp_path: Path) -> None:
    """k = 2: one iteration ahead, and one publish in a row may be skipped. Version 2 is saved, hence published."""
    fast, skipped = Speed(step_s=0.0005, stride=4), frozenset({1, 3})
    whole = run_coordinator(tmp_path / "whole", STALENESS, fast, 2, 0, tmp_path / "checkpoints", skipped=skipped)
    slow = Speed(step_s=0.002, stride=8)
    resumed = run_coordinator(
        tmp_path / "resumed", STALENESS, slow, 1, RESUMED_AT, tmp_path / "checkpoints", skipped=skipped
    )
    # iterations 0 and 1 at the border of version 0, 2 at the one of version 1, which keeps version 0, and so on
    assert [versions(groups) for _, groups in sorted(whole.trained.items())] == [
        *({(0, 0)}, {(0, 0)}, {(0, 0)}),
        *({(2, 2)}, {(2, 2)}),
    ]
    for iteration in range(RESUMED_AT, ITERATIONS):
        ours, expected = resumed.trained[iteration], whole.trained[iteration]
        assert [group.index for group in expected] == list(range(GROUPS)), "I2: every group once, in its slot"
        assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected], f"iteration {iteration}"
    assert set(whole.probes) == {0, 2, 4, 5}
    assert all(len(probe["responses"]) == RESPONSES for probe in whole.probes.values()), "two engines, four responses"
    assert resumed.probes[2] == whole.probes[2], "what decides about publishes does not depend on which engines serve"


def test_updates_have_their_tokens_and_what_is_left_is_trained_next_in_a_resumed_run_too(tmp_path: Path) -> None:
    """k = 2: one iteration ahead, and a group may be carried for one update."""
    budget = 350  # of groups with four responses of 3 to 24 tokens

    def run(name: str, speed: Speed, engines: int, first: int) -> Outcome:
        return run_coordinator(
            tmp_path / name, STALENESS, speed, engines, first, tmp_path / "checkpoints", budget=budget
        )

    whole = run("whole", Speed(step_s=0.0005, stride=4), 2, 0)
    resumed = run("resumed", Speed(step_s=0.002, stride=8), 1, RESUMED_AT)
    prompts = [group.prompt_id for _, groups in sorted(whole.trained.items()) for group in groups]
    generated = sum(record["groups_dispatched"] for record in whole.records.values())
    assert len(prompts) == generated, "I2: none is lost"
    tokens, ages = [], set()
    for iteration, groups in whole.trained.items():
        assert [group.index for group in groups] == list(range(len(groups))), "I2: every group once, in its slot"
        ages |= {iteration - version for group in groups for version in group.version_range}
        tokens.append(sum(group.num_trained for group in groups))
        assert tokens[-1] == whole.records[iteration]["tokens_response"]
        if iteration < ITERATIONS - 1:
            without = sum(group.num_trained for group in groups[:-REPLICAS])
            assert without < budget, "no more groups than the budget asks for, one for each replica"
    assert ages == {0, 1, 2}, f"tokens {tokens}: the first by their own version, then one ahead, and carried ones"
    assert len({len(groups) for groups in whole.trained.values()}) > 1
    for iteration in range(RESUMED_AT, ITERATIONS):
        ours, expected = resumed.trained[iteration], whole.trained[iteration]
        assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected], f"iteration {iteration}"
        for key in ("reward_mean", "accuracy", "tokens_response", "groups", "groups_dispatched"):
            assert resumed.records[iteration][key] == whole.records[iteration][key], key
    ends = [file.read_text().splitlines()[-1] for file in sorted(tmp_path.glob("*/run/samples.jsonl"))]
    assert ends[0] == ends[1], "what samples.jsonl says of a carried group is in the checkpoint too"


def test_a_delayed_publish_changes_when_weights_arrive_and_nothing_else(whole: Outcome, parent: Path) -> None:
    speed = Speed(step_s=0.0005, stride=4)
    delayed = run_coordinator(parent / "delayed", STALENESS, speed, 2, mode="delayed")
    for iteration in range(ITERATIONS):
        ours, expected = delayed.trained[iteration], whole.trained[iteration]
        assert [to_bytes(group) for group in ours] == [to_bytes(group) for group in expected], f"iteration {iteration}"

    def versions_of(method: str) -> list[int]:
        return sorted({args[0] for name, args in delayed.calls if name == method})

    assert versions_of("pa_receive") == [0, ITERATIONS], (
        "at the border: the first, and the last, whose log-probs are compared"
    )
    assert versions_of("pa_prepare") == versions_of("pa_swap") == list(range(1, ITERATIONS))
    names = [name for name, _ in delayed.calls]
    assert names.count("pa_swap") == 2 * (ITERATIONS - 1), "both engines"
    assert all(delayed.records[i]["engine_still_s"] < 1.0 for i in range(ITERATIONS))
    assert [version for version, probe in delayed.probes.items() if probe] == [0, ITERATIONS]
