"""The real coordinator of a run without engines: it waits for trainers alone, and goes on with the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_npu.control.held_out import HELD_OUT_LOSS, HELD_OUT_SETS, HeldOutLoss, get_group
from pa_npu.control.messages import DATA_POSITION, TRAINERS_RUN_ON
from pa_npu.publish.messages import MEMBERS
from pa_npu.samples.wire import from_bytes
from tests.helpers.coordinator_run import REPLICAS, WAIT_S, Run, coordinator_run, write_inputs
from tests.helpers.reports import trainers_run_on

pytestmark = pytest.mark.timeout(120)

ITERATIONS = 3
SAVED = 1
GROUPS = 2 * REPLICAS
SIZE = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def sections(inputs: Path, **checkpoint: Any) -> dict[str, dict[str, Any]]:
    return {
        "algorithm": {"name": "sft"},
        "data": {"test": str(inputs / "test.jsonl")},
        "rollout": {"engines": 0, "responses_per_prompt": SIZE, "max_response_tokens": 24},
        "schedule": {"iterations": ITERATIONS, "prompts_per_iteration": GROUPS, "order": "prompt"},
        "checkpoint": {"every": SAVED, **checkpoint},
    }


def play(run: Run, first: int = 0) -> None:
    """Plays trainers that hold each version, tell the loss of held-out rows, and train."""
    TRAINERS_RUN_ON.put(run.channel, trainers_run_on())
    for version in range(first, ITERATIONS + 1):
        report = None if version == first else {"loss": 0.5}
        run.announce(version, report, publishes=False)
        HELD_OUT_LOSS.put(
            run.channel, HeldOutLoss({"test": {"loss": 2.0 / (1 + version)}}, 0.1), version=version
        )
        if not first and version == SAVED:
            run._save_checkpoint(version)
        if version < ITERATIONS:
            run.consume(version)
            position = DATA_POSITION.wait(run.channel, WAIT_S, iteration=version + 1)
            run.states[version + 1] = position.state
    run.finish()


def rows_of(run: Run, iteration: int) -> list[list[list[int]]]:
    return [
        [sequence.tolist() for sequence in group.sequences()] for group in run.trained[iteration]
    ]


def test_it_waits_for_no_engine_and_a_resumed_one_goes_on_with_the_same_rows(
    inputs: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with coordinator_run(first, inputs, engines=0, **sections(inputs)) as run:
        play(run)
        assert not any(MEMBERS.exists(run.channel, version=v, attempt=0) for v in range(4)), (
            "nobody is asked to load anything"
        )
        (held_out,) = HELD_OUT_SETS.get(run.channel).sets
        assert (held_out.name, held_out.rows) == ("test", 6)
        groups = [
            from_bytes(get_group(run.channel, "test", number))
            for number in range(sum(held_out.microbatches))
        ]
        assert sum(group.num_samples for group in groups) == 6
        assert sum(group.num_trained for group in groups) == held_out.tokens
        for record in run.records.values():
            assert record["rows"] == GROUPS * SIZE
            assert not {"engines", "engine_idle", "publish_s", "reward_mean"} & set(record)
        assert [record["eval_loss"] for record in run.records.values()] == [2.0, None, None]
        evaluations = run.lines("evaluations.jsonl")
        assert [evaluation["loss"] for evaluation in evaluations] == [2.0, 0.5]
        assert evaluations[1]["best_by"] == -0.5
        with coordinator_run(
            second, inputs, engines=0, **sections(inputs, load=str(run.checkpoint))
        ) as resumed:
            play(resumed, SAVED)
            for iteration in range(SAVED, ITERATIONS):
                assert rows_of(resumed, iteration) == rows_of(run, iteration)
        assert rows_of(run, 0) != rows_of(run, 1), "negative control"
