"""A group leaves the coordinator with the number of the teacher that its row of data names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from pa_npu.samples.teachers import teacher_column
from tests.helpers.scripted_production import (
    GROUPS,
    ScriptedEngine,
    ScriptedRewards,
    Shelf,
    config,
    make_producer,
    prompts,
)

NAMES = ("math", "code")


async def test_a_group_has_the_number_of_its_rows_teacher() -> None:
    chosen = config(
        algorithm={"name": "distill"},
        data={"teacher_column": "task"},
        teacher={name: {"model": name} for name in NAMES},
    )
    rows = [
        replace(prompt, row={"task": NAMES[number % 3 % 2]})
        for number, prompt in enumerate(prompts())
    ]
    shelf = Shelf()
    engine = ScriptedEngine("a", list(range(GROUPS)))
    with ThreadPoolExecutor(1) as store_thread:
        producer = make_producer(chosen, [engine], ScriptedRewards(), shelf, store_thread)
        await producer.produce(5, rows)
    column = teacher_column(chosen)
    assert column is not None and len(shelf.groups) == GROUPS
    for group in shelf.groups.values():
        number = NAMES.index(rows[group.index].row["task"]) + 1
        assert np.array_equal(group.columns[column], np.where(group.trained, number, 0))
