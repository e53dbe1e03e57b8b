"""Rules for deadlines: what waits for something ends after it; trainer.wait_timeout_s follows requests, agents and rewards."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.sections import SLOWEST_TOKEN_S
from pa_npu.config.tree import COLLECTIVE_MARGIN_S, ConfigTree

_LONGEST_WAIT_S = 10_000_000  # four months; the clocks of some libraries overflow above


def broken_deadlines(c: ConfigTree) -> Iterator[str]:
    """Yields deadlines that end before those of the work they wait for: the error would name the wrong party."""
    for section, values in c:
        for key, value in values:
            if key.endswith("_s") and value is not None and value > _LONGEST_WAIT_S:
                yield f"{section}.{key}: {value:g} s is longer than any run; set it to {_LONGEST_WAIT_S} or less"
    wait_s = c.wait_timeout_s
    if c.environment.name == "agents":
        what = "the sessions of a group"
        why = (
            f"environment.timeout_s = {c.environment_timeout_s:g} for each of rollout.responses_per_prompt = "
            f"{c.rollout.responses_per_prompt}, agent.concurrent = {c.agent.concurrent} at once, which begin when others end"
        )
    else:
        what = "a request"
        why = (
            f"rollout.request_timeout_s = {c.rollout.request_timeout_s:g} and {SLOWEST_TOKEN_S:g} s for each of "
            f"rollout.max_response_tokens = {c.rollout.max_response_tokens}"
        )
    if c.trainer.wait_timeout_s is None and wait_s > _LONGEST_WAIT_S:
        yield f"trainer.wait_timeout_s: a group may take {wait_s:g} s ({why}), longer than any run; lower these"
    elif wait_s < c.group_limit_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.group_limit_s:g} s that {what} may take ({why}), so that "
            f"trainers would give up on a group that still has time; set it to at least that, or remove it"
        )
    elif c.reward_limit_s and wait_s < c.group_limit_s + c.reward_limit_s:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than the {c.group_limit_s:g} s of {what} and the "
            f"{c.reward_limit_s:g} s that the group's rewards may take then (reward.judge: timeout_s and concurrency; "
            f"reward.code.timeout_s and reward.workers), so that trainers would give up on a group that still has time; "
            f"set it to at least {c.group_limit_s + c.reward_limit_s:g}, remove it, or lower these"
        )
    if c.collective_timeout_s < c.publish_peer_timeout_s + COLLECTIVE_MARGIN_S:
        yield (
            f"trainer.wait_timeout_s: {wait_s:g} s is shorter than twice publish.timeout_s = {c.publish.timeout_s:g} s, for which "
            f"the tensor-parallel peers of a rank that joins engines and sends to them may wait in a collective; set it to at "
            f"least {c.publish_peer_timeout_s:g}, or lower publish.timeout_s"
        )
