"""Roles that follow the work: nobody trains where an engine decodes, nothing that is sampled depends on it, and it never loses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pa_npu.config.schema import Config
from pa_npu.control.tasks import cancel
from pa_npu.coordinator import roles as module
from pa_npu.coordinator.delivery import Produced
from pa_npu.coordinator.engine_groups import producer_on_engines
from pa_npu.coordinator.roles import Roles
from pa_npu.coordinator.roles_delivery import RolesDelivery
from pa_npu.data.prompts import Prompt
from pa_npu.dispatch import roles as dispatch
from pa_npu.dispatch.assignment import Assignment
from pa_npu.dispatch.decoding_left import DecodingErrors, expected_rest
from pa_npu.dispatch.roles import (
    TURNS,
    Decision,
    Owned,
    Owners,
    Predicted,
    Rest,
    RoleUnit,
    Rule,
    decoding_units,
    predict,
    role_units,
)
from pa_npu.engines.pool import EnginePool
from pa_npu.engines.protocol import EngineGone, Generation, RolloutEngine, Sampling
from pa_npu.environments.protocol import EnvironmentContext
from pa_npu.environments.single_turn import SingleTurn
from pa_npu.planning.iteration_model.controller import ScheduleController
from pa_npu.planning.iteration_model.subjects import EngineSpeed, GroupTiming, Rules
from pa_npu.rewards.functions import RewardInput, RewardResult
from pa_npu.samples.group import Group
from pa_npu.telemetry.timeline import Timeline
from tools.simulate_roles import Shape, draw, iterate

GROUPS = 24
SIZE = 2
LONGEST = 40


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {
            "responses_per_prompt": SIZE,
            "window": 64,
            "max_response_tokens": LONGEST,
            "engines": 3,
        },
        "trainer": {"devices": 3},
        "schedule": {"prompts_per_iteration": GROUPS},
        "placement": {"colocate": True},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


# what changes together


def test_a_unit_is_a_replica_with_its_engines_or_what_devices_and_shards_join() -> None:
    assert role_units(config()) == [
        RoleUnit((0,), (0,)),
        RoleUnit((1,), (1,)),
        RoleUnit((2,), (2,)),
    ]
    pipelined = config(
        rollout={"engines": 2, "tensor_parallel": 2}, trainer={"devices": 4, "pipeline_parallel": 2}
    )
    assert role_units(pipelined) == [RoleUnit((0,), (0,)), RoleUnit((1,), (1,))], (
        "engines lie along replicas, not along stages"
    )
    wide = config(rollout={"engines": 1, "tensor_parallel": 2}, trainer={"devices": 4})
    assert role_units(wide) == [RoleUnit((0,), (0, 1)), RoleUnit((), (2,)), RoleUnit((), (3,))]
    sharded = config(trainer={"devices": 3, "backend": "fsdp"})
    assert sharded.mesh.shards == 3 and role_units(sharded) == [RoleUnit((0, 1, 2), (0, 1, 2))], (
        "in turns"
    )


# the iteration


class Engine:
    """Writes a token of every response whenever the loop comes round; lengths and tokens follow
    from the seed.
    """

    def __init__(self, name: str, fails: bool = False) -> None:
        self.name = name
        self.decoding = 0
        self.handed_on = 0
        self.gone = False
        self.asleep = False
        self._fails = fails

    async def generate(
        self,
        prompt_tokens: np.ndarray,
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: np.ndarray | None = None,
    ) -> list[Generation]:
        begun = self.handed_on
        assert not self.asleep, f"engine {self.name} is asked while it sleeps"
        self.decoding += 1
        try:
            lengths = [int(np.random.default_rng(seed + i).integers(1, LONGEST)) for i in range(n)]
            first = 0 if written is None else len(written)
            done = first
            while done < max(lengths) and begun == self.handed_on and not self.gone:
                await asyncio.sleep(0.0005)
                done += 1
            if self.gone:
                raise EngineGone(f"engine {self.name}: gone")
            return [
                self._part(seed + i, first, min(done, length), length)
                for i, length in enumerate(lengths)
            ]
        finally:
            self.decoding -= 1

    def _part(self, seed: int, first: int, end: int, length: int) -> Generation:
        tokens = np.random.default_rng(seed).integers(2, 1000, length).astype(np.int32)[first:end]
        reason: Any = "stop" if end == length else "cut"
        text = "".join(f" {token}" for token in tokens)
        return Generation(tokens, -0.001 * tokens.astype(np.float32), text, reason, version=5)

    async def cut_responses(self, *, deadline_s: float) -> None:
        if self._fails:
            self.gone = True
            raise EngineGone(f"engine {self.name}: gone")
        self.handed_on += 1

    async def close(self) -> None:
        pass


class Shelf:
    """A buffer that notes which engines decoded whenever a replica got a group."""

    readers = 1

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.groups = {}
        self.beside = 0
        self.timings: list[GroupTiming] = []
        self.events: list[dict[str, Any]] = []

    def put(self, group: Group, replica: int, slot: int) -> None:
        assert not self.engines[replica].decoding, (
            f"replica {replica} trains while engine {replica} decodes"
        )
        assert self.engines[replica].asleep, (
            f"replica {replica} trains while engine {replica} has memory"
        )
        self.beside += any(engine.decoding for engine in self.engines)
        self.groups[replica, slot] = group


class Rewards:
    async def score(self, group: RewardInput) -> RewardResult:
        total = np.arange(len(group.responses), dtype=np.float32)
        return RewardResult(total, {"math": total}, total > 0, ())


@pytest.fixture
def store_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def produce(
    config: Config,
    store_thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    keep: int,
    fails: int | None = None,
    learned: bool = True,
) -> tuple[Produced, Shelf, list[str]]:
    """keep: units that go on decoding, however little is left. fails: the engine that dies as it is
    asked to hand on. learned: whether there were iterations before."""

    def wanted(rest: Rest, speed: EngineSpeed) -> Decision:
        units = max(keep, rest.decoding - 1)
        return Decision(units=units, end_s=0.0, turns_s=0.0, decoded_s=0.0)

    monkeypatch.setattr(module, "decoding_units", wanted)
    # at every completion, however busy the machine is
    monkeypatch.setattr(module, "_SHARE_OF_CORE", 1e9)
    engines = [Engine(f"e{number}", fails=number == fails) for number in range(3)]
    pool = EnginePool()
    lost = []

    async def on_lost(engine: RolloutEngine, reason: str) -> None:
        lost.append(engine.name)
        pool.suspend(engine)

    async def sleep(engine_indices: Collection[int]) -> None:
        for engine_index in engine_indices:
            assert not engines[engine_index].decoding, (
                f"engine {engine_index} is put to sleep while it decodes"
            )
            engines[engine_index].asleep = True

    pool.subscribe(on_lost=on_lost, on_sleep=sleep)
    for engine_index, engine in enumerate(engines):
        pool.add(engine, engine_index=engine_index, shared=True)  # type: ignore[arg-type]
        pool.serve(engine, 5)  # type: ignore[arg-type]
    controller = ScheduleController(
        Rules.from_config(config), lambda prompt, responses: prompt + sum(responses)
    )
    shelf = Shelf(engines)
    timeline = Timeline(None, "")
    monkeypatch.setattr(timeline, "_write", shelf.events.append)
    roles = Roles(
        config, pool, timeline, lambda: (EngineSpeed(0.0005, 0.0), 1e-6) if learned else None
    )
    roles._seen.append(np.arange(1.0, LONGEST))
    environment = SingleTurn(EnvironmentContext(None, LONGEST))
    producer = producer_on_engines(
        config,
        pool,
        environment,
        Rewards(),
        shelf,
        controller,
        Sampling(LONGEST, 1.0),
        timeline,  # type: ignore[arg-type]
        lambda prompt, responses: float(prompt + sum(responses)),
        store_thread,
        features=[roles],
        streamed=partial(RolesDelivery, roles=roles),
    )
    prompts = [
        Prompt(i, np.full(3, i, np.int32), str(i), f"question {i}", {"id": i})
        for i in range(GROUPS)
    ]
    produced = await asyncio.wait_for(producer.produce(5, prompts, version=5), 50.0)
    roles.close()
    shelf.timings = controller._running[5].timings
    return produced, shelf, lost


def bits(shelf: Shelf) -> dict[int, tuple[list[int], list[float]]]:
    return {
        group.index: (group.tokens.tolist(), group.logprobs.tolist())
        for group in shelf.groups.values()
    }


@pytest.mark.parametrize("order", ["prompt", "completion"])
async def test_responses_that_move_are_those_that_do_not_and_nobody_trains_where_an_engine_decodes(
    order: str, store_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(schedule={"order": order})
    turns, held, _ = await produce(chosen, store_thread, monkeypatch, keep=3)
    assert turns.numbers["role_changes"] == 0 and not held.beside, "control: in turns"
    moved, shelf, lost = await produce(chosen, store_thread, monkeypatch, keep=1)
    changes = moved.numbers["role_changes"]
    assert 1 <= changes <= 2 and shelf.beside and not lost
    assert sum(engine.handed_on > 0 for engine in shelf.engines) <= changes
    assert bits(shelf) == bits(held) and len(bits(held)) == GROUPS
    assert not any(timing.moved for timing in held.timings) and any(
        timing.moved for timing in shelf.timings
    )
    for engine_index in range(3):
        decodes, trains = [
            event for event in shelf.events if event["lane"] == f"role of engine {engine_index}"
        ]
        assert (decodes["name"], trains["name"]) == ("decodes", "trains") and decodes[
            "end"
        ] == trains["start"]
        assert decodes["args"] == trains["args"] == {"ranks": [engine_index]}
    assert len(shelf.timings) == GROUPS, "trainers' seconds are of all groups, moved or not"
    if order == "prompt":
        assert all(
            group.index == slot * 3 + replica for (replica, slot), group in shelf.groups.items()
        )
        assert shelf.groups.keys() == held.groups.keys() and "replica_groups" not in moved.numbers
    else:
        inputs = [sum(replica == one for one, _ in shelf.groups) for replica in range(3)]
        assert moved.numbers["replica_groups"] == inputs
        numbers = [
            (g.index, n) for g in shelf.groups.values() for n in range(*(g.part or (0, SIZE)))
        ]
        assert sorted(numbers) == [(index, n) for index in range(GROUPS) for n in range(SIZE)], (
            "each response once"
        )
        reported = {
            (group.index, group.first, group.replica, len(group.response_tokens))
            for group in moved.dispatched.groups
        }
        parts = {key: group.part or (0, SIZE) for key, group in shelf.groups.items()}
        assert reported == {
            (shelf.groups[key].index, a, key[0], b - a) for key, (a, b) in parts.items()
        }
        assert {replica for replica, _ in shelf.groups} == {0, 1, 2}, (
            "every replica trains something"
        )


async def test_in_turns_engines_sleep_before_the_batch_is_trained(
    store_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shelf, _ = await produce(
        config(schedule={"stream": False}), store_thread, monkeypatch, keep=3
    )
    assert len(shelf.groups) == GROUPS and all(engine.asleep for engine in shelf.engines)


async def test_replicas_get_equal_work_before_anything_was_learned(
    store_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(schedule={"order": "completion"})
    assert chosen.devices.unequal_groups
    produced, shelf, _ = await produce(chosen, store_thread, monkeypatch, keep=1, learned=False)
    assert produced.numbers["role_changes"] == 0, "in turns"
    work = [
        sum(
            int(g.lengths[slice(*(g.part or (0, SIZE)))].sum())
            for (replica, _), g in shelf.groups.items()
            if replica == one
        )
        for one in range(3)
    ]
    assert max(work) < 1.1 * sum(work) / 3, work


async def test_where_nothing_moves_groups_go_where_they_go_in_turns(
    store_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same replicas, slots and whole groups, so that roles train the same microbatches."""
    slots = []
    for stream in (False, True):
        chosen = config(schedule={"order": "completion", "stream": stream})
        produced, shelf, _ = await produce(chosen, store_thread, monkeypatch, keep=3)
        assert not produced.numbers.get("role_changes") and not shelf.beside
        assert all(group.part is None for group in shelf.groups.values())
        slots.append(
            {
                replica: [g.index for (r, _), g in shelf.groups.items() if r == replica]
                for replica in range(3)
            }
        )
    sizes = [[len(groups) for groups in each.values()] for each in slots]
    assert sizes == [[GROUPS // 3] * 3] * 2


@pytest.mark.parametrize("engine", [0, 1, 2])
async def test_an_engine_that_dies_as_it_hands_on_changes_nothing(
    engine: int, store_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(schedule={"order": "prompt"})
    _, held, _ = await produce(chosen, store_thread, monkeypatch, keep=3)
    _, shelf, lost = await produce(chosen, store_thread, monkeypatch, keep=1, fails=engine)
    assert bits(shelf) == bits(held) and shelf.groups.keys() == held.groups.keys()
    assert set(lost) <= {f"e{engine}"}, "the last to decode is never asked"


@pytest.mark.parametrize(("device", "first"), [("npu", 0), ("cpu", 1)])
def test_where_engines_sleep_a_unit_whose_engine_is_being_started_changes_last(
    device: str, first: int
) -> None:
    """It would have to start before it can sleep, and all changes would wait for it; elsewhere it
    has nothing to hand on.
    """
    chosen = config(run={"device": device})
    pool = EnginePool()
    engines: Any = [Engine(f"e{number}") for number in range(3)]
    for engine_index, engine in enumerate(engines):
        pool.add(engine, engine_index=engine_index, shared=True)
        pool._uses[engine.name].in_flight_sequences = 0 if engine_index == 1 else 1 + engine_index
    for engine in (engines[0], engines[2]):
        pool.serve(engine, 5)
    roles = Roles(chosen, pool, Timeline(None, ""), lambda: None)
    assert roles._emptiest(roles.units)[0] == roles.units[first]


# the decision

FAMILY = [
    Shape("answers", devices, devices * 16, 4, 200, 1024, spread, 64, ratio)
    for devices in (4, 8)
    for spread in (0.0, 0.3, 0.9)
    for ratio in (0.3, 1.0, 2.0)
]


@pytest.mark.parametrize("replica", [1, 2])
def test_it_is_never_more_than_a_hundredth_behind_turns_and_gains_where_lengths_vary(
    replica: int,
) -> None:
    gains = {}
    for shape in FAMILY:
        lengths = draw(shape, 0)
        earlier = draw(shape, 0, visit=0)
        turns, roles = (
            iterate(shape, replica, lengths, earlier, mode).end_s for mode in ("turns", "roles")
        )
        gains[shape.devices, shape.spread, shape.ratio] = turns / roles
    assert min(gains.values()) >= 0.99, gains
    assert all(
        gain > 1.1 for (_, spread, ratio), gain in gains.items() if spread == 0.9 and ratio == 1.0
    ), gains


def rest_of(remaining: np.ndarray, ready: int, **further: Any) -> Rest:
    """Returns a rest of groups of one sequence, on four devices."""
    groups = np.arange(len(remaining))
    return Rest(
        remaining=remaining,
        group=groups,
        written=np.full(len(groups), 10.0),
        decoding=4,
        engines=1.0,
        replicas=1.0,
        trains_s=np.ones(len(groups)),
        ready_s=[1.0] * ready,
        free_s=[],
        max_sequences=64,
        **further,
    )


TAIL = np.r_[np.full(28, 5.0), np.full(4, 1000.0)]


def test_equal_lengths_and_dear_prompts_stay_in_turns() -> None:
    equal = rest_of(np.full(32, 100.0), 0)
    assert decoding_units(equal, EngineSpeed(0.01, 0.001)).units == 4
    tail = rest_of(TAIL, 8)
    assert decoding_units(tail, EngineSpeed(0.01, 0.0001)).units < 4, "the rest fits on fewer"
    assert decoding_units(tail, EngineSpeed(0.01, 0.0001, prompt_token_s=10.0)).units == 4


def test_a_change_gains_also_if_lengths_are_off_as_they_were_before() -> None:
    """Two groups are to end, and while they do two devices could train, unless they end at once."""
    speed = EngineSpeed(0.001, 0.0001)
    few = np.full(2, 60.0)
    for spread, units in ((0.0, 2), (0.2, 2), (0.9, 4)):
        rest = replace(
            rest_of(few, 0, spread=spread), ready_s=[0.03] * 6, trains_s=np.full(2, 0.03)
        )
        assert decoding_units(rest, speed).units == units, spread


def test_a_change_that_slows_decoding_more_than_the_model_knows_is_not_made_again() -> None:
    tail = rest_of(TAIL, 8)
    speed = EngineSpeed(0.01, 0.0001)
    assert decoding_units(replace(tail, slower=1.0), speed).units < 4
    assert decoding_units(replace(tail, slower=3.0), speed).units == 4


def test_where_groups_have_owners_a_change_gains_only_what_their_owners_can_train() -> None:
    """schedule.order=prompt: the last replica to decode trains all of its groups after that."""
    speed = EngineSpeed(0.01, 0.0001)
    late = np.full(4, 1000.0)

    def units(owner_of_ready: Callable[[int], int], first: int) -> int:
        owners = Owners(
            living=[Owned(replica, first + replica) for replica in range(4)],
            ready=[Owned(owner_of_ready(number), 10 + number) for number in range(8)],
            free=[],
            changing=[(replica,) for replica in range(4)],
        )
        return decoding_units(rest_of(late, 8, owners=owners), speed).units

    assert decoding_units(rest_of(late, 8), speed).units < 4, "control: any replica may train any"
    assert units(lambda number: number % 4, 100) == 4, "each has as much"
    assert units(lambda number: 0, 100) < 4, "the first to change has the most"
    assert units(lambda number: 0, 0) == 4, "but waits for a group before these"


def test_where_nothing_can_be_gained_one_prediction_is_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At small iterations a decision takes as long as it may, and the next one waits for it."""
    predictions = []

    def counted(rest: Rest, rule: Rule, speed: EngineSpeed) -> Predicted:
        predictions.append(rule)
        return predict(rest, rule, speed)

    monkeypatch.setattr(dispatch, "predict", counted)
    speed = EngineSpeed(0.003, 0.0002)
    assert decoding_units(rest_of(np.full(4, 2.0), 28), speed).units == 4
    assert predictions == [TURNS]
    decoding_units(rest_of(TAIL, 8), speed)
    assert len(predictions) > 10, "control: where something can"


@pytest.mark.parametrize("age", [0.0, 7.5, 39.0, 45.0])
def test_sequences_in_flight_become_as_long_as_those_before_that_were_longer(age: float) -> None:
    seen = np.arange(1.0, 41.0)
    ages = np.asarray([age, 0.0, age])
    size = 4
    remaining, groups, tokens = expected_rest(seen, ages, size, limit=40)
    for number, group_age in enumerate(ages):
        drawn = [
            seen[int(((0.5 + place + 0.6180339887 * number) / size) % 1.0 * len(seen))]
            for place in range(size)
        ]
        expected = [length - group_age for length in drawn if length > group_age]
        of_group = remaining[groups == number].tolist()
        if expected:
            assert of_group == pytest.approx(expected)
            assert tokens[number] == pytest.approx(sum(max(length, group_age) for length in drawn))
        elif group_age < 40.0:
            assert of_group == [40.0 - group_age]
        else:
            assert of_group == [1.0], "no response is longer than the limit"


def test_errors_of_predicted_decoding_are_measured_and_forgotten() -> None:
    errors = DecodingErrors()
    for _ in range(12):
        errors.predicted(10.0, 2.0, changes=False)
        errors.decoded(12.0)
    assert errors.spread < 0.001 and errors.slower == 1.0
    for _ in range(8):  # decoding takes 1.5 times as long as was predicted, whenever a unit changes
        errors.predicted(10.0, 2.0 * errors.slower, changes=True)
        errors.decoded(13.0)
    assert errors.slower == pytest.approx(1.5, rel=0.01) and errors.spread < 0.02
    for _ in range(100):
        errors.predicted(10.0, 2.0, changes=False)
        errors.decoded(12.0)
    assert 1.0 <= errors.slower < 1.1, "it is tried again"


# when groups are given


class Given(RolesDelivery):
    """Notes which replica gets a group, and when."""

    def __init__(self, replicas: int, groups: int) -> None:
        self.given: list[int] = []
        self.all_given = asyncio.Event()
        self._expected = groups
        nothing: Any = None
        roles: Any = SimpleNamespace(
            begin=lambda delivery: None, all_written=False, all_scored=False, divides_groups=False
        )
        assignment = Assignment("completion", replicas, groups // replicas)
        super().__init__(
            config=config(),
            algorithm=nothing,
            production=nothing,
            assignment=assignment,
            work=lambda prompt, responses: 1.0,
            buffer=nothing,
            store_thread=nothing,
            on_delivered=(),
            roles=roles,
        )

    def _cost(self, number: int, scored: Any) -> float:
        return 1.0

    async def _deliver_to(self, number: int, scored: Any, slot: tuple[int, int]) -> None:
        self.given.append(slot[0])
        if len(self.given) == self._expected:
            self.all_given.set()

    async def all_of(self, groups: int) -> list[int]:
        for number in range(groups):
            await self._deliver(number, SimpleNamespace(tokens=1))  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(self.all_given.wait(), 20.0)
        finally:
            await cancel([self._pump] if self._pump is not None else [])
        return self.given


async def test_a_group_is_given_in_time_however_short_the_wait_is() -> None:
    delivery = Given(1, 8)
    delivery.seconds_per_work = 0.0004
    delivery.free([0])
    assert await delivery.all_of(8) == [0] * 8, "with nothing else happening"


async def test_a_replica_without_room_is_not_waited_for() -> None:
    delivery = Given(2, 4)
    delivery.seconds_per_work = 0.02
    delivery.free([0, 1])
    delivery._given_s[1] += 0.3  # it has work for longer than the other, which will be full
    assert await delivery.all_of(4) == [0, 1, 0, 1]


def test_the_last_group_is_not_given_to_a_replica_that_is_busy_when_other_devices_are_about_to_be_free() -> (
    None
):
    """The longest response is the last to end, and its group's training is what the iteration waits
    for.
    """
    delivery = Given(2, 4)
    delivery.seconds_per_work = 1.0
    delivery.free([0])
    delivery._given_s[0] += 0.3
    delivery._worked = [(1.0, 1), (1.0, 1)]
    delivery._held = [(number, SimpleNamespace(tokens=1)) for number in range(2)]  # type: ignore[misc]
    _, replica, in_s = delivery._due(at_end=False) or (0, 0, 0.0)
    assert replica == 0 and in_s <= 0.0, (
        "control: while others are in flight it is given ahead of time"
    )
    delivery.roles.all_written = True  # type: ignore[misc]
    _, replica, in_s = delivery._due(at_end=False) or (0, 0, 0.0)
    assert replica == 0 and in_s > 0.1
    delivery.free([1])
    assert (delivery._due(at_end=True) or (0, 0, 0.0))[1] == 1
