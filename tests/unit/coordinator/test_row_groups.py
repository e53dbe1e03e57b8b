"""Rows of data as a source of groups: every row once in an epoch, and the groups of the buffer as they were read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.rules import rules_of
from pa_npu.config.schema import Config
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.row_groups import RowGroups, sample_of
from pa_npu.data.row_sets import Row, RowSet
from pa_npu.data.row_stream import RowGroupStream
from pa_npu.data.stream import TrainingStream
from pa_npu.errors import DataError
from pa_npu.samples.columns import NO_VERSION
from pa_npu.samples.group import Group
from pa_npu.samples.wire import from_bytes, to_bytes

ROWS = 48
SIZE = 4
GROUPS = 4


class Shelf:
    """A rollout buffer that remembers what was put, and in which order."""

    readers = 1

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}

    def put(self, group: Group, replica: int, slot: int) -> None:
        assert (replica, slot) not in self.groups
        self.groups[replica, slot] = group


def config(**sections: dict[str, object]) -> Config:
    tree: dict[str, dict[str, object]] = {
        "run": {"seed": 7},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "algorithm": {"name": "sft"},
        "rollout": {"responses_per_prompt": SIZE, "max_response_tokens": 16},
        "trainer": {"devices": 2},
        "schedule": {"prompts_per_iteration": GROUPS},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def rows(seed: int = 0) -> list[Row]:
    """Of three beginnings in turn."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(ROWS):
        beginning = np.full(4, number % 3, np.int32)
        answer = rng.integers(10, 99, rng.integers(2, 9)).astype(np.int32)
        weight = np.concatenate([np.zeros(4), np.ones(len(answer))]).astype(np.float32)
        made.append(Row(number, np.concatenate([beginning, answer]), weight, "question", 4))
    return made


def stream_of(arguments: list[Row], keys: Config, seed: int = 1) -> RowGroupStream:
    loaded = RowSet("t", tuple(arguments), len(arguments), 0, 0, "")
    rows_of: TrainingStream[Any] = TrainingStream(keys.data, [loaded], seed)
    return RowGroupStream(rows_of, SIZE)


@pytest.fixture
def store_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_an_epoch_has_every_row_once_and_neighbours_begin_alike() -> None:
    keys = config()
    stream = stream_of(rows(), keys)
    taken = [group for _ in range(ROWS // (SIZE * GROUPS)) for group in stream.next_items(GROUPS)]
    assert all(len(group.rows) == SIZE for group in taken)
    numbers = sorted(row.row_id for group in taken for row in group.rows)
    assert numbers == list(range(ROWS))
    alike = sum(len(group.tokens) >= 4 for group in taken)
    # of 16 rows of three beginnings at most two groups of an iteration hold two of them
    assert alike >= len(taken) - 2 * (ROWS // (SIZE * GROUPS))
    assert stream.observe(()) == {"epoch": 1.0}


def test_a_stream_goes_on_where_its_state_was_asked_for() -> None:
    keys = config()
    first = stream_of(rows(), keys)
    second = stream_of(rows(), keys)
    first.next_items(GROUPS)
    second.restore(first.state())

    def taken(stream: RowGroupStream) -> list[list[int]]:
        return [[row.row_id for row in group.rows] for group in stream.next_items(GROUPS)]

    assert taken(first) == taken(second)
    changed = rows()
    changed[3].weight[5] = 0.5
    with pytest.raises(DataError, match=r"data\.train"):
        stream_of(changed, keys).restore(first.state())


async def test_groups_reach_the_buffer_as_they_were_read(store_thread: ThreadPoolExecutor) -> None:
    keys = config()
    shelf = Shelf()

    def work(prompt: int, responses: Any) -> float:
        return float(prompt + sum(responses))

    producer = Producer(
        config=keys,
        source=RowGroups(keys, work),
        buffer=shelf,  # type: ignore[arg-type]
        work=work,
        store_thread=store_thread,
    )
    prompts = stream_of(rows(), keys).next_items(GROUPS)
    produced = await producer.produce(2, list(prompts), version=2)
    assert set(shelf.groups) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    inputs = {group.index: group for group in shelf.groups.values()}
    for index, prompt in enumerate(prompts):
        group = inputs[index]
        back = from_bytes(to_bytes(group))
        for sequence, row in zip(back.sequences(), prompt.rows, strict=True):
            assert np.array_equal(sequence, row.tokens)
        assert (group.versions == NO_VERSION).all() and not group.advantages.any()
        assert group.num_trained == sum(row.num_trained for row in prompt.rows)
    numbers = produced.numbers
    assert numbers["rows"] == SIZE * GROUPS and numbers["groups"] == GROUPS
    assert not {"reward_mean", "accuracy", "window", "tail_waste"} & set(numbers)
    assert numbers["tokens_response"] == sum(group.num_trained for group in inputs.values())
    assert len(produced.dispatched.groups) == GROUPS
    assert "reward" not in produced.samples[0]["responses"][0]
    kept = produced.kept[0]
    assert [stretch.weight for stretch in kept.stretches] == [0.0, 1.0]
    assert [token for stretch in kept.stretches for token in stretch.tokens] == (
        prompts[0].rows[0].tokens.tolist()
    )


def test_weights_travel_where_one_is_not_1() -> None:
    row = rows()[0]
    assert sample_of(row).weight is None
    row.weight[5] = 0.5
    sample = sample_of(row)
    assert sample.weight is not None and sample.weight[5] == 0.5
    assert sample.weight[0] == 1 and sample.component[0] == 0, "what is not trained has 1"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"engines": 2}}, "rollout.engines: 2, but with algorithm.name=sft"),
        (
            {"algorithm": {"name": "grpo"}, "rollout": {"engines": 0}},
            "rollout.engines: 0, but with algorithm.name=grpo",
        ),
        ({"schedule": {"max_staleness": 1}}, "schedule.max_staleness: 1 would be read by nothing"),
        ({"environment": {"name": "tools"}}, "environment.name: tools would be read by nothing"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature: 0.5 would be read by nothing"),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef: 0.1 would be read by nothing"),
        (
            {"algorithm": {"name": None}, "schedule": {"epochs": 2.0}, "rollout": {"engines": 1}},
            "schedule.epochs: 2.0 would be read by nothing",
        ),
    ],
)
def test_keys_that_do_not_go_with_where_samples_come_from_are_refused(
    sections: dict[str, dict[str, object]], message: str
) -> None:
    assert next(rules_of(build_algorithm(config(**sections)))).startswith(message)
    assert not list(rules_of(build_algorithm(config()))), "control"
