"""Every group gets exactly one slot, every replica the same number (I2) and about the same work."""

from __future__ import annotations

import random

import pytest

from pa_npu.config.schema import Config
from pa_npu.dispatch.assignment import Assignment, GroupWork
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec

SMALL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
}


def test_prompt_order_does_not_depend_on_arrival():
    expected = {index: (index % 3, index // 3) for index in range(12)}
    for seed in range(5):
        arrival = list(range(12))
        random.Random(seed).shuffle(arrival)
        assignment = Assignment("prompt", 3, 4)
        assert {index: assignment.assign(index, index * 7) for index in arrival} == expected
        assignment.finish()


def greedy(works: list[float], num_replicas: int) -> float:
    """Imbalance when each group goes to the replica with the least so far that is not full."""
    loads, free = [0.0] * num_replicas, [len(works) // num_replicas] * num_replicas
    for work in works:
        replica = min((r for r in range(num_replicas) if free[r]), key=lambda r: loads[r])
        loads[replica] += work
        free[replica] -= 1
    return max(loads) / (sum(loads) / num_replicas) - 1


@pytest.mark.parametrize("known", [True, False])
def test_groups_as_they_come_are_balanced_better_than_by_the_least_work_so_far(known):
    numbers, ours, least = random.Random(2), [], []
    for _ in range(100):
        works = [numbers.lognormvariate(0, 0.7) for _ in range(32)]
        estimate = sum(works) * numbers.lognormvariate(0, 0.1) if known else None
        assignment = Assignment("completion", 4, 8, expected_work=estimate)
        for index, work in enumerate(works):
            assignment.assign(index, work)
        ours.append(assignment.imbalance)
        least.append(greedy(works, 4))
    # equal counts force the least loaded one full of small groups, and the rest onto the others
    assert sum(ours) < 0.6 * sum(least), (sum(ours) / 100, sum(least) / 100)


def test_no_replica_gets_two_groups_more_than_another_while_they_come():
    numbers = random.Random(4)
    assignment, counts = Assignment("completion", 4, 8), [0] * 4
    for index in range(32):
        replica, slot = assignment.assign(index, numbers.lognormvariate(0, 1.5))
        assert slot == counts[replica], "slots in order of arrival"
        counts[replica] += 1
        assert max(counts) - min(counts) <= 2


def test_all_together_by_falling_work_are_as_good_as_equal_counts_allow():
    works = [7.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0, 0.0]
    assignment = Assignment("completion", 2, 4)
    slots = assignment.assign_all(list(range(8)), works)
    assert assignment.imbalance == 0, "7 + 4 + 3 + 0 against 6 + 5 + 2 + 1"
    for replica in range(2):
        mine = [slot for r, slot in slots if r == replica]
        assert mine == list(range(4)), "the groups of a replica stay in the given order"
    assignment.finish()


def test_each_optimizer_step_trains_the_next_groups_to_come_and_is_balanced_by_itself():
    numbers = random.Random(5)
    works = [numbers.lognormvariate(0, 0.7) for _ in range(32)]
    for together in (False, True):
        assignment = Assignment("completion", 4, 8, shares=2, expected_work=sum(works))
        if together:
            slots = assignment.assign_all(list(range(32)), works)
        else:
            slots = [assignment.assign(index, work) for index, work in enumerate(works)]
        assert {index for index, (_, slot) in enumerate(slots) if slot < 4} == set(range(16))
        assignment.finish()
        most = [
            max(
                sum(works[i] for i, s in enumerate(slots) if s[0] == r and s[1] // 4 == share)
                for r in range(4)
            )
            for share in range(2)
        ]
        assert assignment.imbalance == pytest.approx(sum(most) / (sum(works) / 4) - 1), (
            "steps are waited for"
        )


def test_random_works_fill_every_slot_exactly_once():
    numbers = random.Random(1)
    assignment = Assignment("completion", 4, 8)
    slots = {assignment.assign(index, numbers.randint(1, 1000)) for index in range(32)}
    assert slots == {(replica, slot) for replica in range(4) for slot in range(8)}


def test_repeated_missing_and_unknown_groups_violate_i2():
    assignment = Assignment("completion", 2, 2)
    assignment.assign(0, 1)
    with pytest.raises(InvariantViolation, match="I2 exactly once: group 0"):
        assignment.assign(0, 1)
    with pytest.raises(InvariantViolation, match="I2 exactly once: group 4"):
        assignment.assign(4, 1)
    with pytest.raises(InvariantViolation, match="each must get 2"):
        assignment.finish()


def test_balancing_by_operations_beats_balancing_by_tokens():
    """Groups of about as many tokens, of 8 equal responses or of one long one: those that tokens
    pair are of one kind.
    """
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"max_response_tokens": 8192}}
    )
    work = GroupWork(ModelSpec.parse("m", SMALL), config)
    groups = [[8003] + [1] * 7, [1000] * 7 + [1005], [1000] * 7 + [1003], [7993] + [1] * 7]
    assert work(100, groups[3]) > 3 * work(100, groups[1]), "attention is by pairs"

    def imbalance(costs: list[float]) -> float:
        loads = [0.0, 0.0]
        for lengths, (replica, _) in zip(
            groups, Assignment("completion", 2, 2).assign_all(list(range(4)), costs), strict=True
        ):
            loads[replica] += work(100, lengths)
        return max(loads) / (sum(loads) / 2) - 1

    assert imbalance([work(100, lengths) for lengths in groups]) < 0.01
    assert imbalance([100.0 + sum(lengths) for lengths in groups]) > 0.3


@pytest.mark.parametrize("responses", [None, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_work_is_that_of_the_microbatches_as_they_are_packed(responses, shared):
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"responses_per_prompt": 4},
            "microbatch": {"responses": responses},
            "attention": {"shared_prompt": shared},
        }
    )
    lengths = [5, 9, 2, 7]
    per_layer_token = 6 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    prompts = 4 if not shared else 4 // (responses or 4)
    tokens = prompts * 10 + sum(lengths)
    # a row sees itself and all before it in its own sequence; a shared prompt's rows are there once
    # per microbatch
    pairs = prompts * (10 * 11 // 2) + sum(n * (n + 1) // 2 + n * 10 for n in lengths)
    expected = (
        2 * per_layer_token * tokens + 3.5 * 4 * 2 * 4 * 16 * pairs + 6 * 64 * 50 * sum(lengths)
    )
    assert GroupWork(ModelSpec.parse("m", SMALL), config)(10, lengths) == pytest.approx(expected)
