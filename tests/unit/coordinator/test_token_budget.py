"""schedule.tokens_per_update: what an update takes, that every group is trained once and fresh, and how even updates become."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pa_npu.checkpoints.ahead import AheadIteration
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness, iterations_ahead
from pa_npu.control.messages import CARRIED_KEY
from pa_npu.coordinator.episode import ScoredGroup
from pa_npu.coordinator.iterations_ahead import carried_of
from pa_npu.coordinator.token_budget import BudgetedGroups, TokenBudget, carried_fields
from pa_npu.data.prompts import Prompt
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.functions import RewardResult
from pa_npu.samples.columns import NONE
from pa_npu.samples.group import Group
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.samples.wire import to_bytes
from tests.helpers.trainer_rank import make_groups


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"schedule": {"max_staleness": 0}},
            "tokens_per_update: 100 with schedule.max_staleness = 0",
        ),
        ({"schedule": {"dynamic_sampling": True}}, "set dynamic_sampling to false"),
        ({"algorithm": {"name": "dapo"}}, "of algorithm.name=dapo"),
        ({"schedule": {"updates_per_iteration": 2}}, "updates_per_iteration = 2"),
        ({"publish": {"divergence": 0.1}}, "for the same versions of max_staleness"),
        ({"schedule": {"tokens_per_update": 10**6}}, "lower it, or raise prompts_per_iteration"),
    ],
)
def test_what_makes_no_sense_with_a_budget_is_refused_in_one_line(
    sections: dict[str, Any], says: str
) -> None:
    schedule = {"tokens_per_update": 100, "max_staleness": 1, **sections.get("schedule", {})}
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, **sections, "schedule": schedule}
    with pytest.raises(ValueError, match=says):
        Config.model_validate(tree)


def by_hand(tokens: list[int], budget: int, due: int, replicas: int) -> int:
    """How many groups an update takes, in dispatch order."""
    for size in range(0, len(tokens) + 1, replicas):
        if size >= due and sum(tokens[:size]) >= budget:
            return size
    return len(tokens) // replicas * replicas


@dataclass(frozen=True)
class Tokens:
    tokens: int
    is_informative: bool = True


def budgeted(
    budget: TokenBudget,
    carried: list[int],
    num_new: int,
    num_due: int,
    on_size: Callable[[int], None] = lambda size: None,
) -> BudgetedGroups:
    prompts: list[Any] = [None] * num_new
    return BudgetedGroups(budget, [Tokens(tokens) for tokens in carried], prompts, num_due, on_size)


def numbers(released: list[tuple[int, Tokens]]) -> list[int]:
    return [number for number, _ in released]


def test_an_update_takes_the_same_groups_in_whatever_order_they_become_complete() -> None:
    rng = random.Random(3)
    for _ in range(300):
        replicas = rng.choice([1, 1, 2, 3])
        carried = [rng.randint(1, 60) for _ in range(rng.randint(0, 5))]
        new = [rng.randint(1, 60) for _ in range(rng.randint(replicas, 8))]
        budget = rng.randint(1, 300)
        due = rng.randint(0, len(carried))
        whole = carried + new
        expected = by_hand(whole, budget, due, replicas)
        sizes: list[int] = []
        update = budgeted(TokenBudget(budget, 99, replicas), carried, len(new), due, sizes.append)
        taken = numbers(update.begin())
        arrivals = rng.sample(range(len(new)), len(new))
        for index in arrivals:
            taken += numbers(update.scored(index, Tokens(new[index])))
        assert taken == list(range(expected)) and update.size == expected and sizes == [expected]
        assert [group.tokens for group in update.left()] == whole[
            expected:
        ] and update.new_tokens == new


def test_groups_are_taken_as_soon_as_it_is_known() -> None:
    sizes: list[int] = []
    update = budgeted(TokenBudget(100, 9, 1), [30, 30], 3, 0, sizes.append)
    assert numbers(update.begin()) == [0, 1] and not sizes
    assert update.scored(1, Tokens(50)) == [], "whether it is taken depends on the one before it"
    assert numbers(update.scored(0, Tokens(20))) == [2, 3] and sizes == [4], (
        "80 without the last one, 130 with it"
    )
    assert update.scored(2, Tokens(10)) == [] and update.left() == [Tokens(10)]


def train(config: Config, budget: TokenBudget | None, lengths: Any) -> tuple[list[int], list[int]]:
    """Tokens of every update of a run, and ages of what it trained; asserts that each group is
    trained once, and fresh.
    """
    staleness = config.schedule.max_staleness
    iterations = config.schedule.iterations
    max_groups = 16
    freshness = Freshness(staleness, iterations_ahead(config.schedule, config.publish))
    carried: list[tuple[int, int, int]] = []  # number, version, tokens
    numbers = itertools.count()
    trained = []
    sizes = []
    ages = []
    generated = 0
    for iteration in range(iterations):
        is_last = iteration == iterations - 1
        version = max(0, iteration - iterations_ahead(config.schedule, config.publish))
        count = (
            max_groups
            if budget is None
            else budget.num_new([g[2] for g in carried], is_last=is_last)
        )
        assert budget is None or count % budget.replicas == 0
        new = [(next(numbers), version, lengths()) for _ in range(count)]
        generated += count
        whole = carried + new
        if budget is None:
            size = len(whole)
        else:
            due = sum(not freshness.allows(iteration + 1, g[1]) for g in carried)
            update = budgeted(
                budget, [g[2] for g in carried], count, len(whole) if is_last else due
            )
            update.begin()
            for index in range(count):
                update.scored(index, Tokens(whole[len(carried) + index][2]))
            budget.observe(update.new_tokens)
            assert update.size % budget.replicas == 0
            size = update.size
        freshness.check(iteration, [g[1] for g in whole[:size]], "a group")
        trained += [g[0] for g in whole[:size]]
        ages += [iteration - g[1] for g in whole[:size]]
        sizes.append(sum(g[2] for g in whole[:size]))
        carried = whole[size:]
    assert not carried and trained == list(range(generated)), (
        "I2: every group once, in dispatch order"
    )
    return sizes, ages


@pytest.mark.parametrize(("staleness", "replicas"), [(1, 1), (2, 2), (3, 1)])
def test_every_group_is_trained_once_and_fresh_and_updates_have_more_even_tokens(
    staleness: int, replicas: int
) -> None:
    schedule = {"max_staleness": staleness, "iterations": 60, "tokens_per_update": 4000}
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "schedule": schedule}
    )

    def run(budget: TokenBudget | None) -> tuple[float, list[int]]:
        rng = random.Random(staleness)  # heavy-tailed, 400 tokens a group on average
        sizes, ages = train(config, budget, lambda: min(2048, round(rng.lognormvariate(5.8, 0.6))))
        body = sizes[2:-1]
        return statistics.pstdev(body) / statistics.fmean(body), ages

    with_budget, ages = run(TokenBudget(4000, 16, replicas))
    without, _ = run(None)
    assert with_budget < 0.7 * without, (
        f"coefficients of variation {with_budget:.3f} and {without:.3f}"
    )
    assert max(ages) > iterations_ahead(config.schedule, config.publish), "nothing was carried"


def carried_group(version: int = 3) -> ScoredGroup:
    prompt = Prompt(7, np.array([4, 5, 6], np.int32), "42", "how much", {"question": "how much"})
    samples = []
    for number in range(2):
        sample = SampleBuilder(prompt.tokens)
        sample.write(
            np.arange(2 + number, dtype=np.int32), -0.5 * np.ones(2 + number, np.float32), version
        )
        samples.append(sample.finish(number == 0, f"text {number}"))
    third = np.array([0.1, 1 / 3], np.float32)
    return ScoredGroup(
        prompt, samples, RewardResult(third, {"math": third}, np.array([False, True]), ("slow",))
    )


def test_what_is_carried_comes_back_from_a_checkpoint_as_it_was() -> None:
    carried = carried_group()
    assert (carried.tokens, carried.version) == (5, 3)
    data = to_bytes(carried.group(0, 5, 0))
    numbers = {
        CARRIED_KEY: {"iteration": 5, "groups": [carried_fields(carried)], "group_tokens": 12.5}
    }
    (resumed,), group_tokens = carried_of(AheadIteration(5, numbers, [], {}, [data]))
    assert group_tokens == 12.5
    assert (
        carried_fields(resumed) == carried_fields(carried)
        and to_bytes(resumed.group(0, 5, 0)) == data
    )
    assert resumed.result.total.tolist() == carried.result.total.tolist()
    for ours, theirs in zip(resumed.samples, carried.samples, strict=True):
        assert isinstance(ours, Sample)
        for name in ("tokens", "trained", "logprobs", "versions"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.finished, ours.text) == (theirs.finished, theirs.text)
    del numbers[CARRIED_KEY]["groups"][0]["texts"]  # type: ignore[index]
    with pytest.raises(DataError, match="take an earlier checkpoint"):
        carried_of(AheadIteration(5, numbers, [], {}, [data]))


class Filling:
    """A buffer whose slots are filled one look after another."""

    readers = 1
    head_bytes = 0
    columns = NONE

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self.looks = 0

    def ready(self, iteration: int, replica: int, slot: int) -> bool:
        self.looks += 1
        return slot < len(self._groups) and self.looks > 2 * slot

    def wait(self, iteration: int, replica: int, slot: int, timeout_s: float) -> float:
        if slot >= len(self._groups):
            time.sleep(min(timeout_s, 0.05))
            raise DeadlineExceeded(f"slot {slot}")
        return 0.0

    def read_bytes(self, iteration: int, replica: int, slot: int) -> bytes:
        return to_bytes(self._groups[slot])

    def done(self, iteration: int, replica: int, slot: int) -> None:
        pass


def updates_of(
    groups: list[Group],
    timeout_s: float,
    size: Callable[[], int | None],
    max_tokens: int | None = None,
) -> MicrobatchIterator:
    return MicrobatchIterator(
        Filling(groups),  # type: ignore[arg-type]
        **{"replica": 0, "num_replicas": 1, "iteration": 2, "groups": 16, "order": "prompt"},
        **{
            "responses_per_microbatch": 4,
            "shared_prompt": True,
            "pad_multiple": 1,
            "timeout_s": timeout_s,
        },
        max_tokens=max_tokens,
        size=size,
    )


@pytest.mark.parametrize("known_after", [0, 1, 9])
@pytest.mark.parametrize("max_tokens", [None, 64])
def test_trainers_end_where_the_update_ends_whenever_they_hear_of_it(
    known_after: int, max_tokens: int | None
) -> None:
    groups = make_groups(2, 3, 4, seed=1)
    taken: list[int] = []
    asked = itertools.count()

    def size() -> int | None:
        return 3 if next(asked) >= known_after else None

    source = updates_of(groups, 5.0, size, max_tokens)
    for share in source.updates(1):
        for microbatch in share:
            taken += microbatch.group_indices
    source.finish()
    assert sorted(set(taken)) == [0, 1, 2] and source.indices == (0, 1, 2)


def test_nobody_asks_for_the_size_before_the_first_group() -> None:
    """While devices decode, a look at the store would cost the cores that decode."""
    asked = itertools.count()
    source = updates_of(make_groups(2, 3, 4, seed=1), 5.0, lambda: next(asked) and None)
    assert next(source).group_indices == (0,) and next(asked) == 0


def test_pipeline_stages_know_how_many_groups_an_update_has_before_it_begins() -> None:
    looked = itertools.count()
    source = updates_of(make_groups(2, 3, 4, seed=1), 5.0, lambda: 3 if next(looked) > 20 else None)
    (share,) = source.updates(1)
    assert share.settle() == 3 and next(looked) == 22 and source.waited_s > 0, (
        "until the coordinator has said so"
    )
    assert [microbatch.group_indices for microbatch in share] == [(0,), (1,), (2,)]
    source.finish()


def test_an_update_that_neither_goes_on_nor_ends_is_one_line() -> None:
    source = updates_of([], 0.05, lambda: None)
    with pytest.raises(DeadlineExceeded, match="the group of slot 0, replica 0, iteration 2"):
        next(source)
    source = updates_of(make_groups(2, 3, 4, seed=1), 0.05, lambda: None)
    with pytest.raises(DeadlineExceeded, match="slot 3 of replica 0 in iteration 2 nor how many"):
        source.settle()  # three come, and nothing after them
