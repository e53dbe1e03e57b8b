"""One run of the real coordinator process: what fails beside it is counted, what ends it is one line, and records stay whole.

What runs train whatever disturbs them: test_coordinator_matrix.py.
"""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.control.messages import BORDER, REPORT, BorderReport
from pa_npu.control.tasks import LONGEST_S
from pa_npu.evaluation.results import read_results
from pa_npu.publish.messages import READY, TrainersReady
from pa_npu.telemetry.chrome_trace import read_events
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT
from tests.helpers.coordinator_run import FAST, GROUPS, RESPONSES, ROOT, WAIT_S, Run
from tests.helpers.fake_judge import Answer, fake_judge
from tests.helpers.reports import iteration_report
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
Start = Callable[..., Run]
BORDER_TAKES_S = 0.5


def test_a_judge_that_fails_and_a_tracker_that_hangs_are_counted_and_the_run_goes_on(
    start: Start, tmp_path: Path
) -> None:
    """The tracker answers iteration 1 late, its thread and its handler at exit never end; and the
    judge refuses some responses of each iteration."""
    library, reported = tmp_path / "library", tmp_path / "told.jsonl"
    library.mkdir()
    (library / "wandb.py").write_text((ROOT / "tests/helpers/fake_wandb.py").read_text())
    variables = {
        "PYTHONPATH": str(library),
        "FAKE_WANDB_FILE": str(reported),
        "FAKE_WANDB": "hang:1,hang_at_exit",
    }
    number = itertools.count()

    def judged(message: str, _: int) -> Answer:
        # of few groups, or the run would end
        return (
            Answer(status=400) if next(number) % 14 == 3 else Answer(f"Score: {len(message) % 10}")
        )

    with fake_judge(judged) as judge:
        keys = {"url": judge.url, "model": "m", "template": "{response}", "on_failure": "neutral"}
        run = start(
            engines=2,
            variables=variables,
            reward={"functions": [{"name": "judge"}], "judge": keys},
            telemetry={"trackers": ["wandb"], "project": "proof"},
        )
        run.begin()
        run.consume(0)
        run.publish(1, loss=0.5)
        run.consume(1)
        assert run.publish(2, loss=0.5)["done"]
        Path(f"{reported}.go").touch()
        output = run.finish()
    records = run.lines("metrics.jsonl")
    assert all(record["reward_no_verdict"]["judge"] > 0 for record in records)
    assert "| no verdict by judge on " in output
    assert "records_lost" not in records[-1] and len(records) == 2
    for group in run.trained[0] + run.trained[1]:
        assert np.isfinite(group.advantages).all() and group.num_samples == RESPONSES
    lines = [json.loads(line) for line in reported.read_text().splitlines()]
    inits = [line["init"] for line in lines if "init" in line]
    assert len(inits) == 1 and inits[0]["project"] == "proof"
    logged = [line["log"] for line in lines if "train/reward" in line.get("log", {})]
    for values, record in zip(logged, records, strict=True):
        assert values["train/reward"] == pytest.approx(record["reward_mean"])
        assert values["train/rewards/judge/mean"] == pytest.approx(record["rewards"]["judge"])
    tables = [line["tables"]["completions"] for line in lines if line.get("tables")]
    assert tables and all(len(rows) == SAMPLES_IN_SHORT * RESPONSES for _, rows in tables)


def test_a_reward_over_its_time_limit_is_zero_logged_and_counted_and_the_run_goes_on(
    start: Start, tmp_path: Path
) -> None:
    """Prompts w3, w7, w11, ... are slow."""
    (tmp_path / "slow_rewards.py").write_text(
        "import time\n"
        "def slow(group):\n"
        "    if int(group.answer.split()[-1]) % 4 == 0:\n"
        "        time.sleep(3600)\n"
        "    return [1.0] * len(group.responses)\n"
    )
    run = start(
        variables={"PYTHONPATH": str(tmp_path)},
        reward={"functions": [{"name": "slow_rewards:slow"}], "timeout_s": 2.0, "workers": 2},
        data={"shuffle": False},
        schedule={"iterations": 1},
    )
    run.play()
    groups = {group.index: group for group in run.trained[0]}
    assert [groups[index].rewards.tolist() for index in range(GROUPS)] == [
        [0.0 if index % 4 == 0 else 1.0] * RESPONSES for index in range(GROUPS)
    ]
    (record,) = run.lines("metrics.jsonl")
    assert record["reward_errors"] == GROUPS // 4 and record["reward_mean"] == pytest.approx(0.75)
    output = [line for line in run.output.splitlines() if "reward.timeout_s = 2 s" in line]
    assert len(output) == GROUPS // 4 and all(
        "zero for the responses to" in line for line in output
    ), run.output
    assert "Traceback" not in run.output


def test_an_evaluation_beside_training_ends_when_the_trainers_are_ready(
    start: Start, inputs: Path
) -> None:
    """Several sets, with samples.

    Answers of version 1 that would take 24 s are given up, and nobody waits for them.
    """
    test = str(inputs / "test.jsonl")
    run = start(
        data={"test": test},
        evaluate={"sets": {"more": test}, "samples": 2, "overlap": True, "metric": "more/avg@2"},
        schedule={"evaluate_every": 1},
    )
    (served,) = run.engines

    def is_of_version_1(request: dict[str, Any]) -> bool:
        return request["n"] == 1 and request["version"] == 1

    def look(request: dict[str, Any]) -> None:
        if is_of_version_1(request):
            served.engine.speed = Speed(step_s=1.0)
        elif request["version"] == 2:
            served.engine.speed = FAST

    served.requests.look = look
    run.begin()
    run.consume(0)
    done = run.dir / "evaluations.jsonl"
    run.wait_until(
        lambda: done.exists() and done.stat().st_size > 0,
        "recorded, while the trainers are still at work",
    )
    assert sum(request["n"] == 2 for request in served.requests) == 12
    run.publish(1)
    run.consume(1)
    assert served.wait_for_request(is_of_version_1, WAIT_S), run.end()
    assert [record["version"] for record in run.lines("evaluations.jsonl")] == [0]
    began_s = time.monotonic()
    run.publish(2)
    assert time.monotonic() - began_s < 15
    output = run.finish()
    records = {record["version"]: record for record in run.lines("evaluations.jsonl")}
    assert records[2]["questions"] == records[2]["planned"] == 12, "the last version's is whole"
    assert records[0]["planned"] == records[0]["questions"] == 12 and list(records[2]["sets"]) == [
        "test",
        "more",
    ]
    assert 1 not in records or records[1]["questions"] < 12
    metrics = records[2]["sets"]["more"]["metrics"]
    assert (
        list(metrics) == ["greedy", "avg@2", "pass@2"]
        and records[2]["best_by"] == metrics["avg@2"]["value"]
    )
    kept = read_results(run.dir / "evaluations" / "version_000002.parquet")
    assert len(kept) == 12 * 3 and {response.name for response in kept} == {"test", "more"}
    assert "evaluation of version 2: accuracy" in output and "more: greedy" in output


def test_without_any_engine_left_the_coordinator_ends_with_one_line(start: Start) -> None:
    run = start(speed=Speed(step_s=0.1), known=0)
    run.roster.announce(run.engines[0].url, restarts=False)
    run.begin()
    run.wait_for_group()
    run.engines[0].stop()
    output = run.end()
    assert run.process.returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert (
        "no engine is left" in last and run.engines[0].url in last and "Traceback" not in output
    ), output


def test_trainers_that_never_come_end_the_coordinator_at_the_deadline(start: Start) -> None:
    run = start(run={"startup_timeout_s": 1})
    output = run.end()
    assert run.process.returncode == 1, output
    assert (
        "DeadlineExceeded" in output.strip().splitlines()[-1] and "rank 0 to announce" in output
    ), output
    assert "Traceback" not in output


def test_bad_input_ends_with_code_2_and_one_line(start: Start, tmp_path: Path) -> None:
    run = start(data={"train": str(tmp_path / "none.jsonl")})
    output = run.end()
    assert run.process.returncode == 2, output
    assert "none.jsonl" in output.strip().splitlines()[-1] and "Traceback" not in output


@pytest.fixture
def at_the_end(start: Start) -> Run:
    """A coordinator whose first iteration is trained and published, of which the trainers' last
    word is missing yet.
    """
    run = start(schedule={"evaluate_every": 0})
    assert run.begin()["done"]
    run.consume(0)
    REPORT.put(run.channel, iteration_report(0, train_s=1.0), iteration=0)
    READY.put(run.channel, TrainersReady(1), version=1)
    assert run.published(1)["done"]
    assert (run.dir / "metrics.jsonl").read_text() == "", "negative control: there is no record yet"
    return run


def terminate(run: Run) -> tuple[str, float]:
    """Ends a run by SIGTERM, and returns its output and the seconds that this took."""
    began_s = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    output = run.end()
    assert run.process.returncode == -signal.SIGTERM, output
    assert "Traceback" not in output and "never retrieved" not in output, output
    return output, time.monotonic() - began_s


def test_the_record_of_a_completed_iteration_is_whole_when_the_run_is_ended_right_after_it(
    at_the_end: Run,
) -> None:
    run = at_the_end
    border = BorderReport(border_wait_s=0.125)
    later = threading.Timer(BORDER_TAKES_S, lambda: BORDER.put(run.channel, border, version=1))
    later.start()
    output, took_s = terminate(run)
    later.join()
    (record,) = run.lines("metrics.jsonl")
    assert (record["iteration"], record["groups"], record["border_wait_s"]) == (0, GROUPS, 0.125)
    assert len(run.lines("samples.jsonl")) > 0
    assert "| iteration 0 (1/2)" in output, "the console has it too"
    timeline = run.dir / "timeline" / "coordinator.jsonl"
    assert all(json.loads(line) for line in timeline.read_text().splitlines()), (
        "every line is whole"
    )
    events = read_events(timeline)
    published = [event["args"]["version"] for event in events if event.get("name") == "publish"]
    produced = [event for event in events if event.get("name") == "produce"]
    assert published == [0, 1] and [event["args"]["iteration"] for event in produced] == [0, 1]
    assert produced[-1]["args"]["error"] == "CancelledError", (
        "what was cut off is there, and says so"
    )
    assert BORDER_TAKES_S <= took_s < LONGEST_S, "it waited for what was missing, and no longer"


def test_what_never_comes_is_not_waited_for_beyond_the_limit(at_the_end: Run) -> None:
    _, took_s = terminate(at_the_end)
    assert took_s < LONGEST_S + 1.0
    assert (at_the_end.dir / "metrics.jsonl").read_text() == "", "nothing half"
