"""The data module gives each task each row once, as soon as the task's own columns are there, by its policy and from its shard."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.control.channel import StoreChannel
from pa_npu.samples.data_module import DataModule, DataModuleError, MemoryShard, Row, StoreShard, Task

COLUMNS = ("prompt", "tokens", "logprobs", "rewards")
STAGE = Task("middle stage", ("tokens",))
LOSS = Task("loss", ("tokens", "logprobs", "rewards"))


def cell(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


class WatchedShard(MemoryShard):
    """asked: the columns of every fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []

    def get(self, row: Row, columns: Sequence[str]) -> dict[str, np.ndarray]:
        self.asked.append(tuple(columns))
        return super().get(row, columns)

    @property
    def cells(self) -> int:
        return len(self._cells)


def test_a_row_is_ready_for_a_task_when_the_tasks_own_columns_are_there_and_no_other_column_travels() -> None:
    shard = WatchedShard()
    module = DataModule(COLUMNS, [shard])
    for task in (STAGE, LOSS):
        module.add_task(task)
    module.write(7, {"prompt": cell(1)})
    assert module.ready("middle stage") == module.ready("loss") == []
    module.write(7, {"tokens": cell(1, 2, 3)})
    assert (module.ready("middle stage"), module.ready("loss")) == ([7], []), "before it is scored"
    assert module.take("middle stage", 4) == [7] and module.take("middle stage", 4) == [], "once"
    (found,) = module.fetch("middle stage", [7])
    assert found.keys() == {"tokens"} and found["tokens"].tolist() == [1, 2, 3]
    module.write(7, {"rewards": cell(0.5), "logprobs": cell(-1, -2, -3)})
    assert module.take("loss", 4) == [7]
    assert module.fetch("loss", [7])[0].keys() == set(LOSS.columns)
    assert shard.asked == [STAGE.columns, LOSS.columns]
    assert module.rows == [] and shard.cells == 0, "every task has it: nothing stays"


def test_payloads_lie_in_the_shard_of_their_row_which_may_be_a_store_elsewhere() -> None:
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
        for _ in range(2)
    ]
    empty = [store.num_keys() for store in stores]
    module = DataModule(STAGE.columns, [StoreShard(StoreChannel(store)) for store in stores])
    module.add_task(STAGE)
    values = {row: np.arange(row + 1, dtype=np.int32) for row in range(4)}
    for row, value in values.items():
        module.write(row, {"tokens": value}, shard=0 if row == 3 else None)
    assert [store.num_keys() - none for store, none in zip(stores, empty, strict=True)] == [3, 1], "0, 2, 3 and 1"
    for row, found in zip(taken := module.take("middle stage", 9), module.fetch("middle stage", taken), strict=True):
        assert found["tokens"].dtype == np.int32 and found["tokens"].tolist() == values[row].tolist()
    assert [store.num_keys() for store in stores] == empty


def test_policies_give_in_order_by_age_and_balanced_among_consumers() -> None:
    costs = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0]

    def filled(policy: str) -> DataModule:
        module = DataModule(COLUMNS)
        module.add_task(Task("t", ("tokens",), policy))  # type: ignore[arg-type]
        for row, cost in enumerate(costs):
            module.write(row, {"tokens": cell(row)}, cost=cost, age=-row)
        return module

    assert filled("order").take("t", 3) == [0, 1, 2]
    assert filled("age").take("t", 3) == [7, 6, 5]

    def imbalance(policy: str) -> float:
        module, work = filled(policy), [0.0, 0.0]
        for turn in range(len(costs)):
            (row,) = module.take("t", 1, consumer=turn % 2)
            work[turn % 2] += costs[row]
        return abs(work[0] - work[1])

    assert imbalance("order") == 20 and imbalance("balanced") <= 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_comes_in_whatever_order_no_row_is_lost_or_given_twice(data: st.DataObject) -> None:
    module = DataModule(COLUMNS)
    tasks = (STAGE, LOSS, Task("by cost", ("tokens", "rewards"), "balanced"))
    for task in tasks:
        module.add_task(task)
    pending = data.draw(st.permutations([(row, column) for row in range(5) for column in COLUMNS]))
    given: dict[str, list[int]] = {task.name: [] for task in tasks}
    for row, column in pending:
        module.write(row, {column: cell(row)}, cost=row)
        task = data.draw(st.sampled_from(tasks))
        taken = module.take(task.name, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1)))
        assert all(
            found["tokens"].tolist() == [r] for r, found in zip(taken, module.fetch(task.name, taken), strict=True)
        )
        given[task.name] += taken
    for task in tasks:
        taken = module.take(task.name, 9)
        module.fetch(task.name, taken)
        assert sorted(given[task.name] + taken) == list(range(5)), task.name
    assert module.rows == []


def test_what_cannot_be_is_one_line() -> None:
    module = DataModule(COLUMNS)
    module.add_task(STAGE)
    module.add_task(STAGE)  # again, as a consumer that comes back does
    module.write(0, {"tokens": cell(1)})
    for call, line in (
        (lambda: module.write(0, {"tokens": cell(1)}), r"row 0: \['tokens'\] cannot be written"),
        (lambda: module.write(0, {"colour": cell(1)}), "colour"),
        (lambda: module.add_task(Task("middle stage", ("prompt",))), "takes .* already"),
        (lambda: module.add_task(Task("other", ("colour",))), r"columns \['colour'\] are unknown"),
        (lambda: module.take("nobody", 1), "task nobody is unknown"),
        (lambda: module.fetch("middle stage", [0]), r"rows \[0\] are not taken"),
    ):
        with pytest.raises(DataModuleError, match=line):
            call()
    module.drop(0)
    assert module.take("middle stage", 1) == []
