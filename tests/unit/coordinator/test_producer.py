"""One iteration's production: what is asked, what reaches the buffer, when, and what a failure does."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.dispatch.schedule import Schedule
from pa_npu.engines.protocol import EngineError
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.planning.iteration_model.subjects import IterationOutlook
from pa_npu.samples.seeds import group_seed
from tests.helpers import stuck
from tests.helpers.groups import sample_advantages
from tests.helpers.scripted_production import (
    GROUPS,
    RESPONSES,
    ScriptedEngine,
    ScriptedRewards,
    Shelf,
    completion,
    config,
    make_producer,
    produce,
    prompts,
)
from tests.helpers.stuck import comes

# a dispatcher that waits for room has the deadlines of a run, which are longer
pytestmark = pytest.mark.timeout(60)


async def test_the_controller_is_told_which_engines_serve_each_iteration(store_thread):
    class Told:
        def begin_iteration(self, outlook: IterationOutlook, iteration: int) -> Schedule:
            raise RuntimeError(f"{len(outlook.engines)} engines")  # ends the production here

    engines = [ScriptedEngine(name, []) for name in "ab"]
    producer = make_producer(
        config(), engines[:1], ScriptedRewards(), Shelf(), store_thread, Told()
    )
    with pytest.raises(RuntimeError, match="1 engines"):
        await producer.produce(0, prompts())
    producer.source.pool.add(engines[1])  # type: ignore[attr-defined, arg-type]
    with pytest.raises(RuntimeError, match="1 engines"):
        await producer.produce(1, prompts())
    producer.source.pool.serve(engines[1])  # type: ignore[attr-defined, arg-type]
    with pytest.raises(RuntimeError, match="2 engines"):
        await producer.produce(1, prompts())


async def test_groups_carry_what_was_sampled_with_the_seeds_of_their_index(store_thread):
    engine = ScriptedEngine("a", [2, 0, 1, 3, 7, 6, 5, 4])
    _, shelf = await produce(config(), [engine], store_thread)
    assert sorted(engine.asked) == [(i, RESPONSES, group_seed(7, 5, i)) for i in range(GROUPS)]
    assert sorted(shelf.groups) == [
        (replica, slot) for replica in range(2) for slot in range(GROUPS // 2)
    ]
    for group in shelf.groups.values():
        index = group.index
        wanted = [completion(index, i) for i in range(RESPONSES)]
        assert (group.iteration, group.version_range, group.prompt_id) == (5, (5, 5), 100 + index)
        np.testing.assert_array_equal(
            group.tokens[group.trained], np.concatenate([c.tokens for c in wanted])
        )
        np.testing.assert_array_equal(
            group.logprobs[group.trained], np.concatenate([c.logprobs for c in wanted])
        )
        np.testing.assert_array_equal(group.trained_lengths, [len(c.tokens) for c in wanted])
        np.testing.assert_array_equal(group.finished, [0, 1, 1, 1])
        rewards = np.array([(index * i) % 3 for i in range(RESPONSES)], np.float32)
        np.testing.assert_array_equal(group.rewards, rewards)
        wanted_advantages = np.repeat(group_advantages(rewards, "group-std"), group.trained_lengths)
        np.testing.assert_array_equal(group.advantages[group.trained], wanted_advantages)
    assert {group.index for group in shelf.groups.values()} == set(range(GROUPS))


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 7, 0, 2, 6, 4, 5]]
)
async def test_prompt_order_puts_every_group_into_the_slot_of_its_index(store_thread, order):
    _, shelf = await produce(
        config(schedule={"order": "prompt"}), [ScriptedEngine("a", order)], store_thread
    )
    assert {key: group.index for key, group in shelf.groups.items()} == {
        (i % 2, i // 2): i for i in range(GROUPS)
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_streaming_delivers_while_others_are_generated_and_sync_holds_all_until_the_last(
    store_thread, stream
):
    seen = []

    async def before_last() -> None:
        """Runs when all groups but the last are scored: whatever is delivered early is in the
        buffer after this.
        """
        await comes(
            rewards.all_but_last, lambda: f"not all of the first {GROUPS - 1} groups were scored"
        )
        for _ in range(5):
            await asyncio.sleep(0)
        # one thread puts in order, so this comes after every earlier put
        await asyncio.get_running_loop().run_in_executor(
            store_thread, lambda: seen.append(len(shelf.groups))
        )

    rewards = ScriptedRewards()
    shelf = Shelf()
    engine = ScriptedEngine("a", list(range(GROUPS)), before_last=before_last)
    await make_producer(
        config(schedule={"stream": stream}), [engine], rewards, shelf, store_thread
    ).produce(5, prompts())
    assert seen == [GROUPS - 1 if stream else 0]
    assert len(shelf.groups) == GROUPS


async def test_batch_advantages_use_the_whole_iteration(store_thread):
    chosen = config(
        schedule={"stream": False, "order": "prompt"}, algorithm={"advantage": "batch-std"}
    )
    _, shelf = await produce(chosen, [ScriptedEngine("a", list(range(GROUPS)))], store_thread)
    by_index = sorted(shelf.groups.values(), key=lambda group: group.index)
    for group, wanted in zip(
        by_index, batch_advantages([group.rewards for group in by_index]), strict=True
    ):
        np.testing.assert_allclose(sample_advantages(group), wanted, rtol=1e-6)


async def test_window_of_one_group_runs_one_at_a_time_in_order(store_thread):
    engine = ScriptedEngine("a", list(range(GROUPS)))
    in_flight = []
    engine.on_asked = lambda: in_flight.append(len(engine.asked) - engine.answered)
    _, shelf = await produce(config(), [engine], store_thread, window=RESPONSES)
    assert [index for index, _, _ in engine.asked] == list(range(GROUPS))
    assert in_flight == [1] * GROUPS
    assert len(shelf.groups) == GROUPS


async def test_numbers_and_samples_of_an_iteration(store_thread):
    production, shelf = await produce(
        config(telemetry={"samples": 3}),
        [ScriptedEngine("a", [4, 1, 0, 2, 3, 7, 6, 5])],
        store_thread,
    )
    numbers = production.numbers
    groups = list(shelf.groups.values())
    rewards = np.concatenate([group.rewards for group in groups])
    assert numbers["groups"] == GROUPS
    assert numbers["reward_mean"] == pytest.approx(rewards.mean()) == numbers["rewards"]["math"]
    assert numbers["accuracy"] == pytest.approx((rewards > 0).mean())
    assert numbers["reward_errors"] == 1
    assert numbers["truncated_ratio"] == pytest.approx(1 / RESPONSES)
    assert numbers["tokens_response"] == sum(len(group.tokens[group.trained]) for group in groups)
    assert numbers["tokens_prompt"] == GROUPS * RESPONSES * 3, "the prompt counts once per sample"
    assert numbers["prompt_length_mean"] == 3 and numbers["window"] == 64
    assert [sample["index"] for sample in production.samples] == [0, 1], "whatever finished first"
    kept = {(row.index, row.response): row for row in production.kept}
    assert sorted(kept) == [
        (index, response) for index in range(3) for response in range(RESPONSES)
    ]
    for group in groups:
        for number in range(RESPONSES if group.index < 3 else 0):
            row = kept[group.index, number]
            trained = group[number : number + 1]
            own = trained.trained
            assert (
                row.tokens == trained.tokens[own].tolist()
                and row.logprobs == trained.logprobs[own].tolist()
            )
            assert row.advantage == trained.advantages[own][0] and row.reward == trained.rewards[0]
    assert production.samples[1]["responses"][2] == {
        "text": "1/2",
        "tokens": 4,
        "finish_reason": "stop",
        "reward": 2.0,
        "correct": True,
    }


async def test_a_dying_engine_ends_the_iteration_at_once_with_its_error(store_thread):
    # group 5 fails while 0 to 4 wait for a turn that never comes
    engine = ScriptedEngine("a", [7, 6, 5, 4, 3, 2, 1, 0], fail_at=5)
    with pytest.raises(EngineError, match="engine a: died"):
        await asyncio.wait_for(produce(config(), [engine], store_thread, window=6 * RESPONSES), 5)
    assert len(asyncio.all_tasks()) == 1, "nothing is left in flight"


async def test_a_script_that_waits_for_a_group_nobody_asks_for_ends_in_seconds_and_says_so(
    store_thread, monkeypatch
):
    """About ScriptedEngine itself: without it a mistake in the dispatch would show after a
    request's own deadline only.
    """
    monkeypatch.setattr(stuck, "LIMIT_S", 0.05)
    engine = ScriptedEngine("a", [7, 0, 1, 2, 3, 4, 5, 6])
    with pytest.raises(
        EnvironmentFailed,
        match="group 0 never had its turn, because group 7 comes first and was never",
    ):
        await produce(config(), [engine], store_thread, window=RESPONSES)
