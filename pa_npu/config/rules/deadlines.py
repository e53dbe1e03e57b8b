"""Rules for deadlines: what waits for something ends after it; trainer.wait_timeout_s follows requests, agents and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from pa_npu.config.presets import set_keys
from pa_npu.config.sections import SLOWEST_TOKEN_S, AgentConfig, RewardConfig, RolloutConfig, TrainerConfig
from pa_npu.config.tree import COLLECTIVE_MARGIN_S, ConfigTree, request_limit_s, reward_limit_s, sessions_limit_s

_LONGEST_WAIT_S = 10_000_000  # four months; the clocks of some libraries overflow above


def fill_wait(tree: Any) -> Any:
    """The tree with trainer.wait_timeout_s where the user left it out and a group may take longer than the default."""
    if not isinstance(tree, dict) or not isinstance(tree.get("trainer", {}), dict | TrainerConfig):
        return tree  # the sections' own checks say what is wrong
    trainer = set_keys(tree.get("trainer"))
    if "wait_timeout_s" in trainer:
        return tree
    given = set_keys(tree.get("rollout"))
    values = [
        given.get(key, RolloutConfig.model_fields[key].default) for key in ("request_timeout_s", "max_response_tokens")
    ]
    if not all(type(value) in (int, float) for value in values):
        return tree
    responses = given.get("responses_per_prompt", RolloutConfig.model_fields["responses_per_prompt"].default)
    if type(responses) is not int:
        return tree
    try:
        needed_s = reward_limit_s(RewardConfig.model_validate(tree.get("reward", {})), responses)
        if set_keys(tree.get("environment")).get("name") == "agents":
            needed_s += sessions_limit_s(AgentConfig.model_validate(tree.get("agent", {})), responses)
        else:
            needed_s += request_limit_s(*values)
    except ValidationError:
        return tree  # it is said when the tree is checked
    if not TrainerConfig.model_fields["wait_timeout_s"].default < needed_s <= _LONGEST_WAIT_S:
        return tree
    return {**tree, "trainer": {**trainer, "wait_timeout_s": needed_s}}


def broken_deadlines(c: ConfigTree) -> Iterator[str]:
    """Yields deadlines that end before those of the work they wait for: the error would name the wrong party."""
    for section, values in c:
        for key, value in values:
            if key.endswith("_s") and value is not None and value > _LONGEST_WAIT_S:
                yield f"{section}.{key}: {value:g} s is longer than any run; set it to {_LONGEST_WAIT_S} or less"
    wait_s = c.trainer.wait_timeout_s
    if c.environment.name == "agents":
        what = "the sessions of a group"
        why = (
            f"agent.timeout_s = {c.agent.timeout_s:g} for each of rollout.responses_per_prompt = "
            f"{c.rollout.responses_per_prompt}, agent.concurrent = {c.agent.concurrent} at once, which begin when others end"
        )
    else:
        what = "a request"
        why = (
            f"rollout.request_timeout_s = {c.rollout.request_timeout_s:g} and {SLOWEST_TOKEN_S:g} s for each of "
            f"rollout.max_response_tokens = {c.rollout.max_response_tokens}"
        )
    if wait_s < c.group_limit_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.group_limit_s:g} s that {what} may take ({why}), so that "
            f"trainers would give up on a group that still has time; set it to at least that, or remove it"
        )
    elif c.reward_limit_s and wait_s < c.group_limit_s + c.reward_limit_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.group_limit_s:g} s of {what} and the "
            f"{c.reward_limit_s:g} s that the group's rewards may take then (reward.judge: attempts, timeout_s and concurrency; "
            f"reward.code: most_tests, timeout_s and concurrency), so that trainers would give up on a group that still has time; "
            f"set it to at least {c.group_limit_s + c.reward_limit_s:g}, remove it, or lower these"
        )
    if c.collective_timeout_s < c.publish_peer_timeout_s + COLLECTIVE_MARGIN_S:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than twice publish.timeout_s = {c.publish.timeout_s:g} s, for which "
            f"the tensor-parallel peers of a rank that joins engines and sends to them may wait in a collective; set it to at "
            f"least {c.publish_peer_timeout_s:g}, or lower publish.timeout_s"
        )
