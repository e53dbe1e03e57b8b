"""The real coordinator process between stand-in engines and a trainer played by the test."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.config.tree import PROBE_RESPONSES
from pa_npu.evaluation.results import read_results
from pa_npu.publish.messages import (
    BROKEN,
    LATE_ANSWER,
    LATE_DECISION,
    LATE_REQUEST,
    MEMBERS,
    VERDICT,
    LateAnswer,
    LateRequest,
    PublishBroken,
)
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import group_seed
from pa_npu.telemetry.sample_store import SAMPLES_IN_SHORT
from tests.helpers.coordinator_run import GROUPS, REPLICAS, RESPONSES, ROOT, WAIT_S, Run
from tests.helpers.fake_judge import Answer, fake_judge
from tests.helpers.groups import prompt_tokens
from tests.helpers.stand_in_engine import Served, stand_in_engines
from tools.stand_in import Speed

pytestmark = pytest.mark.integration


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(10)


def test_two_engines_share_two_iterations_and_everything_is_recorded(tmp_path, runs):
    with stand_in_engines(2, Speed(step_s=0.001, stride=4)) as engines:
        run = Run(tmp_path, engines)
        runs.append(run)
        run.announce_weights()
        all_groups = []
        for version in range(3):
            report = {"loss": 0.5 * version, "train_s": 1.0, "wait_s": 0.01, "tokens_computed": 1234}
            if version:  # while the trainers still train
                run._wait_until(partial(all_load, engines, version), "engines are asked to load")
                assert not VERDICT.exists(run.channel, version=version, attempt=0), "which the trainers have not sent"
            run.announce(version, report if version else None)
            done = run.published(version)
            assert done["done"] and (done["epoch"], done["workers"]) == (0, 2), "the same two engines, every time"
            if version == 1:
                assert done["probe"] is None, "the iteration's first groups are the probe"
            else:
                assert [len(response["tokens"]) for response in done["probe"]["responses"]] == [5] * PROBE_RESPONSES
            if version < 2:
                all_groups.append(run.consume(version))
        output = run.end()
    assert run.process.returncode == 0, output

    for iteration, groups in enumerate(all_groups):
        assert sorted(group.index for group in groups) == list(range(GROUPS)), "I2: every group exactly once"
        assert {(group.iteration, *group.version_range) for group in groups} == {(iteration, iteration, iteration)}, (
            "I1"
        )
        assert all(group.num_samples == RESPONSES for group in groups)
    prompt_ids = [group.prompt_id for groups in all_groups for group in groups]
    assert len(set(prompt_ids)) == 2 * GROUPS, "40 prompts hold two iterations without repetition"

    # sampling parameters and seeds arrived; engines were asked in protocol order and share the load
    training = [request for served in engines for request in served.engine.requests if request["n"] == RESPONSES]
    assert {request["seed"] for request in training} == {group_seed(3, i, g) for i in range(2) for g in range(GROUPS)}
    for number, served in enumerate(engines):
        calls = [call for call in served.engine.calls if call[0] != "pa_version"]
        assert [name for name, _ in calls] == ["pa_connect", *(["pa_receive"] * 3)]
        (groups,) = calls[0][1]
        assert groups["store"] == ["127.0.0.1", run.server.port] and groups["backend"] == "gloo"
        assert (groups["first_rank"], groups["world_size"]) == (1 + number, 3)
        assert groups["stages"] == [{"name": "publish-0/0/group", "manifest": {}}]
        assert served.engine.identity.version == 2 and served.engine.prefix_resets == 3

    records = run.lines("metrics.jsonl")
    assert [(record["iteration"], record["version"]) for record in records] == [(0, 0), (1, 1)]
    for record, groups, version in zip(records, all_groups, (1, 2), strict=True):
        tokens = sum(group.num_trained for group in groups)
        assert record["loss"] == 0.5 * version and record["train_s"] == 1.0, "the report of this iteration"
        assert record["trainer_idle"] == pytest.approx(0.01 / record["iteration_s"])
        assert record["tokens_response"] == tokens and record["groups"] == GROUPS
        assert record["tokens_prompt"] == RESPONSES * sum(len(prompt_tokens(group)) for group in groups)
        assert record["tokens_computed"] == 1234, "the trainers know what they computed"
        assert record["devices"] == 4 and record["window"] == 8
        assert record["tpspd"] == pytest.approx((tokens + record["tokens_prompt"]) / record["iteration_s"] / 4)
        assert record["reward_mean"] == pytest.approx(sum(group.rewards.sum() for group in groups) / GROUPS / RESPONSES)
        assert 0 <= record["engine_idle"] <= 1 and 0 < record["generate_s"] <= record["iteration_s"]
        requests = [engine["requests"] for engine in record["engines"].values()]
        assert sum(requests) >= GROUPS and min(requests) >= GROUPS // 4, f"both engines work: {requests}"
    assert [evaluation["version"] for evaluation in run.lines("evaluations.jsonl")] == [0, 2]
    assert all(evaluation["questions"] == 6 for evaluation in run.lines("evaluations.jsonl"))
    assert records[0]["eval_accuracy"] == run.lines("evaluations.jsonl")[0]["accuracy"]
    samples = run.lines("samples.jsonl")
    assert [(sample["iteration"], sample["index"]) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    progress = [line for line in output.splitlines() if line.startswith("| iteration")]
    assert len(progress) == 2 and "1/2" in progress[0] and "2/2" in progress[1]


def test_a_judge_that_fails_and_a_tracker_that_hangs_are_counted_and_the_run_goes_on(tmp_path, runs):
    """The tracker answers iteration 1 late, its thread and its handler at exit never end; and the judge refuses some responses of
    each iteration."""
    library, told = tmp_path / "library", tmp_path / "told.jsonl"
    library.mkdir()
    (library / "wandb.py").write_text((ROOT / "tests/helpers/fake_wandb.py").read_text())
    environment = {"PYTHONPATH": str(library), "FAKE_WANDB_FILE": str(told), "FAKE_WANDB": "hang:1,hang_at_exit"}

    asked = itertools.count()

    def judged(message: str, _: int) -> Answer:
        # of few groups, or the run would end
        return Answer(status=400) if next(asked) % 14 == 3 else Answer(f"Score: {len(message) % 10}")

    reward = {
        "functions": [{"name": "judge"}],
    }
    judge_keys = {"model": "m", "template": "{response}", "on_failure": "neutral"}
    telemetry = {"trackers": ["wandb"], "project": "proof"}
    with fake_judge(judged) as judge, stand_in_engines(2, Speed(step_s=0.001, stride=4)) as engines:
        reward["judge"] = {**judge_keys, "url": judge.url}
        run = Run(tmp_path, engines, environment, reward=reward, telemetry=telemetry)
        runs.append(run)
        run.announce_weights()
        groups = []
        for version in range(3):
            run.announce(version, {"loss": 0.5, "train_s": 1.0, "wait_s": 0.0} if version else None)
            assert run.published(version)["done"]
            groups += run.consume(version) if version < 2 else []
        Path(f"{told}.go").touch()
        output = run.end()
    assert run.process.returncode == 0, output
    records = run.lines("metrics.jsonl")
    assert all(record["reward_no_verdict"]["judge"] > 0 for record in records)
    assert "| no verdict by judge on " in output
    assert "records_lost" not in records[-1] and len(records) == 2
    for group in groups:
        assert np.isfinite(group.advantages).all() and group.num_samples == RESPONSES
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    inits = [line["init"] for line in lines if "init" in line]
    assert len(inits) == 1 and inits[0]["project"] == "proof"
    logged = [line["log"] for line in lines if "train/reward" in line.get("log", {})]
    for values, record in zip(logged, records, strict=True):
        assert values["train/reward"] == pytest.approx(record["reward_mean"])
        assert values["train/rewards/judge/mean"] == pytest.approx(record["rewards"]["judge"])
    tables = [line["tables"]["completions"] for line in lines if line.get("tables")]
    assert tables and all(len(rows) == SAMPLES_IN_SHORT * RESPONSES for _, rows in tables)


def all_load(engines: list[Served], version: int) -> bool:
    """Whether every engine was asked to."""
    return all(any(n == "pa_receive" and a[0] == version for n, a in served.engine.calls) for served in engines)


def test_an_evaluation_beside_training_ends_when_the_trainers_are_ready(tmp_path, runs):
    """Several sets, with samples. Answers of version 1 that would take 24 s are given up, and nobody waits for them."""
    evaluate = {"sets": {"more": str(tmp_path / "test.jsonl")}, "samples": 2, "overlap": True, "metric": "more/avg@2"}
    schedule = {"iterations": 2, "prompts_per_iteration": GROUPS, "evaluate_every": 1}
    with stand_in_engines(1, Speed(stride=4)) as engines:
        engine = engines[0].engine
        run = Run(tmp_path, engines, evaluate=evaluate, schedule=schedule)
        runs.append(run)

        def asked(n: int) -> int:
            return sum(request["n"] == n for request in engine.requests)

        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        run.consume(0)
        done = run.dir / "evaluations.jsonl"
        run._wait_until(
            lambda: done.exists() and done.stat().st_size > 0, "recorded, while the trainers are still at work"
        )
        assert asked(2) == 12
        engine.speed = Speed(step_s=0.1)  # groups last long enough to be seen in flight, however busy the machine is
        run.announce(1, {"loss": 0.0})
        run.published(1)
        assert [record["version"] for record in run.lines("evaluations.jsonl")] == [0]
        before = asked(1)
        run._wait_until(lambda: asked(RESPONSES) == 2 * GROUPS, "the last group was asked")
        run._wait_until(lambda: engines[0].left() <= 3, "the last group is nearly written")
        engine.speed = Speed(step_s=2.0, stride=1)
        run.consume(1)
        run._wait_until(lambda: asked(1) > before, "the evaluation of version 1 has begun")
        engine.speed = Speed(stride=4)
        began_s = time.monotonic()
        run.announce(2, {"loss": 0.0})
        run.published(2)
        assert time.monotonic() - began_s < 15
        output = run.end()
    assert run.process.returncode == 0, output
    records = {record["version"]: record for record in run.lines("evaluations.jsonl")}
    assert records[2]["questions"] == records[2]["planned"] == 12, "the last version's is whole"
    assert records[0]["planned"] == records[0]["questions"] == 12 and list(records[2]["sets"]) == ["test", "more"]
    assert 1 not in records or records[1]["questions"] < 12
    metrics = records[2]["sets"]["more"]["metrics"]
    assert list(metrics) == ["greedy", "avg@2", "pass@2"] and records[2]["best_by"] == metrics["avg@2"]["value"]
    kept = read_results(run.dir / "evaluations" / "version_000002.parquet")
    assert len(kept) == 12 * 3 and {response.name for response in kept} == {"test", "more"}
    assert "evaluation of version 2: accuracy" in output and "more: greedy" in output


def contents(groups: list[Group]) -> list[tuple[int, int, bytes, bytes]]:
    """Returns what is trained, whatever the order of arrival."""
    return sorted((g.index, g.prompt_id, g.tokens[g.trained].tobytes(), g.advantages.tobytes()) for g in groups)


def no_evaluation(directory: Path) -> dict[str, object]:
    return {"train": str(directory / "train.jsonl"), "test": None, "max_prompt_tokens": 16}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, bytes, bytes]]:
    """Iteration 0 of a run with two quick engines that live."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with stand_in_engines(2, Speed(stride=4)) as engines:
        run = Run(directory, engines, data=no_evaluation(directory))
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        groups = run.consume(0)
        run.process.kill()
        run.end()
    return contents(groups)


def test_a_dead_engines_groups_come_from_the_other_and_the_iteration_is_the_same(tmp_path, runs, undisturbed):
    # 24 tokens take at least 2.4 s, so groups are in flight when the engine dies
    with stand_in_engines(2, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path))
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[0].stop()
        engines[1].engine.speed = Speed(stride=4)
        assert contents(run.consume(0)) == undisturbed
        assert run.roster.replacement_wanted(0, 0), "the launcher is asked for another"
        run.announce(1, {"loss": 0.0})
        done = run.published(1)
        assert (done["epoch"], done["workers"]) == (1, 1), "the trainers publish to the one that is left"
        connects = [args for name, args in engines[1].engine.calls if name == "pa_connect"]
        assert [(groups["first_rank"], groups["world_size"]) for (groups,) in connects] == [(2, 3), (1, 2)]
        names = [groups["stages"][0]["name"] for (groups,) in connects]
        assert names == ["publish-0/0/group", "publish-0/1/group"]


def test_the_only_engines_successor_gets_the_iterations_weights_before_it_serves(tmp_path, runs, undisturbed):
    with stand_in_engines(1, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path))
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[0].stop()
        successor = engines[0].start_again(Speed(stride=4))
        try:
            run.roster.renew(0, 1, run.roster.entries()[0].url)
            assert run.message(LATE_REQUEST, number=0) == LateRequest(version=0, workers=1)
            assert not successor.engine.requests, "it holds no weights yet"
            LATE_ANSWER.put(run.channel, LateAnswer(True), number=0, rank=0)
            assert run.message(LATE_DECISION, number=0).held
            assert contents(run.consume(0)) == undisturbed
            calls = [(name, args) for name, args in successor.engine.calls if name != "pa_version"]
            assert [name for name, _ in calls] == ["pa_connect", "pa_receive"]
            assert calls[0][1][0]["stages"][0]["name"] == "late-0/0/group" and calls[1][1] == [0]
        finally:
            successor.stop()


def test_a_hung_engine_is_found_by_a_probe_and_its_health_page_does_not_count(tmp_path, runs, undisturbed):
    rollout = {"engines": 2, "responses_per_prompt": RESPONSES, "max_response_tokens": 24, "window": 8}
    with stand_in_engines(2, Speed(stride=4, step_s=0.02)) as engines:
        run = Run(
            tmp_path,
            engines,
            data=no_evaluation(tmp_path),
            rollout=rollout | {"probe_timeout_s": 6.0, "request_timeout_s": 600},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[1].wait_for_request(lambda request: request["n"] == RESPONSES, WAIT_S), run.end()
        engines[1].engine.speed = Speed(step_s=3600)
        assert contents(run.consume(0)) == undisturbed
        wanted = run.roster.replacement_wanted(1, 0)
        assert wanted and "did not generate a token when probed" in wanted


def test_engines_join_at_the_next_publish_and_leave_when_they_have_finished(tmp_path, runs):
    with stand_in_engines(2, Speed(step_s=0.002, stride=4)) as engines:
        run = Run(
            tmp_path,
            engines[:1],
            data=no_evaluation(tmp_path),
            schedule={"iterations": 4, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        assert run.published(0)["workers"] == 1
        index = run.roster.announce(engines[1].url, restarts=False)
        run.consume(0)
        assert not engines[1].engine.requests
        run.announce(1, {"loss": 0.0})
        assert run.published(1)["workers"] == 2
        run.consume(1)
        joined = len([request for request in engines[1].engine.requests if request["n"] == RESPONSES])
        assert joined >= GROUPS // 4
        run.announce(2, {"loss": 0.0})
        run.published(2)
        run.roster.ask_leave(index)
        run.consume(2)
        run._wait_until(lambda: run.roster.has_left(index), "the engine has left")
        engines[1].stop()
        run.announce(3, {"loss": 0.0})
        assert run.published(3)["workers"] == 1
        run.consume(3)
        run.announce(4, {"loss": 0.0})
        run.published(4)
        output = run.end()
    assert run.process.returncode == 0, output
    records = run.lines("metrics.jsonl")
    assert [record["devices"] for record in records] == [REPLICAS + engines for engines in (1, 2, 2, 1)]
    assert [len(record["engines"]) for record in records] == [2, 2, 1, 1], "those known at the end of the iteration"


def test_without_any_engine_left_the_coordinator_ends_with_one_line(tmp_path, runs):
    with stand_in_engines(1, Speed(step_s=0.1)) as engines:
        run = Run(tmp_path, [], data=no_evaluation(tmp_path), rollout={"engines": 1, "window": 8})
        runs.append(run)
        run.roster.announce(engines[0].url, restarts=False)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        assert engines[0].wait_for_request(lambda request: request["n"] > 1, WAIT_S), run.end()
        engines[0].stop()
        output = run.end()
    assert run.process.returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert "no engine is left" in last and engines[0].url in last and "Traceback" not in output, output


def test_a_publish_that_the_trainers_cannot_complete_is_made_again(tmp_path, runs):
    with stand_in_engines(2, Speed(stride=4)) as engines:
        run = Run(tmp_path, engines, data=no_evaluation(tmp_path), publish={"timeout_s": 30, "probe_tokens": 0})
        runs.append(run)
        engines[0].engine.receive_s = 3600.0  # as if its worker had died inside the load
        run.announce_weights()
        run.announce(0, None)
        run.message(MEMBERS, version=0, attempt=0)
        BROKEN.put(run.channel, PublishBroken("the connection broke"), version=0, attempt=0)
        engines[0].engine.receive_s = 0.0
        first, second = run.published(0, 0), run.published(0, 1)
        assert not first["done"] and "the connection broke" in first["reason"]
        assert second["done"] and (second["epoch"], second["workers"]) == (1, 2)
        abandoned = dist.PrefixStore("publish-0/0", run.server)
        assert abandoned.check(["abandoned"]), "the workers that still wait are told"
        assert len(run.consume(0)) == GROUPS


def test_a_reward_over_its_time_limit_is_zero_logged_and_counted_and_the_run_goes_on(tmp_path, runs):
    """Prompts w3, w7, w11, ... are slow."""
    (tmp_path / "slow_rewards.py").write_text(
        "import time\n"
        "def slow(group):\n"
        "    if int(group.answer.split()[-1]) % 4 == 0:\n"
        "        time.sleep(3600)\n"
        "    return [1.0] * len(group.responses)\n"
    )
    reward = {"functions": [{"name": "slow_rewards:slow"}], "timeout_s": 2.0, "workers": 2}
    with stand_in_engines(1, Speed(stride=4)) as engines:
        data = {"test": None, "shuffle": False, "train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 16}
        environment = {"PYTHONPATH": str(tmp_path)}
        run = Run(
            tmp_path,
            engines,
            environment,
            reward=reward,
            data=data,
            schedule={"iterations": 1, "prompts_per_iteration": GROUPS},
        )
        runs.append(run)
        run.announce_weights()
        run.announce(0, None)
        run.published(0)
        groups = {group.index: group for group in run.consume(0)}
        run.announce(1, {"loss": 0.0, "train_s": 1.0, "wait_s": 0.0, "tokens_computed": 1})
        run.published(1)
        output = run.end()
    assert run.process.returncode == 0, output
    assert [groups[index].rewards.tolist() for index in range(GROUPS)] == [
        [0.0 if index % 4 == 0 else 1.0] * RESPONSES for index in range(GROUPS)
    ]
    (record,) = run.lines("metrics.jsonl")
    assert record["reward_errors"] == GROUPS // 4 and record["reward_mean"] == pytest.approx(0.75)
    said = [line for line in output.splitlines() if "reward.timeout_s = 2 s" in line]
    assert len(said) == GROUPS // 4 and all("zero for the responses to" in line for line in said), output
    assert "Traceback" not in output


def test_trainers_that_never_come_end_the_coordinator_at_the_deadline(tmp_path, runs):
    with stand_in_engines(1, Speed()) as engines:
        run = Run(tmp_path, engines, trainer={"devices": REPLICAS}, run={"startup_timeout_s": 2})
        runs.append(run)
        output = run.end()
    assert run.process.returncode == 1, output
    assert "DeadlineExceeded" in output.strip().splitlines()[-1] and "pipeline stage 0" in output, output
    assert "Traceback" not in output


def test_bad_input_ends_with_code_2_and_one_line(tmp_path, runs):
    with stand_in_engines(1, Speed()) as engines:
        run = Run(tmp_path, engines, data={"train": str(tmp_path / "none.jsonl"), "test": None})
        runs.append(run)
        output = run.end()
    assert run.process.returncode == 2, output
    assert "none.jsonl" in output.strip().splitlines()[-1] and "Traceback" not in output
