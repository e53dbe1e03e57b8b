"""Runs of the coordinator that something disturbs train what the undisturbed run of their configuration does.

A row is a configuration, what happens to a run of it, and what has to be equal. An undisturbed run
is made once for all its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.control.freshness import iterations_ahead
from pa_npu.publish.messages import (
    BROKEN,
    LATE_ANSWER,
    LATE_DECISION,
    LATE_REQUEST,
    MEMBERS,
    LateAnswer,
    LateRequest,
    PublishBroken,
)
from pa_npu.samples.group import Group
from pa_npu.samples.wire import to_bytes
from tests.helpers.coordinator_configurations import (
    CONFIGURATIONS,
    ITERATIONS,
    QUICK,
    SAVED,
    SKIPPED,
    Sections,
    of_agents,
    overlapping,
    play_with_a_slower_engine,
    versions,
)
from tests.helpers.coordinator_run import FAST, GROUPS, REPLICAS, RESPONSES, Run, coordinator_run
from tests.helpers.stand_in_engine import Served
from tools.stand_in import Speed

pytestmark = pytest.mark.integration
# 24 tokens take at least 2.4 s, so groups are in flight when their engine dies
SLOW = Speed(step_s=0.1)
TO_DIE = Speed(step_s=0.03)
HANGS = Speed(step_s=1000.0)
SURELY_LEFT = 5  # steps of an engine that is to be stopped with something in flight


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Callable[[str], Run]:
    """The undisturbed run of a configuration, which is made once."""

    @cache
    def run_of(name: str) -> Run:
        one = CONFIGURATIONS[name]
        directory = tmp_path_factory.mktemp("undisturbed")
        with coordinator_run(
            directory, inputs, one.engines, one.speed, **one.sections(inputs)
        ) as run:
            one.play(run)
        return run

    return run_of


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_undisturbed_runs_are_what_their_configuration_says(
    name: str, undisturbed: Callable[[str], Run]
) -> None:
    run = undisturbed(name)
    assert set(run.trained) == set(range(run.config.schedule.iterations)) == set(run.records)
    CONFIGURATIONS[name].holds(run)


def content(groups: list[Group], *, placed: bool = False) -> list[tuple[Any, ...]]:
    """All that is trained, whatever the order of arrival. placed: and the groups' places, where
    they do not follow from it.
    """
    columns = ("tokens", "component", "logprobs", "versions", "rewards", "advantages", "lengths")
    return sorted(
        (
            group.prompt_id,
            group.index if placed else 0,
            *(getattr(group, name).tobytes() for name in columns),
        )
        for group in groups
    )


def bits(groups: list[Group]) -> list[bytes]:
    return [to_bytes(group) for group in groups]


PLACED = partial(content, placed=True)


def an_engine_dies(run: Run, _: Run) -> None:
    run.begin()
    run.wait_for_group()
    run.engines[0].stop()
    run.engines[1].engine.speed = FAST
    run.consume(0)
    assert run.roster.replacement_wanted(0, 0), "the launcher is asked for another"
    done = run.publish(1)
    assert (done["epoch"], done["workers"]) == (1, 1), (
        "the trainers publish to the one that is left"
    )
    connects = [args for name, args in run.calls(1) if name == "pa_connect"]
    assert [(groups["first_rank"], groups["world_size"]) for (groups,) in connects] == [
        (2, 3),
        (1, 2),
    ]
    names = [groups["stages"][0]["name"] for (groups,) in connects]
    assert names == ["publish-0/0/group", "publish-0/1/group"]


def the_only_engine_dies_and_its_successor_gets_the_weights_before_it_serves(
    run: Run, _: Run
) -> None:
    run.begin()
    run.wait_for_group()
    run.engines[0].stop()
    successor = run.engines[0].start_again(FAST)
    run.engines.append(successor)
    run.roster.renew(0, 1, run.roster.entries()[0].url)
    assert run.message(LATE_REQUEST, number=0) == LateRequest(version=0, workers=1)
    assert not successor.requests, "it holds no weights yet"
    LATE_ANSWER.put(run.channel, LateAnswer(True), number=0, rank=0)
    assert run.message(LATE_DECISION, number=0).held
    run.consume(0)
    calls = run.calls(1)
    assert [name for name, _ in calls] == ["pa_connect", "pa_receive"]
    assert calls[0][1][0]["stages"][0]["name"] == "late-0/0/group" and calls[1][1] == [0]


def an_engine_hangs_whose_health_page_answers(run: Run, _: Run) -> None:
    run.begin()
    run.wait_for_group(1)
    run.engines[1].engine.speed = HANGS
    run.consume(0)
    wanted = run.roster.replacement_wanted(1, 0)
    assert wanted and "did not generate a token when probed" in wanted


def the_trainers_break_a_publish_which_is_made_again(run: Run, _: Run) -> None:
    run.engines[0].engine.receive_s = 3600.0  # as if its worker had died inside the load
    run.announce_weights()
    run.announce(0, None)
    run.message(MEMBERS, version=0, attempt=0)
    BROKEN.put(run.channel, PublishBroken("the connection broke"), version=0, attempt=0)
    run.engines[0].engine.receive_s = 0.0
    first, second = run.published(0, 0), run.published(0, 1)
    assert not first["done"] and "the connection broke" in first["reason"]
    assert second["done"] and (second["epoch"], second["workers"]) == (1, 2)
    abandoned = dist.PrefixStore("publish-0/0", run.server)
    assert abandoned.check(["abandoned"]), "the workers that still wait are told"
    run.consume(0)


def an_engine_joins_at_a_publish_and_leaves_when_it_has_finished(run: Run, _: Run) -> None:
    joins = run.engines[1]
    assert run.begin()["workers"] == 1
    index = run.roster.announce(joins.url, restarts=False)
    run.consume(0)
    assert not joins.requests
    assert run.publish(1)["workers"] == 2
    run.consume(1)
    assert len([request for request in joins.requests if request["n"] == RESPONSES]) >= GROUPS // 4
    run.publish(2)
    run.roster.ask_leave(index)
    run.consume(2)
    run.wait_until(lambda: run.roster.has_left(index), "the engine has left")
    joins.stop()
    assert run.publish(3)["workers"] == 1
    run.consume(3)
    run.publish(4)
    run.finish()
    records = run.records.values()
    assert [record["devices"] for record in records] == [
        REPLICAS + engines for engines in (1, 2, 2, 1)
    ]
    assert [len(record["engines"]) for record in records] == [2, 2, 1, 1], (
        "those known at the end of the iteration"
    )


def an_agent_is_killed_and_begins_again(run: Run, _: Run) -> None:
    run.play()
    assert (run.directory / "killed").exists(), "nothing was killed"


def it_is_resumed(run: Run, whole: Run, skipped: frozenset[int] = frozenset()) -> None:
    """With another number and speed of engines, in another order of arrival."""
    run.play(SAVED, skipped)
    later = range(SAVED, ITERATIONS)
    assert set(run.trained) == set(later) == set(run.records)
    for iteration in later:
        assert run.states[iteration + 1] == whole.states[iteration + 1]
        ours, expected = run.records[iteration], whole.records[iteration]
        for key in ("reward_mean", "accuracy", "tokens_response", "groups", "groups_dispatched"):
            assert ours[key] == expected[key], (iteration, key)
        assert ours.get("sources") == expected.get("sources")
    assert run.sampled < whole.sampled, "the discarded groups are sampled alike too"
    generated = range(SAVED + iterations_ahead(run.config.schedule, run.config.publish), ITERATIONS)
    assert len(run.sampled) == sum(whole.records[i]["groups_dispatched"] for i in generated), (
        "what the checkpoint has is not generated again"
    )
    if run.config.schedule.order == "prompt":
        assert run.lines("samples.jsonl")[-1] == whole.lines("samples.jsonl")[-1], (
            "of a carried group too"
        )


def it_is_resumed_where_versions_are_skipped(run: Run, whole: Run) -> None:
    it_is_resumed(run, whole, SKIPPED)
    assert run.verdicts[SAVED]["probe"] == whole.verdicts[SAVED]["probe"], (
        "what decides about publishes does not depend on which engines serve"
    )


def it_is_resumed_with_another_staleness(run: Run, whole: Run) -> None:
    """The checkpoint of a run with k = 2 has iterations 2 and 3, by versions 0 and 1: no groups of
    a run with k = 1.
    """
    run.play(SAVED)
    assert {iteration: versions(groups) for iteration, groups in run.trained.items()} == {
        2: {(2, 2)},
        3: {(2, 2)},
        4: {(3, 3)},
    }
    # stand-ins sample by seed alone, so that the same prompts are chosen as of the whole run's
    # iteration
    first = [group.prompt_id for group in run.trained[SAVED]]
    assert first == [group.prompt_id for group in whole.trained[SAVED]]


def its_weights_arrive_beside_generation(run: Run, _: Run) -> None:
    run.play()
    calls = [call for number in range(2) for call in run.calls(number)]

    def versions_of(method: str) -> list[int]:
        return sorted({args[0] for name, args in calls if name == method})

    assert versions_of("pa_receive") == [0, ITERATIONS], (
        "at the border: the first, and the last, whose log-probs are compared"
    )
    assert versions_of("pa_prepare") == versions_of("pa_swap") == list(range(1, ITERATIONS))
    assert [name for name, _ in calls].count("pa_swap") == 2 * (ITERATIONS - 1), "both engines"
    assert all(run.records[i]["engine_still_s"] < 1.0 for i in range(ITERATIONS))
    assert [version for version, done in run.verdicts.items() if done["probe"]] == [0, ITERATIONS]


def its_engines_swap_one_by_one(run: Run, _: Run) -> None:
    play_with_a_slower_engine(run)
    for iteration, groups in run.trained.items():
        assert versions(groups) == {(max(0, iteration - 1),) * 2}, (
            "I1: by the version that the rule names"
        )
    rolled = overlapping(run)
    assert rolled and SAVED not in rolled, (
        "the iteration before has to be complete: it is in the checkpoint"
    )
    assert set(run.records) == set(range(ITERATIONS))
    assert all(record["engine_still_s"] < 1.0 for record in run.records.values())


def an_engine_dies_after_another_has_swapped(run: Run, _: Run) -> None:
    with killer(run, 1) as killed:
        run.play()
    assert len(killed) == 1 and "is lost" in run.output


def nobody_has_the_version_any_more(run: Run, _: Run) -> None:
    """The next version writes its groups."""
    with killer(run, 2) as killed:
        run.play()
    assert len(killed) == 2 and "no engine has weight version" in run.output
    for iteration, groups in run.trained.items():
        assert len(groups) == GROUPS
        oldest = max(0, iteration - 1)
        assert all(set(group.version_range) <= {oldest, iteration} for group in groups), (
            "I1: as old as k allows"
        )
    assert any(
        (iteration, iteration) in versions(groups)
        for iteration, groups in run.trained.items()
        if iteration
    )


@contextmanager
def killer(run: Run, number: int) -> Iterator[list[Served]]:
    """Stops so many engines, once one has swapped to a version for which they are not free yet;
    yields those it has stopped.
    """
    over, killed = threading.Event(), []
    for served in run.engines[-number:]:
        served.engine.speed = TO_DIE

    def watch() -> None:
        while not killed and not over.wait(0.002):
            held = [
                -1 if (v := served.engine.identity.version) is None else v for served in run.engines
            ]
            behind = [
                s for s, version in zip(run.engines, held, strict=True) if 0 <= version < max(held)
            ]
            at_work = [served for served in behind if served.left() >= SURELY_LEFT]
            if len(at_work) >= number:
                for served in at_work[:number]:
                    # what it has in flight will not end before it is stopped
                    served.engine.speed = HANGS
                for served in at_work[:number]:
                    served.stop()
                    killed.append(served)
        for served in run.engines:
            served.engine.speed = FAST

    thread = threading.Thread(target=watch, name="killer of engines", daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join(10)


@dataclass(frozen=True)
class Row:
    """play: the run, given the undisturbed one too. equal: of an iteration's groups, or None.
    changes: what of the configuration is other, given the undisturbed run and the run's own
    directory."""

    configuration: str
    play: Callable[[Run, Run], None]
    equal: Callable[[list[Group]], Any] | None
    changes: Callable[[Run, Path], Sections] = lambda whole, directory: {}
    engines: int = 2
    speed: Speed = FAST
    known: int | None = None

    def __str__(self) -> str:
        return f"{self.configuration}-{getattr(self.play, '__name__', '')}"


def resumed(
    configuration: str,
    equal: Callable[[list[Group]], Any] = bits,
    play: Callable[[Run, Run], None] = it_is_resumed,
) -> Row:
    slower = Speed(step_s=0.002, stride=8)
    return Row(
        configuration,
        play,
        equal,
        lambda whole, _: {"checkpoint": {"load": str(whole.checkpoint)}},
        1,
        slower,
    )


def changed(**sections: dict[str, Any]) -> Callable[[Run, Path], Sections]:
    return lambda whole, directory: sections


NOT_EVALUATED = changed(data={"test": None})
ROLLING = changed(publish={"mode": "rolling"})
ROWS = [
    Row("synchronous", an_engine_dies, PLACED, NOT_EVALUATED, speed=SLOW),
    Row(
        "synchronous",
        the_only_engine_dies_and_its_successor_gets_the_weights_before_it_serves,
        PLACED,
        NOT_EVALUATED,
        engines=1,
        speed=SLOW,
    ),
    Row(
        "synchronous",
        an_engine_hangs_whose_health_page_answers,
        PLACED,
        changed(data={"test": None}, rollout={"probe_timeout_s": 3.0, "request_timeout_s": 600}),
        speed=Speed(step_s=0.02, stride=4),
    ),
    Row(
        "synchronous",
        the_trainers_break_a_publish_which_is_made_again,
        PLACED,
        changed(data={"test": None}, publish={"timeout_s": 30, "probe_tokens": 0}),
    ),
    Row(
        "synchronous",
        an_engine_joins_at_a_publish_and_leaves_when_it_has_finished,
        PLACED,
        changed(data={"test": None}, schedule={"iterations": 4, "prompts_per_iteration": GROUPS}),
        speed=Speed(step_s=0.002, stride=4),
        known=1,
    ),
    Row(
        "agents",
        an_agent_is_killed_and_begins_again,
        PLACED,
        lambda _, directory: of_agents(directory, directory / "killed"),
        engines=1,
        speed=QUICK,
    ),
    resumed("dynamic-prompt"),
    resumed("dynamic-completion", content),
    resumed("datasets-prompt"),
    resumed("datasets-completion", content),
    resumed("ahead"),
    resumed("skipped", play=it_is_resumed_where_versions_are_skipped),
    resumed("budget"),
    replace(
        resumed("ahead", play=it_is_resumed_with_another_staleness),
        equal=None,
        changes=lambda whole, _: {
            "checkpoint": {"load": str(whole.checkpoint)},
            "schedule": {"max_staleness": 1},
        },
    ),
    Row("ahead", its_weights_arrive_beside_generation, bits, changed(publish={"mode": "delayed"})),
    Row("delayed", its_engines_swap_one_by_one, bits, ROLLING, 3, QUICK),
    Row("delayed", an_engine_dies_after_another_has_swapped, bits, ROLLING, 3, QUICK),
    Row("delayed", nobody_has_the_version_any_more, None, ROLLING, 3, QUICK),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_disturbed_run_trains_what_the_undisturbed_one_does(
    row: Row,
    undisturbed: Callable[[str], Run],
    start: Callable[..., Run],
    inputs: Path,
    tmp_path: Path,
) -> None:
    whole = undisturbed(row.configuration)
    sections, changes = (
        CONFIGURATIONS[row.configuration].sections(inputs),
        row.changes(whole, tmp_path),
    )
    for name, keys in changes.items():
        sections[name] = {**sections.get(name, {}), **keys}
    run = start(engines=row.engines, speed=row.speed, known=row.known, **sections)
    row.play(run, whole)
    both = sorted(run.trained.keys() & whole.trained.keys())
    assert both, "nothing to compare"
    for iteration in both:
        if row.equal is not None:
            assert row.equal(run.trained[iteration]) == row.equal(whole.trained[iteration]), (
                f"iteration {iteration}"
            )
