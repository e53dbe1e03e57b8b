"""Groups whose rewards are all equal are trained by rule: told to trainers and records, and no work for any replica."""

from __future__ import annotations

import pytest

from pa_npu.dispatch.assignment import Assignment
from pa_npu.samples.group_digest import digest_group
from tests.helpers.scripted_production import GROUPS, ScriptedEngine, config, produce

# ScriptedRewards gives response i of group g (g * i) % 3
EQUAL = {0, 3, 6}
ORDER = [2, 0, 1, 3, 7, 6, 5, 4]


@pytest.mark.parametrize("order", ["prompt", "completion"])
@pytest.mark.parametrize("stream", [True, False])
async def test_groups_with_equal_rewards_are_put_and_dispatched_by_rule(
    store_thread, stream, order
):
    chosen = config(schedule={"skip_zero_advantage": True, "stream": stream, "order": order})
    produced, shelf = await produce(chosen, [ScriptedEngine("a", ORDER)], store_thread)
    dispatched = produced.dispatched.groups
    assert shelf.by_rule == EQUAL
    assert {group.index for group in dispatched if group.by_rule} == EQUAL
    assert {group.index for group in dispatched} == set(range(GROUPS))
    skipped = [group for group in dispatched if group.by_rule]
    assert produced.numbers["groups_skipped"] == len(EQUAL)
    assert produced.numbers["tokens_skipped"] == sum(sum(one.response_tokens) for one in skipped)
    assert produced.numbers["groups"] == GROUPS


async def test_what_depends_on_the_whole_batch_is_decided_with_it(store_thread):
    chosen = config(
        schedule={"skip_zero_advantage": True, "stream": False},
        algorithm={"advantage": "batch-std"},
    )
    _, shelf = await produce(chosen, [ScriptedEngine("a", ORDER)], store_thread)
    assert shelf.by_rule == EQUAL


@pytest.mark.parametrize("stream", [True, False])
async def test_the_record_and_the_chain_are_those_of_a_run_without_the_rule(store_thread, stream):
    """But for what says that groups were skipped, and for times."""
    made = {}
    for skips in (True, False):
        chosen = config(
            schedule={"skip_zero_advantage": skips, "stream": stream, "order": "prompt"}
        )
        made[skips] = await produce(chosen, [ScriptedEngine("a", ORDER)], store_thread)
    (with_rule, shelf), (without, every) = made[True], made[False]
    assert not every.by_rule
    assert {slot: group.index for slot, group in shelf.groups.items()} == {
        slot: group.index for slot, group in every.groups.items()
    }
    for slot, group in shelf.groups.items():
        ours, theirs = (digest_group(one, {slot: None}) for one in (group, every.groups[slot]))
        assert (ours.tokens, ours.context) == (theirs.tokens, theirs.context)
    digests = [
        {digest.index: digest for digest in made[skips][0].digests} for skips in (True, False)
    ]
    for index in range(GROUPS):
        ours = digests[0][index]
        theirs = digests[1][index]
        assert (ours.places, ours.tokens, ours.logprobs) == (
            theirs.places,
            theirs.tokens,
            theirs.logprobs,
        )
    differing = {
        name
        for name in {**with_rule.numbers, **without.numbers}
        if with_rule.numbers.get(name) != without.numbers.get(name)
    }
    assert differing <= {
        "groups_skipped",
        "tokens_skipped",
        "generate_s",
        "replica_imbalance",
        "tail_waste",
    }


async def test_by_default_groups_are_trained_by_rule_where_the_loss_allows_it(store_thread):
    _, shelf = await produce(config(), [ScriptedEngine("a", ORDER)], store_thread)
    assert shelf.by_rule == EQUAL
    chosen = config(algorithm={"entropy_coef": 0.01})
    _, shelf = await produce(chosen, [ScriptedEngine("a", ORDER)], store_thread)
    assert not shelf.by_rule


async def test_with_the_key_off_every_group_is_computed(store_thread):
    chosen = config(schedule={"skip_zero_advantage": False})
    produced, shelf = await produce(chosen, [ScriptedEngine("a", ORDER)], store_thread)
    assert not shelf.by_rule
    assert not any(group.by_rule for group in produced.dispatched.groups)
    assert "groups_skipped" not in produced.numbers


def test_a_group_without_work_makes_no_replica_fuller():
    assignment = Assignment("completion", 2, 4)
    slots = assignment.assign_all(list(range(8)), [5.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0])
    assignment.finish()
    works = [5.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0]
    loads = [0.0, 0.0]
    for (replica, _), work in zip(slots, works, strict=True):
        loads[replica] += work
    assert loads == [10.0, 10.0]
