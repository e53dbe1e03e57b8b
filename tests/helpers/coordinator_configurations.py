"""Configurations of whole runs of the coordinator, and what is true of a run that nothing disturbs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pa_npu.agents.gateway import GATEWAY_FILE
from pa_npu.publish.messages import VERDICT
from pa_npu.publish.probes import MIN_RESPONSES
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import group_seed
from tests.helpers.coordinator_run import FAST, GROUPS, REPLICAS, RESPONSES, Run
from tests.helpers.groups import prompt_tokens
from tests.helpers.stand_in_engine import Served
from tools.stand_in import Speed

Sections = dict[str, dict[str, Any]]
ITERATIONS, SAVED = 5, 2
STALENESS = 2
BUDGET = 350  # tokens of groups with four responses of 3 to 24 tokens
SKIPPED = frozenset({1, 3})
NUM_TASKS = 4
QUICK = Speed(step_s=0.001, stride=4)
LAST = Speed(step_s=0.008)  # a group takes up to 0.5 s: others are through long before

# two turns of every task, eight tasks at once
AGENT = """
import json, os, sys, threading, urllib.request
killed = sys.argv[1]
def ask(url, key, body=None):
    headers = {"Authorization": "Bearer " + key, "x-program": os.environ["PROGRAM"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))
def serve():
    while True:
        taken = ask(os.environ["GATEWAY_URL"] + "/tasks?wait_s=20", os.environ["OPENAI_API_KEY"])
        if taken["task"] is None: continue
        url, key = taken["base_url"], taken["api_key"]
        prompt = taken["task"]["row"]["question"]
        first = ask(url + "/completions", key, {"model": "m", "prompt": prompt, "max_tokens": 5})
        if not os.path.exists(killed): open(killed, "w").close(); os.kill(os.getpid(), 9)
        prompt += first["choices"][0]["text"] + " w9"
        second = ask(url + "/completions", key, {"model": "m", "prompt": prompt, "max_tokens": 6})
        ask(url.removesuffix("/v1") + "/reward", key, {"reward": len(second["choices"][0]["text"])})
        ask(url.removesuffix("/v1") + "/end", key, {})
for _ in range(8): threading.Thread(target=serve).start()
"""


@dataclass(frozen=True)
class Configuration:
    """sections: given the directory of `inputs`. play: the whole run. holds: raises where the run
    is not what rows compare with.
    """

    sections: Callable[[Path], Sections]
    play: Callable[[Run], None] = Run.play
    holds: Callable[[Run], None] = lambda run: None
    engines: int = 2
    speed: Speed = FAST


def evaluated(inputs: Path) -> Sections:
    return {"data": {"test": str(inputs / "test.jsonl")}}


def saved(_: Path, order: str = "prompt", **schedule: Any) -> Sections:
    return {
        "schedule": {
            "iterations": ITERATIONS,
            "prompts_per_iteration": GROUPS,
            "order": order,
            **schedule,
        },
        "checkpoint": {"every": SAVED},
    }


def often_wrong(inputs: Path, **schedule: Any) -> Sections:
    """About two of five groups of stand-in responses are all wrong: with dynamic sampling an
    iteration takes 20 prompts of 40.
    """
    return {
        **saved(inputs, **schedule),
        "reward": {"functions": [{"name": "format", "pattern": "t77|t78"}]},
    }


def with_skips(inputs: Path) -> Sections:
    return {
        **often_wrong(inputs, dynamic_sampling=True, max_staleness=STALENESS),
        "publish": {"divergence": 0.1},
    }


def delayed(inputs: Path) -> Sections:
    return {
        **saved(inputs, max_staleness=1),
        "rollout": {"max_response_tokens": 64},
        "publish": {"mode": "delayed"},
    }


def of_datasets(inputs: Path, order: str) -> Sections:
    train = [
        {"path": str(inputs / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("many", 1), ("few", 2))
    ]
    return {
        **saved(inputs, order),
        "data": {"train": train, "question_column": "q", "answer_column": "a.final"},
    }


def of_agents(directory: Path, killed: Path) -> Sections:
    """killed: a file; an agent that finds none makes it and is killed among its turns."""
    file = directory / "agent.py"
    file.write_text(AGENT)
    return {
        "environment": {"name": "agents", "max_turns": 2},
        "agent": {"command": shlex.join([sys.executable, str(file), str(killed)]), "programs": 1},
        "schedule": {"iterations": 1, "prompts_per_iteration": NUM_TASKS},
    }


def versions(groups: list[Group]) -> set[tuple[int, int]]:
    return {group.version_range for group in groups}


def asked_to_load(engines: list[Served], version: int) -> bool:
    return all(
        any(n == "pa_receive" and a[0] == version for n, a in served.engine.calls)
        for served in engines
    )


def play_two_iterations(run: Run) -> None:
    run.announce_weights()
    for version in range(3):
        report = {"loss": 0.5 * version, "train_s": 1.0, "wait_s": 0.01, "tokens_computed": 1234}
        if version:  # while the trainers still train
            run.wait_until(
                partial(asked_to_load, run.engines, version), "engines are asked to load"
            )
            assert not VERDICT.exists(run.channel, version=version, attempt=0), (
                "which the trainers have not sent"
            )
        done = run.publish(version, **report)
        assert done["done"] and (done["epoch"], done["workers"]) == (0, 2), (
            "the same two engines, every time"
        )
        if version == 1:
            assert done["probe"] is None, "the iteration's first groups are the probe"
        else:
            assert [len(response["tokens"]) for response in done["probe"]["responses"]] == [
                5
            ] * MIN_RESPONSES
        if version < 2:
            run.consume(version)
    run.finish()


def everything_is_recorded(run: Run) -> None:
    for iteration, groups in run.trained.items():
        assert {(group.iteration, *group.version_range) for group in groups} == {
            (iteration,) * 3
        }, "I1"
        assert len(groups) == GROUPS and all(group.num_samples == RESPONSES for group in groups)
    prompt_ids = [group.prompt_id for groups in run.trained.values() for group in groups]
    assert len(set(prompt_ids)) == 2 * GROUPS, "40 prompts hold two iterations without repetition"

    # sampling parameters and seeds arrived; engines were asked in protocol order and share the load
    assert run.sampled == {group_seed(3, i, g) for i in range(2) for g in range(GROUPS)}
    for number, served in enumerate(run.engines):
        calls = run.calls(number)
        assert [name for name, _ in calls] == ["pa_connect", *(["pa_receive"] * 3)]
        (groups,) = calls[0][1]
        assert groups["store"] == ["127.0.0.1", run.server.port] and groups["backend"] == "gloo"
        assert (groups["first_rank"], groups["world_size"]) == (1 + number, 3)
        assert groups["stages"] == [{"name": "publish-0/0/group", "manifest": {}}]
        assert served.engine.identity.version == 2 and served.engine.prefix_resets == 3

    records = run.lines("metrics.jsonl")
    assert [(record["iteration"], record["version"]) for record in records] == [(0, 0), (1, 1)]
    for record, groups, version in zip(records, run.trained.values(), (1, 2), strict=True):
        tokens = sum(group.num_trained for group in groups)
        assert record["loss"] == 0.5 * version and record["train_s"] == 1.0, (
            "the report of this iteration"
        )
        assert record["trainer_idle"] == pytest.approx(0.01 / record["iteration_s"])
        assert record["tokens_response"] == tokens and record["groups"] == GROUPS
        assert record["tokens_prompt"] == RESPONSES * sum(
            len(prompt_tokens(group)) for group in groups
        )
        assert record["tokens_computed"] == 1234, "the trainers know what they computed"
        assert record["devices"] == 4 and record["window"] == 8
        assert record["tpspd"] == pytest.approx(
            (tokens + record["tokens_prompt"]) / record["iteration_s"] / 4
        )
        assert record["reward_mean"] == pytest.approx(
            sum(group.rewards.sum() for group in groups) / GROUPS / RESPONSES
        )
        assert 0 <= record["engine_idle"] <= 1 and 0 < record["generate_s"] <= record["iteration_s"]
        requests = [engine["requests"] for engine in record["engines"].values()]
        assert sum(requests) >= GROUPS and min(requests) >= GROUPS // 4, (
            f"both engines work: {requests}"
        )
    evaluations = run.lines("evaluations.jsonl")
    assert [(evaluation["version"], evaluation["questions"]) for evaluation in evaluations] == [
        (0, 6),
        (2, 6),
    ]
    assert records[0]["eval_accuracy"] == evaluations[0]["accuracy"]
    samples = run.lines("samples.jsonl")
    assert [(sample["iteration"], sample["index"]) for sample in samples] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    progress = [line for line in run.output.splitlines() if line.startswith("| iteration")]
    assert len(progress) == 2 and "1/2" in progress[0] and "2/2" in progress[1]


def some_groups_are_replaced(run: Run) -> None:
    dispatched = [run.records[i]["groups_dispatched"] for i in range(ITERATIONS)]
    assert all(count > GROUPS for count in dispatched), (
        "some groups were replaced in every iteration"
    )
    for groups in run.trained.values():
        assert len(groups) == GROUPS and all(
            len(set(group.rewards.tolist())) > 1 for group in groups
        )


def prompts_go_on(run: Run) -> None:
    some_groups_are_replaced(run)
    dispatched = [run.records[i]["groups_dispatched"] for i in range(ITERATIONS)]
    positions = {version: state["position"] for version, state in run.states.items()}
    assert positions == {v: sum(dispatched[:v]) for v in range(1, ITERATIONS + 1)}
    assert positions[ITERATIONS] > 40, "the prompts went into their second epoch"
    prompts = [group.prompt_id for _, groups in sorted(run.trained.items()) for group in groups]
    assert prompts[: SAVED * GROUPS] != prompts[SAVED * GROUPS : 2 * SAVED * GROUPS]


def datasets_have_their_weights(run: Run) -> None:
    asked: list[int] = []
    for iteration, groups in run.trained.items():
        sources = run.records[iteration]["sources"]
        assert [sources[name]["prompts"] for name in ("many", "few")] == [
            GROUPS // 3,
            2 * GROUPS // 3,
        ]
        assert sources["few"]["share"] == pytest.approx(2 / 3)
        own = [float((group.rewards > 0).mean()) for group in groups if group.prompt_id >= 40]
        assert sources["few"]["accuracy"] == pytest.approx(sum(own) / len(own))
        asked += [group.prompt_id for group in groups]
    assert len(asked) > len(set(asked)), "later epochs came"


def iterations_come_from_the_version_that_the_rule_names(run: Run) -> None:
    some_groups_are_replaced(run)
    for iteration, groups in run.trained.items():
        assert versions(groups) == {(max(0, iteration - STALENESS),) * 2}, (
            f"I1: who generated iteration {iteration}"
        )


def engines_keep_a_version_that_is_not_skipped(run: Run) -> None:
    """One iteration ahead: 0 and 1 are generated at the border of version 0, 2 at that of version
    1, which keeps 0, and so on.
    """
    generated = [versions(groups) for _, groups in sorted(run.trained.items())]
    assert generated == [{(0, 0)}, {(0, 0)}, {(0, 0)}, {(2, 2)}, {(2, 2)}]
    assert set(run.verdicts) == {0, 2, 4, 5}
    for done in run.verdicts.values():
        assert len(done["probe"]["responses"]) == RESPONSES, "two engines, four responses"


def updates_have_their_tokens(run: Run) -> None:
    """One iteration ahead, and a group may be carried for one update."""
    generated = sum(record["groups_dispatched"] for record in run.records.values())
    assert sum(map(len, run.trained.values())) == generated, "I2: none is lost"
    ages = set()
    for iteration, groups in run.trained.items():
        ages |= {iteration - version for group in groups for version in group.version_range}
        assert (
            sum(group.num_trained for group in groups) == run.records[iteration]["tokens_response"]
        )
        if iteration < ITERATIONS - 1:
            without = sum(group.num_trained for group in groups[:-REPLICAS])
            assert without < BUDGET, "no more groups than the budget asks for, one for each replica"
    assert ages == {0, 1, 2}, "the first by their own version, then one ahead, and carried ones"
    assert len({len(groups) for groups in run.trained.values()}) > 1


def sessions_are_trained(run: Run) -> None:
    (groups,) = run.trained.values()
    assert len(groups) == NUM_TASKS and not (run.dir / GATEWAY_FILE).exists()
    assert any(len(group.runs[0]) > group.num_samples for group in groups), (
        "two turns in one sample"
    )
    assert any(len(set(group.rewards.tolist())) > 1 for group in groups)
    for group in groups:
        # an answer that ended by itself is no text to go on from: that session has two branches
        assert RESPONSES <= group.num_samples <= 2 * RESPONSES
        assert set(group.versions[group.trained].tolist()) == {0}, "one version per session"


def overlapping(run: Run) -> set[int]:
    """Versions that wrote before the one before them had written everything."""
    return {
        new["version"]
        for new in run.requests
        if any(
            old["version"] < new["version"] and old["end_s"] > new["begin_s"]
            for old in run.requests
        )
    }


def play_with_a_slower_engine(run: Run) -> None:
    run.engines[-1].engine.speed = LAST
    run.play()


def no_version_overlaps(run: Run) -> None:
    assert not overlapping(run), "negative control: engines swap together"


def sessions_of_nobody_killed(inputs: Path) -> Sections:
    return of_agents(inputs, killed=inputs)


CONFIGURATIONS = {
    "synchronous": Configuration(
        evaluated, play_two_iterations, everything_is_recorded, speed=QUICK
    ),
    "agents": Configuration(
        sessions_of_nobody_killed, holds=sessions_are_trained, engines=1, speed=QUICK
    ),
    **{
        f"dynamic-{order}": Configuration(
            partial(often_wrong, order=order, dynamic_sampling=True), holds=prompts_go_on
        )
        for order in ("prompt", "completion")
    },
    **{
        f"datasets-{order}": Configuration(
            partial(of_datasets, order=order), holds=datasets_have_their_weights
        )
        for order in ("prompt", "completion")
    },
    "ahead": Configuration(
        partial(often_wrong, dynamic_sampling=True, max_staleness=STALENESS),
        holds=iterations_come_from_the_version_that_the_rule_names,
    ),
    "skipped": Configuration(
        with_skips, partial(Run.play, skipped=SKIPPED), engines_keep_a_version_that_is_not_skipped
    ),
    "budget": Configuration(
        partial(often_wrong, max_staleness=STALENESS, tokens_per_update=BUDGET),
        holds=updates_have_their_tokens,
    ),
    "delayed": Configuration(
        delayed, play_with_a_slower_engine, no_version_overlaps, engines=3, speed=QUICK
    ),
}
