"""The order of dispatch follows earlier responses, keeps engines busy and changes nothing that is trained."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.coordinator.features import IdleTailMeter
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.wire import to_bytes
from tests.helpers.scripted_production import (
    GROUPS,
    RESPONSES,
    ScriptedRewards,
    Shelf,
    config,
    dynamic,
    informative,
    make_producer,
    prompts,
)

# a dispatcher that waits for room has the deadlines of a run, which are longer
pytestmark = pytest.mark.timeout(60)


class Answers:
    """Answers at once, with lengths by prompt id; what it was asked is on a list that engines
    share.
    """

    def __init__(
        self, name: str, lengths: dict[int, int], asked: list[tuple[str, int, int, int]]
    ) -> None:
        self.name = name
        self._lengths = lengths
        self._asked = asked

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        index = int(prompt_tokens[0])
        self._asked.append((self.name, index, n, seed))
        # a response as a whole follows from its seed, as an engine's does
        length = min(self._lengths[index], sampling.max_tokens)
        return [
            Generation(
                np.full(length, (seed + i) % 1000, np.int32),
                np.full(length, -0.5, np.float32),
                f"{index}/{i}",
                "stop",
                version=0,
            )
            for i in range(n)
        ]

    async def close(self) -> None:
        pass


LENGTHS = dict(enumerate([3, 9, 1, 12, 5, 2, 15, 7]))
BY_LENGTH = [6, 3, 1, 7, 4, 0, 5, 2]


async def two_iterations(
    chosen: Config, store_thread: ThreadPoolExecutor, engines: int = 1
) -> tuple[list[tuple[str, int, int, int]], Shelf]:
    """Requests and groups of the second iteration, which knows the lengths of the first; one group
    in flight per engine.
    """
    asked: list[tuple[str, int, int, int]] = []
    shelf = Shelf()
    answering = [Answers(f"engine {number}", LENGTHS, asked) for number in range(engines)]
    producer = make_producer(
        chosen, answering, ScriptedRewards(), shelf, store_thread, window=RESPONSES
    )  # type: ignore[arg-type]
    await producer.produce(0, prompts())
    assert [index for _, index, _, _ in asked] == list(range(GROUPS)), "nothing is known at first"
    asked.clear()
    shelf.groups.clear()
    await producer.produce(1, prompts())
    return asked, shelf


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ({}, BY_LENGTH),
        ({"stream": False, "order": "prompt"}, BY_LENGTH),
        ({"dispatch": "longest-first", "order": "prompt"}, BY_LENGTH),
        ({"dispatch": "in-order"}, list(range(GROUPS))),
        ({"order": "prompt"}, list(range(GROUPS))),
        ({"updates_per_iteration": 2}, [3, 1, 0, 2, 6, 7, 4, 5]),
    ],
    ids=["auto", "auto-sync", "longest-first", "in-order", "auto-prompt", "each-step-by-itself"],
)
async def test_prompts_are_dispatched_by_what_their_earlier_responses_were(
    store_thread, schedule, expected
):
    asked, _ = await two_iterations(config(schedule=schedule), store_thread)
    assert [index for _, index, _, _ in asked] == expected


async def test_every_group_is_one_request_on_one_engine(store_thread):
    asked, _ = await two_iterations(config(), store_thread, engines=3)
    assert sorted((index, n) for _, index, n, _ in asked) == [
        (index, RESPONSES) for index in range(GROUPS)
    ]
    assert len({name for name, _, _, _ in asked}) > 1


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("stream", [True, False])
async def test_dispatch_order_changes_nothing_that_is_trained(store_thread, order, stream):
    """Same bytes in the same slots with order=prompt, the same groups with completion."""
    shelves = []
    for dispatch in ("in-order", "longest-first"):
        chosen = config(schedule={"order": order, "stream": stream, "dispatch": dispatch})
        asked, shelf = await two_iterations(chosen, store_thread)
        assert sorted((index, seed) for _, index, _, seed in asked) == [
            (i, group_seed(7, 1, i)) for i in range(GROUPS)
        ]
        shelves.append(shelf.groups)
    in_order, by_length = (
        {key: to_bytes(group) for key, group in groups.items()} for groups in shelves
    )
    assert sorted(in_order.values()) == sorted(by_length.values())
    assert order == "completion" or in_order == by_length


async def test_dynamic_sampling_dispatched_by_length_trains_the_first_informative_groups_all_the_same(
    store_thread,
):
    results = []
    for dispatch in ("in-order", "longest-first"):
        asked: list[tuple[str, int, int, int]] = []
        shelf = Shelf()
        answering = [Answers("a", LENGTHS, asked)]
        chosen = dynamic(dispatch=dispatch)
        producer = make_producer(
            chosen, answering, ScriptedRewards(), shelf, store_thread, window=RESPONSES
        )  # type: ignore[arg-type]
        for iteration in range(2):
            asked.clear()
            shelf.groups.clear()
            further = iter(prompts()[4:])
            await producer.produce(iteration, prompts()[:4], informative(chosen, further))
        results.append(
            ([index for _, index, _, _ in asked], {k: to_bytes(g) for k, g in shelf.groups.items()})
        )
    (in_order, expected), (by_length, trained) = results
    assert in_order == [0, 1, 2, 3, 4, 5] and by_length == [3, 1, 0, 2, 4, 5], (
        "replacements as they come"
    )
    assert trained == expected


async def test_tail_waste_is_the_idle_share_after_the_last_dispatch(store_thread, monkeypatch):
    """Two places of one group each: groups of 4, 1, 1 and 1 s, the long one first and the long one
    last.
    """
    clock = [0.0]
    monkeypatch.setattr("pa_npu.engines.pool.time.perf_counter", lambda: clock[0])
    for ends, waste in (
        # 2 s with both places busy after the last dispatch at 2 s; then 1 s with one
        ([4.0, 1.0, 2.0, 3.0], 1 / (2 * 4)),
        # the last one is dispatched at 1 s beside another and runs alone from 2 s to 5 s
        ([1.0, 1.0, 2.0, 5.0], 3 / (2 * 5)),
    ):
        clock[0] = 0.0
        pool = EnginePool([Answers("a", LENGTHS, [])])  # type: ignore[list-item]
        meter = IdleTailMeter(pool)
        leases = []
        for end_s in ends[:2]:
            leases.append((end_s, await pool.admit(4, 10, lambda _: 8, 1)))
            meter.admitted(leases[-1][1], 0)
        waiting = ends[2:]
        while leases:
            leases.sort(key=lambda item: item[0])
            end_s, lease = leases.pop(0)
            clock[0] = end_s
            lease.close()
            meter.generated(lease)
            if waiting:
                leases.append((waiting.pop(0), await pool.admit(4, 10, lambda _: 8, 1)))
                meter.admitted(leases[-1][1], 0)
                if not waiting:
                    meter.nothing_left()
        clock[0] += 10
        meter.nothing_left()
        assert meter.tail_waste == pytest.approx(waste), (
            "what comes after the last response is not generation"
        )


async def test_while_there_is_something_to_dispatch_no_engine_is_looked_at_for_the_tail_but_its_own(
    monkeypatch,
):
    pool = EnginePool([Answers(name, LENGTHS, []) for name in "abc"])  # type: ignore[misc]
    meter = IdleTailMeter(pool)
    looks = []
    use = pool.use
    monkeypatch.setattr(pool, "use", lambda: looks.append(1) or use())
    for _ in range(4):
        lease = await pool.admit(4, 10, lambda _: 8, 1)
        meter.admitted(lease, 0)
        lease.close()
        meter.generated(lease)
    assert not looks
    meter.nothing_left()
    meter.generated(lease)
    assert len(looks) == 2, "the tail is looked at as it was"
