"""An evaluation ends a run: what the coordinator tells the trainers and does itself, at once or a version later, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pa_npu.checkpoints.directories import read_meta
from pa_npu.control.messages import DATA_POSITION, RUN_END
from tests.helpers.coordinator_run import WAIT_S, Run
from tests.helpers.launched import Launched, settings
from tests.helpers.stand_in_engine import stand_in_engines
from tests.integration.test_dynamic_sampling_resume import write_checkpoint
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
GOES_ON, ENDS = False, True


def play(
    directory: Path, first: int = 0, before: Path | None = None, position: dict[str, Any] | None = None, **evaluate: Any
) -> tuple[Run, dict[int, bool], str, dict[int, dict[str, Any]]]:
    """The trainers' part of a run until the coordinator ends it; by version what it says, its output, the stream's states."""
    directory.mkdir()
    checkpoint = write_checkpoint(directory, position) if position is not None else None
    with stand_in_engines(1, Speed(step_s=0.0005, stride=8)) as served:
        run = Run(
            directory,
            served,
            schedule={"iterations": 6, "prompts_per_iteration": 12, "evaluate_every": 1},
            evaluate=evaluate,
            checkpoint={"load": str(checkpoint) if checkpoint else None},
            before=before,
        )
        said: dict[int, bool] = {}
        states: dict[int, dict[str, Any]] = {}
        try:
            run.announce_weights()
            for version in range(first, 7):
                run.announce(version, None if version == first else {"loss": 0.0})
                run.published(version)
                if run.config.may_end_at(version):
                    said[version] = run.message(RUN_END, version=version).why is not None
                    if said[version]:
                        break
                if version == run.config.schedule.iterations:
                    break
                run.consume(version)
                run._wait_until(lambda version=version: version in versions(run), f"an evaluation of {version}")
                states[version + 1] = DATA_POSITION.wait(run.channel, WAIT_S, iteration=version + 1).state
            output = run.end()
        finally:
            run.process.kill()
            run.process.wait(10)
        assert run.process.returncode == 0, output
    return run, said, output, states


def versions(run: Run) -> list[int]:
    """That were evaluated; one beside training is, as trainers here are slow enough for it."""
    return [record["version"] for record in run.lines("evaluations.jsonl")]


def test_a_run_without_improvement_ends_with_the_version_that_was_evaluated(tmp_path: Path) -> None:
    """Answers of stand-in engines do not depend on the weights: every evaluation is as good as the first."""
    run, said, output, states = play(tmp_path / "a", patience=2)
    assert said == {1: GOES_ON, 2: ENDS} and versions(run) == [0, 1, 2]
    assert [record["iteration"] for record in run.lines("metrics.jsonl")] == [0, 1]
    assert "| the run ends with version 2 of 6: accuracy was not above the" in output
    assert [bool(record["ends_run"]) for record in run.lines("evaluations.jsonl")] == [False, False, True]
    assert "was not above the" in run.lines("evaluations.jsonl")[-1]["ends_run"]

    # the same run, continued from version 2, whose evaluation is then made again
    again, said, _, _ = play(tmp_path / "b", 2, run.dir, states[2], patience=2)
    assert said == {2: ENDS} and versions(again) == [0, 1, 2]


def test_beside_training_it_ends_a_version_later_and_that_one_is_evaluated_in_full(tmp_path: Path) -> None:
    run, said, _, _ = play(tmp_path / "a", patience=2, overlap=True)
    assert said == {2: GOES_ON, 3: ENDS} and versions(run) == [0, 1, 2, 3]
    last = run.lines("evaluations.jsonl")[-1]
    assert last["questions"] == last["planned"] == 6


def test_a_target_that_is_not_reached_ends_nothing(tmp_path: Path) -> None:
    run, said, output, _ = play(tmp_path / "a", stop_at=1.0)
    assert said == dict.fromkeys(range(1, 6), GOES_ON) and versions(run) == list(range(7)), output


@pytest.mark.nightly
def test_a_real_run_ends_early_with_its_checkpoint_and_weights_and_goes_on_when_asked(
    tiny: Path, tmp_path: Path
) -> None:
    keys = [
        *("data.test=" + str(tiny / "test.jsonl"), "schedule.iterations=8", "schedule.evaluate_every=1"),
        *("checkpoint.resume=auto", "checkpoint.every=1", "checkpoint.keep_last=1", "optimizer.learning_rate=1e-12"),
    ]
    run = tmp_path / "run"

    def launch(number: int, *more: str) -> str:
        directory = tmp_path / f"attempt-{number}"
        directory.mkdir()
        launched = Launched(directory, "run", *settings(tiny, run), *keys, *more)
        try:
            assert launched.popen.wait(400) == 0, launched.output
            return launched.output
        finally:
            launched.close()

    first = launch(0, "evaluate.patience=2")
    assert "the run ends with version 2 of 8" in first and "Ended early: accuracy was not above" in first
    assert read_meta(run / "checkpoints" / "iteration_000002").version == 2
    assert (run / "hf" / "config.json").is_file()
    shutil.rmtree(run / "hf")
    second = launch(1, "evaluate.patience=4")
    assert "the run ends with version 4 of 8" in second
    assert read_meta(run / "checkpoints" / "iteration_000004").version == 4 and (run / "hf" / "config.json").is_file()
