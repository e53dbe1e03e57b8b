"""Advice: each rule speaks where its numbers call for it, names the key to change, and is silent otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from pa_npu.viewer.advice import Advice, advise
from tests.helpers.finished_run import metrics

CONFIG = {
    "schedule.stream": True,
    "rollout.max_response_tokens": 64,
}
CALM = {"trainer_idle": 0.1, "engine_idle": 0.1}


def given(config: dict[str, Any] | None = None, **numbers: Any) -> list[Advice]:
    records = [metrics(iteration) | CALM | numbers for iteration in range(12)]
    return advise(records, CONFIG | (config or {}))


def test_a_run_without_trouble_gets_none_and_so_does_an_empty_one() -> None:
    assert given() == []
    assert advise([], CONFIG) == [] and advise([{"iteration": 0}], {}) == []


def test_devices_that_decode_and_train_are_not_moved_from_one_side_to_the_other() -> None:
    """Their trainers wait while they decode, and their engines while they train."""
    both = {"trainer_idle": 0.6, "engine_idle": 0.3}
    assert given(**both, device_idle=0.1) == []
    (roles,) = given(**both, device_idle=0.4)
    assert (
        "neither decoded nor trained for 40%" in roles.text
        and "schedule.prompts_per_iteration" in roles.text
    )
    (turns,) = given({"schedule.stream": False}, **both, device_idle=0.4)
    assert "schedule.stream=true" in turns.text and turns.level == "act"


def test_synchronous_iterations_between_periodic_ones_are_no_reason_for_advice() -> None:
    turns = [
        {"periodic": bool(number % 2), "trainer_idle": 0.1 if number % 2 else 0.9}
        for number in range(12)
    ]
    records = [metrics(iteration) | CALM | turn for iteration, turn in enumerate(turns)]
    assert advise(records, CONFIG) == []
    assert advise([record | {"periodic": False} for record in records], CONFIG), (
        "a synchronous run gets advice"
    )


@pytest.mark.parametrize(
    ("numbers", "config", "title", "key"),
    [
        (
            {"trainer_idle": 0.6, "engine_idle": 0.1},
            {},
            "Trainers wait for engines",
            "rollout.engines",
        ),
        (
            {"trainer_idle": 0.1, "engine_idle": 0.6},
            {},
            "Engines wait for trainers",
            "trainer.devices",
        ),
        (
            {"trainer_idle": 0.6, "engine_idle": 0.1},
            {"trainer.devices": 1},
            "Trainers wait for engines",
            "add engines (rollout.engines), or let devices do both (placement.colocate=true)",
        ),
        (
            {"trainer_idle": 0.1, "engine_idle": 0.6},
            {"rollout.engines": 1},
            "Engines wait for trainers",
            "add trainers (trainer.devices), or let devices do both",
        ),
        (
            {"trainer_idle": 0.5, "engine_idle": 0.5},
            {},
            "wait for each other",
            "schedule.prompts_per_iteration",
        ),
        ({"trainer_idle": 0.5}, {"schedule.stream": False}, "whole batch", "schedule.stream=true"),
        ({"truncated_ratio": 0.35}, {}, "cut at the limit", "rollout.max_response_tokens=64"),
        ({"equal_reward_ratio": 0.7, "accuracy": 0.9}, {}, "teach nothing", "Harder"),
        ({"equal_reward_ratio": 0.7, "accuracy": 0.1}, {}, "teach nothing", "Easier"),
        ({"logodds_diff_mean": 1.5e-3}, {}, "drift apart", "75% of the limit"),
        ({"reward_errors": 2}, {}, "Reward functions fail", "reward.timeout_s"),
        ({"reward_no_verdict": {"judge": 3}}, {}, "no verdict", "by judge"),
        ({"checkpoint_failed": 4}, {}, "checkpoint could not", "version 4"),
        ({"records_lost": 3}, {}, "Records were lost", "3"),
    ],
)
def test_each_rule_speaks_and_names_what_to_change(
    numbers: dict[str, Any], config: dict[str, Any], title: str, key: str
) -> None:
    (actual,) = given(config, **numbers)
    assert title in actual.title and key in actual.text


def test_rules_that_do_not_apply_are_silent() -> None:
    assert not given({"schedule.dynamic_sampling": True}, equal_reward_ratio=0.9)
    assert not given({"rollout.ignore_eos": True}, truncated_ratio=1.0)


def test_entropy_that_falls_is_a_collapse_only_while_the_task_is_not_solved() -> None:
    def falling(accuracy: float) -> list[Advice]:
        records = [
            metrics(i % 12) | CALM | {"entropy": 1.0 if i < 12 else 0.05, "accuracy": accuracy}
            for i in range(24)
        ]
        return advise(records, CONFIG)

    (actual,) = falling(0.4)
    assert actual.title == "Entropy has collapsed" and "clip_high" in actual.text
    assert falling(0.95) == []


def test_what_costs_most_comes_first() -> None:
    actual = given(trainer_idle=0.6, engine_idle=0.1, equal_reward_ratio=0.9)
    assert [advice.level for advice in actual] == ["act", "look"]
