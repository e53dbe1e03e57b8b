"""I2 on the trainers' side: what was trained is what was dispatched, response by response; every way to break it is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import DISPATCHED, Dispatched, DispatchedGroup
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.samples.microbatch import build_microbatches
from pa_npu.samples.notice import Notice
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.invariants import check_contents, check_dispatched, check_trained
from pa_npu.trainer.loop import Consumed, IterationChecks
from tests.helpers.backend import Source, make_learner
from tests.helpers.megatron import model_config, single_process
from tests.helpers.models import make_model
from tests.helpers.policies import probe_plan
from tests.helpers.trainer_rank import make_groups

LENGTHS = {0: (3, 5), 1: (2, 2), 2: (7, 1), 3: (4, 4)}
# order=completion: any group may be on any replica
OWNERS = {0: 1, 1: 0, 2: 0, 3: 1}
DISPATCH = Dispatched(
    4, tuple(DispatchedGroup(index, OWNERS[index], LENGTHS[index]) for index in (2, 0, 3, 1))
)


def responses(*groups: int) -> list[TrainedResponse]:
    return [
        TrainedResponse(group, number, tokens)
        for group in groups
        for number, tokens in enumerate(LENGTHS[group])
    ]


def check(dispatched: Dispatched, replica: int, trained: list[TrainedResponse]) -> None:
    check_dispatched(dispatched, 4, replicas=2, groups_per_replica=2)
    check_trained(dispatched, replica, trained)


def test_every_response_once_in_any_order_passes_on_both_replicas() -> None:
    check(DISPATCH, 0, responses(1, 2))
    check(DISPATCH, 1, responses(3, 0)[::-1])


def test_a_group_that_was_read_as_another_than_was_put_ends_the_iteration() -> None:
    groups = tuple(
        DispatchedGroup(index, 0, LENGTHS[index], content=f"{index}") for index in (0, 1)
    )
    dispatched = Dispatched(4, groups)
    check_contents(dispatched, 0, {0: "0", 1: "1"})
    check_contents(dispatched, 0, {0: "0", 1: ""})  # of which a notice was read
    with pytest.raises(InvariantViolation, match="iteration 4, replica 0: group 1 was read with"):
        check_contents(dispatched, 0, {0: "0", 1: "2"})
    check_contents(dispatched, 1, {0: "0", 1: "2"})  # another replica's


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (
            responses(1, 2) + responses(2)[:1],
            r"trained too much: response 0 of group 2 \(7 tokens\); dispatched were 4",
        ),
        (
            responses(1, 2)[:-1],
            r"left out: response 1 of group 2 \(1 tokens\).* 12 tokens, trained 3 with 11",
        ),
        # the number of responses is right, and yet
        (
            responses(1) + responses(2)[:1] * 2,
            "trained too much: response 0 of group 2.*left out: response 1 of group 2",
        ),
        (
            responses(1, 1),
            "trained too much: response 0 of group 1.*left out: response 0 of group 2",
        ),
        (responses(1, 3), r"response 0 of group 3 \(4 tokens, of replica 1\).*left out"),
        (responses(1, 2, 0), "of replica 1"),
        (
            [*responses(1, 2), TrainedResponse(9, 0, 5)],
            r"response 0 of group 9 \(5 tokens, of no replica\)",
        ),
        (
            [*responses(1), TrainedResponse(2, 0, 6), TrainedResponse(2, 1, 2)],
            r"group 2 \(6 tokens\).*left out",
        ),
        ([], "left out: response 0 of group 2 .* trained 0 with 0"),
    ],
    ids=[
        "microbatch twice",
        "microbatch left out",
        "one twice, one left out",
        "group twice, group left out",
        "another replica's group instead",
        "another replica's group too",
        "a group from nowhere",
        "tokens cut and added",
        "nothing trained",
    ],
)
def test_what_is_trained_otherwise_is_named(trained: list[TrainedResponse], said: str) -> None:
    with pytest.raises(
        InvariantViolation, match=f"I2 exactly once: iteration 4, replica 0: .*(?:{said})"
    ) as raised:
        check(DISPATCH, 0, trained)
    assert "\n" not in str(raised.value)


def _with(number: int, **fields: Any) -> Dispatched:
    return replace(
        DISPATCH,
        groups=tuple(replace(g, **fields) if g.index == number else g for g in DISPATCH.groups),
    )


@pytest.mark.parametrize(
    ("dispatched", "said"),
    [
        (_with(3, index=2), r"group 2 was dispatched 2 times, to replicas \[0, 1\]"),
        (_with(3, index=4), "group 4 was dispatched, but groups go from 0 to 3"),
        (_with(3, index=-1), "group -1 was dispatched"),
        (_with(3, replica=0), r"the replicas got \{0: 3, 1: 1\} groups instead of 2 each"),
        (_with(3, replica=2), "instead of 2 each"),
        (replace(DISPATCH, groups=DISPATCH.groups[1:]), r"\{0: 1, 1: 2\} groups"),
        (replace(DISPATCH, iteration=3), "the coordinator speaks of iteration 3"),
    ],
    ids=[
        "same group twice",
        "beyond the batch",
        "before it",
        "uneven",
        "no such replica",
        "one missing",
        "iteration",
    ],
)
def test_a_dispatch_that_is_no_whole_is_seen_by_every_trainer(
    dispatched: Dispatched, said: str
) -> None:
    for replica, trained in ((0, responses(1, 2)), (1, responses(3, 0))):
        with pytest.raises(InvariantViolation, match=f"I2 exactly once: iteration 4: .*{said}"):
            check(dispatched, replica, trained)


def test_parts_of_a_group_make_up_what_each_replica_has_to_train() -> None:
    parts = (DispatchedGroup(0, 1, (3,), 0), DispatchedGroup(0, 0, (5,), 1))
    divided = replace(DISPATCH, groups=(*(g for g in DISPATCH.groups if g.index), *parts))

    def check_parts(dispatched: Dispatched, replica: int, trained: list[TrainedResponse]) -> None:
        check_dispatched(dispatched, 4, replicas=2, groups_per_replica=2, unequal=True)
        check_trained(dispatched, replica, trained)

    first, second = responses(0)
    check_parts(divided, 0, [*responses(1, 2), second])
    check_parts(divided, 1, [*responses(3), first])
    with pytest.raises(
        InvariantViolation,
        match=r"trained too much: response 0 of group 0 \(3 tokens, of replica 1\)",
    ):
        check_parts(divided, 0, [*responses(1, 2), first, second])
    with pytest.raises(InvariantViolation, match="group 0 was dispatched 2 times"):
        check(divided, 0, [*responses(1, 2), second])
    for wrong in (replace(parts[1], first=0), replace(parts[1], first=2)):
        groups = (*(g for g in DISPATCH.groups if g.index), parts[0], wrong)
        with pytest.raises(
            InvariantViolation, match=r"group 0 was dispatched 2 times, to replicas \[1, 0\]"
        ):
            check_parts(replace(DISPATCH, groups=groups), 0, [])
    with pytest.raises(
        InvariantViolation, match="responses before number 1 of group 0 were not dispatched"
    ):
        check_parts(replace(DISPATCH, groups=(*groups[:3], parts[1])), 0, [])


# the same through a learner: its count is taken where a microbatch goes through the model

GROUPS, RESPONSES = 4, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"))
    with single_process(model_config(path)):
        yield path


NO_BACKEND: Any = None  # agreement measures nothing here


@pytest.mark.parametrize("fault", [None, "twice", "left out", "another group's"])
def test_a_microbatch_trained_twice_or_left_out_inside_a_replica_ends_the_iteration(
    fault: str | None, model: Path, tmp_path: Path
) -> None:
    config = model_config(
        model,
        run={"dir": str(tmp_path)},
        rollout={"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        schedule={"prompts_per_iteration": GROUPS},
        microbatch={"responses": 2},
        # made-up log-probs
        publish={"noise_margin": None},
    )
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    microbatches = [m for group in groups for m in build_microbatches(group, 2, True, 1)]
    wrong = {
        None: microbatches,
        "twice": [*microbatches[:3], microbatches[2], *microbatches[3:]],
        "left out": [*microbatches[:3], *microbatches[4:]],
        "another group's": [*microbatches[:-1], microbatches[0]],
    }[fault]
    learner, _ = make_learner(config)
    trained = learner.accumulate(Source(wrong))
    update = learner.step()

    channel = StoreChannel(dist.HashStore())
    sent = [DispatchedGroup(g.index, 0, tuple(g.trained_lengths.tolist())) for g in groups]
    DISPATCHED.put(channel, Dispatched(0, tuple(sent)), iteration=0)
    checks = IterationChecks(
        config, channel, Agreement(config, NO_BACKEND, probe_plan(config)), replica=0
    )
    none = DifferenceSums()
    consumed = Consumed(update.report, trained, [update.normaliser], update.differences, none, none)
    if fault is None:
        checks(0, consumed)
        return
    with pytest.raises(InvariantViolation, match="I2 exactly once: iteration 0, replica 0"):
        checks(0, consumed)


def test_a_coordinator_that_never_says_what_it_dispatched_ends_the_wait(
    model: Path, tmp_path: Path
) -> None:
    config = model_config(model, run={"dir": str(tmp_path)})
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"wait_timeout_s": 0.01})}
    )
    checks = IterationChecks(
        config,
        StoreChannel(dist.HashStore()),
        Agreement(config, NO_BACKEND, probe_plan(config)),
        replica=0,
    )
    with pytest.raises(DeadlineExceeded, match="the coordinator: what iteration 3 consists of"):
        checks(3, None)


def notice(group: int) -> Notice:
    """Group `group` as a replica counts it that trains it by rule."""
    lengths = list(LENGTHS[group])
    return Notice(
        iteration=4,
        index=group,
        prompt_id=group,
        first=0,
        rewards=[1.0, 1.0],
        response_tokens=lengths,
        leading_tokens=lengths,
        version_range=(4, 4),
    )


# replica 0 has groups 1 and 2, of which 2 is trained by rule
BY_RULE = Dispatched(
    4, tuple(replace(group, by_rule=group.index == 2) for group in DISPATCH.groups)
)


def test_a_group_by_rule_is_counted_once_and_not_computed() -> None:
    check_dispatched(BY_RULE, 4, replicas=2, groups_per_replica=2)
    check_trained(BY_RULE, 0, responses(1), [notice(2)])


@pytest.mark.parametrize(
    ("computed", "counted", "said"),
    [
        (responses(1), [], r"left out by rule: response 0 of group 2"),
        (responses(1, 2), [notice(2)], r"trained too much: response 0 of group 2"),
        (responses(1), [notice(2), notice(2)], r"trained too much by rule: response 0 of group 2"),
        ([], [notice(2), notice(1)], r"trained too much by rule: response 0 of group 1"),
    ],
)
def test_a_group_by_rule_that_is_trained_otherwise_is_named(
    computed: list[TrainedResponse], counted: list[Notice], said: str
) -> None:
    with pytest.raises(InvariantViolation, match=said):
        check_trained(BY_RULE, 0, computed, counted)
