"""The iterator yields each group's microbatches once, in slot order, and stops at the first broken invariant."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.algorithm.advantages import group_advantages
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.control.messages import Dispatched, DispatchedGroup
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.samples.columns import NONE, GroupFormatError, RunColumns
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.replica_feed import ReplicaLinks
from pa_npu.samples.rollout_buffer import RolloutBuffer
from pa_npu.samples.wire import from_bytes, to_bytes
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.algorithms import algorithm_of
from tools.groups import group_of_responses


def group(index: int, iteration: int = 2, responses: int = 4) -> Group:
    return group_of_responses(
        iteration=iteration,
        version=iteration,
        index=index,
        prompt_id=index,
        prompt_tokens=np.array([1, 2], np.int32),
        response_tokens=np.full(responses, 100 + index, dtype=np.int32),
        response_lengths=np.ones(responses, dtype=np.int32),
        logprobs=np.zeros(responses, np.float32),
        rewards=np.zeros(responses, np.float32),
        advantages=np.arange(responses, dtype=np.float32),
        finished=np.ones(responses, np.uint8),
    )


def of_version(group: Group, version: int) -> Group:
    return replace(group, versions=np.where(group.trained, version, -1).astype(np.int32))


class MemoryBuffer:
    """A RolloutBuffer in memory; a slot that is missing is a deadline that has passed. late_s:
    until a slot is there.
    """

    readers, head_bytes, columns = 1, 0, NONE

    def __init__(self, groups: list[Group], replica: int = 0, late_s: float = 0.0) -> None:
        self.slots = {(2, replica, slot): to_bytes(member) for slot, member in enumerate(groups)}
        self.finished: list[int] = []
        self._late_s = late_s

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        is_there = self.ready(iteration, replica, slot)
        time.sleep(self._late_s if is_there else min(timeout_s, 0.05))
        if not is_there:
            raise DeadlineExceeded(f"slot {slot}: {timeout_s}")
        return self._late_s

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        return (iteration, replica, slot) in self.slots

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        return self.slots[iteration, replica, slot]

    def done(self, iteration: int, replica: int, slot: int) -> None:
        self.finished.append(slot)


def iterator(buffer: RolloutBuffer, **changes: Any) -> MicrobatchIterator:
    arguments: dict[str, Any] = {
        "replica": 0,
        "num_replicas": 1,
        "iteration": 2,
        "groups": 3,
        "order": "completion",
        "responses_per_microbatch": 2,
        "shared_prompt": True,
        "pad_multiple": 1,
        "timeout_s": 1.0,
    }
    return MicrobatchIterator(buffer, **{**arguments, **changes})


def test_of_a_divided_group_each_replica_trains_its_samples_with_all_advantages_checked() -> None:
    rewards = np.arange(4, dtype=np.float32)
    whole = replace(group(4), rewards=rewards)
    values = group_advantages(rewards, "group-std")
    whole = replace(
        whole,
        advantages=np.where(whole.trained, np.repeat(values, whole.lengths), 0).astype(np.float32),
    )
    actual = []
    for part in ((0, 3), (3, 4)):
        microbatches = iterator(
            MemoryBuffer([replace(whole, part=part)]),
            groups=1,
            algorithm=algorithm_of(AlgorithmConfig()),
        )
        actual += [source for microbatch in microbatches for source in microbatch.sources]
        microbatches.finish()
        of_samples = [np.unique(tokens).tolist() for tokens in microbatches.advantages[4]]
        assert of_samples == [[value] for value in values.tolist()], "of the whole group"
    assert actual == [(4, 0), (4, 1), (4, 2), (4, 3)]
    spoilt = replace(whole, part=(3, 4), rewards=rewards[::-1].copy())
    with pytest.raises(InvariantViolation, match="I7 gradient"):
        next(iterator(MemoryBuffer([spoilt]), groups=1, algorithm=algorithm_of(AlgorithmConfig())))


@pytest.mark.parametrize("part", [(0, 0), (2, 5), (3, 1), (-1, 2)])
def test_a_part_that_is_none_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(GroupFormatError, match=r"part: .* are no samples of 4"):
        replace(group(4), part=part)
    sent = replace(group(4), part=(1, 3))
    assert (
        from_bytes(to_bytes(sent)).part == (1, 3)
        and from_bytes(to_bytes(sent))[slice(2)].part is None
    )


def test_groups_come_in_slot_order_each_cut_into_its_microbatches(tmp_path: Path) -> None:
    buffer = MemoryBuffer([group(4), group(0), group(2)], late_s=0.2)
    with Timeline.for_run(tmp_path, "trainer") as timeline:
        microbatches = iterator(buffer, timeline=timeline)
        actual = [(m.group_indices, m.advantages.tolist()) for m in microbatches]
    assert actual == [
        ((index,), advantages) for index in (4, 0, 2) for advantages in ([0.0, 1.0], [2.0, 3.0])
    ]
    microbatches.finish()
    assert microbatches.indices == (4, 0, 2)
    assert 0.5 < microbatches.waited_s < 60.0
    assert buffer.finished == [0, 1, 2], "every slot must be marked done once"
    waits = [
        json.loads(line)
        for line in (tmp_path / "timeline" / "trainer.jsonl").read_text().splitlines()[1:]
    ]
    assert [wait["args"]["slot"] for wait in waits] == [0, 1, 2]
    assert sum(wait["end"] - wait["start"] for wait in waits) == pytest.approx(
        microbatches.waited_s, abs=0.01
    )


def test_groups_are_parsed_by_a_thread_beside_training_and_none_is_given_back_before_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    parsed = threading.Semaphore(0)

    def parse(data: bytes, columns: RunColumns) -> Group:
        threads.append(threading.current_thread().name)
        parsed.release()
        return from_bytes(data, columns)

    monkeypatch.setattr("pa_npu.samples.iterator.from_bytes", parse)
    buffer = MemoryBuffer([group(4), group(0), group(2)])
    microbatches = iterator(buffer)
    actual = []
    for _ in range(2):
        assert parsed.acquire(timeout=30.0), "the first two are parsed before training asks for any"
    for microbatch in microbatches:
        actual.append((microbatch.group_indices, buffer.finished[:], microbatches.is_last))
    microbatches.finish()
    assert actual == [
        *[((4,), [0], False)] * 2,
        *[((0,), [0, 1], False)] * 2,
        ((2,), [0, 1, 2], False),
        ((2,), [0, 1, 2], True),
    ]
    assert set(threads) == {"groups of iteration 2"} and len(threads) == 3


def test_what_is_wrong_with_a_group_that_was_parsed_ahead_shows_at_its_own_turn() -> None:
    buffer = MemoryBuffer([group(0), of_version(group(1), 1)])
    microbatches = iterator(buffer)
    next(microbatches), next(microbatches)
    with pytest.raises(InvariantViolation, match="I1 version: group 1"):
        next(microbatches)
    damaged = MemoryBuffer([group(0), group(1)])
    damaged.slots[2, 0, 1] = damaged.slots[2, 0, 1][:-1] + b"x"
    microbatches = iterator(damaged)
    next(microbatches), next(microbatches)
    with pytest.raises(GroupFormatError):
        next(microbatches)


def test_groups_are_taken_one_at_a_time_as_the_schedule_asks() -> None:
    buffer = MemoryBuffer([group(0)])
    microbatches = iterator(buffer)
    next(microbatches), next(microbatches)
    with pytest.raises(DeadlineExceeded, match="slot 1"):
        next(microbatches)


@pytest.fixture(params=["a rank alone", "a replica of ranks"])
def links(request: pytest.FixtureRequest) -> Iterator[ReplicaLinks | None]:
    if request.param == "a rank alone":
        yield None
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ReplicaLinks(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_group_that_was_put_and_is_not_there_is_named_long_before_the_deadline(
    links: ReplicaLinks | None,
) -> None:
    output = Dispatched(
        2, tuple(DispatchedGroup(index, index % 2, (1, 1, 1, 1)) for index in range(6))
    )
    reported: list[Dispatched] = []
    buffer = MemoryBuffer([group(0), group(4)])
    microbatches = iterator(
        buffer,
        num_replicas=2,
        timeout_s=60.0,
        links=links,
        dispatched=lambda: reported[-1] if reported else None,
    )
    for _ in range(4):
        next(microbatches)
    threading.Timer(0.3, reported.append, [output]).start()
    start_s = time.monotonic()
    named = (
        r"I2 .* slot 2 of replica 0 in iteration 2 is empty.* all 6 groups.* lost is one of "
        r"the groups 2;"
    )
    with pytest.raises(InvariantViolation, match=named):
        next(microbatches)
    assert time.monotonic() - start_s < 50.0


def test_a_microbatch_left_over_or_never_asked_for_is_reported() -> None:
    microbatches = iterator(MemoryBuffer([group(0), group(1), group(2)]))
    for _ in range(3):
        next(microbatches)
    with pytest.raises(
        InvariantViolation, match=r"I2 .* trained 2 of 3 groups of iteration 2, 1 microbatches"
    ):
        microbatches.finish()


BROKEN: list[tuple[Callable[[], list[Group]], dict[str, Any], str]] = [
    (
        lambda: [of_version(group(0), 1)],
        {},
        r"I1 version: group 0 of iteration 2 .* generated by weight version 1, but version 2 is "
        r"trained",
    ),
    (
        lambda: [replace(group(0), iteration=3)],
        {},
        "I2 exactly once: .* dispatched for another iteration",
    ),
    (lambda: [group(0), group(0)], {}, "I2 exactly once: group 0 .* already trained from slot 0"),
    (lambda: [group(1)], {"order": "prompt"}, "I2 exactly once: group 1 .* puts group 0"),
    (
        lambda: [group(1), group(2)],
        {"order": "prompt", "num_replicas": 2, "replica": 1},
        "group 2 .* puts group 3",
    ),
]


@pytest.mark.parametrize(("groups", "changes", "message"), BROKEN)
def test_a_broken_invariant_stops_the_run_naming_the_group(
    groups: Callable[[], list[Group]], changes: dict[str, Any], message: str
) -> None:
    buffer = MemoryBuffer(groups(), replica=changes.get("replica", 0))
    with pytest.raises(InvariantViolation, match=message):
        list(iterator(buffer, **changes))


def test_order_prompt_accepts_exactly_the_assignment_by_index() -> None:
    buffer = MemoryBuffer([group(1), group(3), group(5)], replica=1)
    microbatches = iterator(buffer, order="prompt", num_replicas=2, replica=1)
    assert len(list(microbatches)) == 6
    microbatches.finish()


def test_damaged_bytes_stop_the_run() -> None:
    buffer = MemoryBuffer([group(0)])
    buffer.slots[2, 0, 0] = buffer.slots[2, 0, 0][:-1]
    with pytest.raises(GroupFormatError):
        next(iterator(buffer))
