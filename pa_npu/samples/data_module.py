"""DataModule: samples by columns, with readiness per column and per consuming task; the streaming data module of AsyncFlow.

    row    prompt  tokens  logprobs  rewards        task "loss" (tokens, logprobs, rewards)     has taken 7
     7       x       x        x         x           task "stage" (tokens)                       has taken 7, may take 8
     8       x       x
     9       x

Whoever makes a column writes it when it is there. A task names the columns that it needs, gets each row once, as soon as these are
there, and fetches those columns and no others. Which ready rows it gets is its policy:

    order     by row number
    age       the oldest first: the smallest `age` that was written, e.g. a weight version
    balanced  among several consumers, each asking for itself: who has had less work so far gets the largest, others the smallest,
              work being the `cost` that was written, e.g. FLOPs

This object is the metadata, in one process, on the head. Payloads lie in shards, which may be on other nodes (`Shard`): a row's are
all in one. A row that is complete and that every task has fetched is dropped. AsyncFlow: arXiv 2507.01663, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from safetensors.numpy import load, save

from pa_npu.control.channel import StoreChannel, StoreError
from pa_npu.errors import PaNpuError

Policy = Literal["order", "age", "balanced"]
Row = int | str
Cells = Mapping[str, np.ndarray]


class DataModuleError(PaNpuError):
    """A cell was written twice, or a row, column or task is not known."""


@dataclass(frozen=True)
class Task:
    """columns: what it needs of a row. Rows that were dropped before it was added are not its."""

    name: str
    columns: tuple[str, ...]
    policy: Policy = "order"


class Shard(Protocol):
    """Payload of some rows, by row and column. What is put is there for everybody who asks when `put` returns."""

    def put(self, row: Row, cells: Cells) -> None: ...

    def get(self, row: Row, columns: Sequence[str]) -> dict[str, np.ndarray]: ...

    def drop(self, row: Row, columns: Iterable[str]) -> None: ...


class MemoryShard:
    """In this process."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Row, str], np.ndarray] = {}

    def put(self, row: Row, cells: Cells) -> None:
        self._cells |= {(row, column): value for column, value in cells.items()}

    def get(self, row: Row, columns: Sequence[str]) -> dict[str, np.ndarray]:
        return {column: self._cells[row, column] for column in columns}

    def drop(self, row: Row, columns: Iterable[str]) -> None:
        for column in columns:
            self._cells.pop((row, column), None)


class StoreShard:
    """In a c10d store, of another node for one, which this process is a client of."""

    def __init__(self, channel: StoreChannel) -> None:
        self._channel = channel

    def put(self, row: Row, cells: Cells) -> None:
        for column, value in cells.items():
            self._channel.put_bytes(f"{row}/{column}", save({column: np.ascontiguousarray(value)}))
        # a store answers no put; what it is asked after the last one, it answers when it has them all
        if not all(self._channel.exists(f"{row}/{column}") for column in tuple(cells)[-1:]):
            raise StoreError(f"{row}: its columns {list(cells)} did not stay where they were put")

    def get(self, row: Row, columns: Sequence[str]) -> dict[str, np.ndarray]:
        return {column: load(self._channel.get_bytes(f"{row}/{column}"))[column] for column in columns}

    def drop(self, row: Row, columns: Iterable[str]) -> None:
        for column in columns:
            self._channel.delete(f"{row}/{column}")


@dataclass
class _Row:
    shard: int
    columns: set[str] = field(default_factory=set)
    cost: float = 0.0
    age: float = 0.0


@dataclass
class _Consumption:
    """The groups that a task has taken. work: by consumer."""

    task: Task
    taken: set[int] = field(default_factory=set)
    fetched: set[int] = field(default_factory=set)
    work: dict[int, float] = field(default_factory=dict)


class DataModule:
    """columns: all that rows may have. shards: where payloads go, rows by turns unless told."""

    def __init__(self, columns: Sequence[str], shards: Sequence[Shard] = ()) -> None:
        self._columns = frozenset(columns)
        self._shards: list[Shard] = list(shards) or [MemoryShard()]
        self._rows: dict[int, _Row] = {}
        self._tasks: dict[str, _Consumption] = {}

    def add_task(self, task: Task) -> None:
        """From now on. Raises DataModuleError where it is there with other columns or another policy."""
        if unknown := sorted(set(task.columns) - self._columns):
            raise DataModuleError(f"task {task.name}: columns {unknown} are unknown; there are {sorted(self._columns)}")
        known = self._tasks.setdefault(task.name, _Consumption(task)).task
        if known != task:
            raise DataModuleError(
                f"task {task.name} takes {list(known.columns)} by {known.policy} already; give another set another name"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def write(
        self, row: int, cells: Cells, *, shard: int | None = None, cost: float | None = None, age: float | None = None
    ) -> None:
        """Further columns of a row, readable when this returns. Raises DataModuleError for a cell that is there.

        shard: of a new row. cost, age: for policies, of the row.
        """
        found = self._rows.setdefault(row, _Row(row % len(self._shards) if shard is None else shard))
        if wrong := sorted((set(cells) & found.columns) | (set(cells) - self._columns)):
            raise DataModuleError(f"row {row}: {wrong} cannot be written, as they are there or unknown")
        self._shards[found.shard].put(row, cells)
        found.columns |= set(cells)
        found.cost = found.cost if cost is None else cost
        found.age = found.age if age is None else age
        self._drop_if_done(row)

    def ready(self, task: str) -> list[int]:
        """Rows that the task may take now."""
        state = self._state(task)
        wanted = set(state.task.columns)
        return sorted(row for row, found in self._rows.items() if row not in state.taken and wanted <= found.columns)

    def take(self, task: str, most: int, consumer: int = 0) -> list[int]:
        """Up to `most` ready rows, none of which the task gets again. consumer: who of its several asks."""
        state, rows = self._state(task), self.ready(task)
        if state.task.policy == "age":
            rows.sort(key=lambda row: (self._rows[row].age, row))
        taken: list[int] = []
        work = state.work.setdefault(consumer, 0.0)
        while rows and len(taken) < most:
            if state.task.policy == "balanced":
                behind = work <= min(state.work.values())
                row = (max if behind else min)(rows, key=lambda row: self._rows[row].cost)
                rows.remove(row)
            else:
                row = rows.pop(0)
            taken.append(row)
            work += self._rows[row].cost
            state.work[consumer] = work
        state.taken |= set(taken)
        return taken

    def fetch(self, task: str, rows: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """The task's columns of rows that it has taken; from their shards, which are asked for nothing else."""
        state = self._state(task)
        if strange := [row for row in rows if row not in state.taken or row not in self._rows]:
            raise DataModuleError(f"task {task}: rows {strange} are not taken by it, or dropped")
        found = [self._shards[self._rows[row].shard].get(row, state.task.columns) for row in rows]
        state.fetched |= set(rows)
        for row in rows:
            self._drop_if_done(row)
        return found

    def _drop_if_done(self, row: int) -> None:
        """Not before it is complete: what is written of a row that is gone would make it anew."""
        fetched = self._tasks and all(row in state.fetched for state in self._tasks.values())
        if fetched and self._rows[row].columns == self._columns:
            self.drop(row)

    def drop(self, row: int) -> None:
        """Forget a row, whoever has or has not taken it."""
        found = self._rows.pop(row)
        self._shards[found.shard].drop(row, found.columns)
        for state in self._tasks.values():
            state.taken.discard(row)
            state.fetched.discard(row)

    @property
    def rows(self) -> list[int]:
        """All that are there, in order."""
        return sorted(self._rows)

    def state(self) -> dict[str, Any]:
        """For people."""
        return {"rows": len(self._rows), "ready": {name: len(self.ready(name)) for name in self._tasks}}

    def _state(self, task: str) -> _Consumption:
        if task not in self._tasks:
            raise DataModuleError(f"task {task} is unknown; there are {sorted(self._tasks)}")
        return self._tasks[task]
