"""One iteration's production: what is asked, what reaches the buffer, when, and what a failure does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from pa_npu.algorithm.advantages import batch_advantages, group_advantages
from pa_npu.config.schema import Config
from pa_npu.coordinator import updates
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.producer import Producer
from pa_npu.coordinator.updates import EveryGroup, InformativeGroups
from pa_npu.coordinator.variants import TailMeter
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch.schedule import Schedule
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineError, Generation, Sampling
from pa_npu.environments.protocol import EnvironmentContext, EnvironmentFailed
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.errors import UserError
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import IterationOutlook, Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.wire import to_bytes
from pa_npu.telemetry.timeline import Timeline
from tests.helpers import stuck
from tests.helpers.groups import sample_advantages
from tests.helpers.stuck import comes

# a dispatcher that waits for room has the deadlines of a run, which are longer
pytestmark = pytest.mark.timeout(60)

GROUPS, RESPONSES = 8, 4


class ScriptedEngine:
    """Answers a group when its turn comes: `order` lists dispatch indices by completion.

    A turn that never comes is an error.
    """

    def __init__(
        self,
        name: str,
        order: list[int],
        fail_at: int | None = None,
        before_last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.asked: list[tuple[int, int, int]] = []
        self.answered = 0
        self.on_asked: Callable[[], object] = lambda: None
        self._turns = [asyncio.Event() for _ in order]
        self._order = order
        self._fail_at = fail_at
        self._before_last = before_last
        if self._turns:
            self._turns[0].set()

    async def generate(
        self, prompt_tokens: np.ndarray, n: int, seed: int, sampling: Sampling, *, deadline_s: float
    ) -> list[Generation]:
        index = int(prompt_tokens[0])
        self.asked.append((index, n, seed))
        self.on_asked()
        if index == self._fail_at:
            raise EngineError(f"engine {self.name}: died")
        turn = self._order.index(index)
        await comes(self._turns[turn], lambda: self._why_no_turn(index))
        if turn == len(self._turns) - 1 and self._before_last is not None:
            await self._before_last()
        if turn + 1 < len(self._turns):
            self._turns[turn + 1].set()
        self.answered += 1
        return [completion(index, i) for i in range(n)]

    def _why_no_turn(self, index: int) -> str:
        before = self._order[self.answered]
        asked = (
            "has no answer yet"
            if before in [asked for asked, _, _ in self.asked]
            else "was never asked for"
        )
        return (
            f"engine {self.name}: group {index} never had its turn, because group {before} "
            f"comes first and {asked}"
        )

    async def close(self) -> None:
        pass


def completion(index: int, i: int) -> Generation:
    length = 1 + (index + i) % 5
    return Generation(
        tokens=np.full(length, 10 * index + i, np.int32),
        logprobs=np.full(length, -0.25 * (i + 1), np.float32),
        text=f"{index}/{i}",
        finish_reason="stop" if i else "length",
        version=5,
    )


class ScriptedRewards:
    """Response i of group `index` gets (index * i) % 3."""

    def __init__(self) -> None:
        self.all_but_last = asyncio.Event()
        self._scored = 0

    async def score(self, group: RewardInput) -> RewardResult:
        pairs = [tuple(map(int, text.split("/"))) for text in group.responses]
        total = np.array([(index * i) % 3 for index, i in pairs], np.float32)
        self._scored += 1
        if self._scored == GROUPS - 1:
            self.all_but_last.set()
        return RewardResult(
            total, {"math": total}, total > 0, ("late",) if pairs[0][0] == 3 else ()
        )


class Shelf:
    """A rollout buffer that remembers what was put, and in which order."""

    readers = 1

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], Group] = {}

    def put(self, group: Group, replica: int, slot: int) -> None:
        assert (replica, slot) not in self.groups
        self.groups[replica, slot] = group


def prompts() -> list[Prompt]:
    return [
        Prompt(100 + i, np.full(3, i, np.int32), str(i), f"question {i}", {"id": i})
        for i in range(GROUPS)
    ]


def config(**sections: dict[str, object]) -> Config:
    tree: dict[str, dict[str, object]] = {
        "run": {"seed": 7},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"responses_per_prompt": RESPONSES, "window": 64, "max_response_tokens": 16},
        "trainer": {"devices": 2},
        "schedule": {"prompts_per_iteration": GROUPS, "order": "completion"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


@pytest.fixture
def store_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def make_producer(
    config: Config,
    engines: list[ScriptedEngine],
    rewards: ScriptedRewards,
    shelf: Shelf,
    store_thread: ThreadPoolExecutor,
    window: ScheduleController | int = 64,
) -> Producer:
    def work(prompt: int, responses: Sequence[int]) -> float:
        return prompt + sum(responses)

    if isinstance(window, int):
        window = ScheduleController(replace(Rules.from_config(config), window=window), work)
    return producer_on_engines(
        config,
        EnginePool(engines),  # type: ignore[arg-type]
        SingleTurn(EnvironmentContext(None, config.rollout.max_response_tokens)),
        rewards,
        shelf,  # type: ignore[arg-type]
        window,
        Sampling(config.rollout.max_response_tokens, 1.0),
        Timeline(None, ""),
        work,
        store_thread,
    )


async def produce(
    config: Config,
    engines: list[ScriptedEngine],
    store_thread: ThreadPoolExecutor,
    window: int = 64,
) -> tuple[Produced, Shelf]:
    shelf = Shelf()
    producer = make_producer(config, engines, ScriptedRewards(), shelf, store_thread, window)
    return await producer.produce(5, prompts()), shelf


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

    rewards, shelf = ScriptedRewards(), Shelf()
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


def dynamic(**schedule: object) -> Config:
    return config(
        schedule={
            "prompts_per_iteration": 4,
            "order": "prompt",
            "dynamic_sampling": True,
            **schedule,
        }
    )


def informative(chosen: Config, further: Iterator[Prompt]) -> EveryGroup:
    return InformativeGroups(prompts()[:4], chosen.schedule.order, lambda: next(further))


async def produce_dynamic(
    chosen: Config, order: list[int], store_thread: ThreadPoolExecutor
) -> tuple[Produced, Shelf, ScriptedEngine, int]:
    """Rewards (index * i) % 3 make every third group uninformative, from 0.

    Returns also the number of further prompts.
    """
    shelf, engine, further = Shelf(), ScriptedEngine("a", order), iter(prompts()[4:])
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
            row, trained = kept[group.index, number], group[number : number + 1]
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
                *(
                    np.full(length, (seed + i) % 1000, np.int32),
                    np.full(length, -0.5, np.float32),
                    f"{index}/{i}",
                    "stop",
                ),
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
        meter = TailMeter(pool)
        leases = []
        for end_s in ends[:2]:
            leases.append((end_s, await pool.admit(4, 10, lambda _: 8, 1)))
            meter.admitted(leases[-1][1])
        waiting = ends[2:]
        while leases:
            leases.sort(key=lambda item: item[0])
            end_s, lease = leases.pop(0)
            clock[0] = end_s
            lease.close()
            meter.generated(lease)
            if waiting:
                leases.append((waiting.pop(0), await pool.admit(4, 10, lambda _: 8, 1)))
                meter.admitted(leases[-1][1])
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
    meter, looks = TailMeter(pool), []
    use = pool.use
    monkeypatch.setattr(pool, "use", lambda: looks.append(1) or use())
    for _ in range(4):
        lease = await pool.admit(4, 10, lambda _: 8, 1)
        meter.admitted(lease)
        lease.close()
        meter.generated(lease)
    assert not looks
    meter.nothing_left()
    meter.generated(lease)
    assert len(looks) == 2, "the tail is looked at as it was"
