"""Dynamic sampling trains the first informative groups of the order of dispatch, and ends a run at its limit."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from pa_npu.config.schema import Config
from pa_npu.coordinator import updates
from pa_npu.coordinator.delivery import Produced
from pa_npu.errors import UserError
from pa_npu.samples.seeds import group_seed
from tests.helpers.scripted_production import (
    RESPONSES,
    ScriptedEngine,
    ScriptedRewards,
    Shelf,
    dynamic,
    informative,
    make_producer,
    prompts,
)

# a dispatcher that waits for room has the deadlines of a run, which are longer
pytestmark = pytest.mark.timeout(60)


async def produce_dynamic(
    chosen: Config, order: list[int], store_thread: ThreadPoolExecutor
) -> tuple[Produced, Shelf, ScriptedEngine, int]:
    """Rewards (index * i) % 3 make every third group uninformative, from 0.

    Returns also the number of further prompts.
    """
    shelf = Shelf()
    engine = ScriptedEngine("a", order)
    further = iter(prompts()[4:])
    producer = make_producer(chosen, [engine], ScriptedRewards(), shelf, store_thread)
    production = await producer.produce(5, prompts()[:4], informative(chosen, further))
    return production, shelf, engine, 4 - len(list(further))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 4, 0, 5, 2, 1], [0, 4, 3, 5, 1, 2]])
async def test_dynamic_sampling_trains_the_first_informative_groups_of_dispatch_order(
    store_thread, order, stream
):
    production, shelf, engine, further = await produce_dynamic(
        dynamic(stream=stream), order, store_thread
    )
    assert {key: (g.index, g.prompt_id) for key, g in shelf.groups.items()} == {
        (0, 0): (0, 101),
        (1, 0): (1, 102),
        (0, 1): (2, 104),
        (1, 1): (3, 105),
    }, "0 and 3 are uninformative; 4 and 5 take their places, whatever finishes first"
    assert sorted(engine.asked) == [(i, RESPONSES, group_seed(7, 5, i)) for i in range(6)]
    assert further == 2, "no prompt is taken that is not needed"
    numbers = production.numbers
    assert (numbers["groups"], numbers["groups_dispatched"]) == (4, 6)
    assert numbers["accuracy_dispatched"] == pytest.approx(numbers["accuracy"] * 4 / 6), (
        "the discarded ones were all wrong"
    )
    assert numbers["tokens_prompt"] == 4 * RESPONSES * 3, "throughput counts what is trained"
    assert [sample["prompt_id"] for sample in production.samples] == [101, 102]


async def test_dynamic_sampling_in_completion_order_trains_the_same_groups(store_thread):
    _, shelf, _, further = await produce_dynamic(
        dynamic(order="completion"), [3, 4, 0, 5, 2, 1], store_thread
    )
    assert {group.prompt_id for group in shelf.groups.values()} == {101, 102, 104, 105}
    assert {group.index for group in shelf.groups.values()} == set(range(4)) and further == 2


async def test_dynamic_sampling_ends_the_run_at_its_limit(store_thread, monkeypatch):
    monkeypatch.setattr(updates, "MOST_ITERATIONS", 1)
    message = (
        r"of \d groups [12] were all right or all wrong, and 4 dispatched ones cannot give 4 "
        r"informative ones; raise"
    )
    with pytest.raises(UserError, match=message):
        await asyncio.wait_for(produce_dynamic(dynamic(), [0, 1, 2, 3], store_thread), 5)
    assert len(asyncio.all_tasks()) == 1, "nothing is left in flight"
