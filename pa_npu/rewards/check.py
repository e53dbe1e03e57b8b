"""The check of reward functions before a run: the workers of the run load them, and score one group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.functions import CONCURRENT, FunctionSpec, build_concurrent, build_function, function_specs
from pa_npu.rewards.pool import Workers
from pa_npu.rewards.sandbox import SandboxFailed
from pa_npu.rewards.types import RewardInput


def check_reward_functions(config: Config, sample: RewardInput | None = None, ask_judge: bool = True) -> list[str]:
    """Loads the reward functions as the workers will, and rewards one group with the user's, the judge and the sandbox.

    Call it before a run; it returns the lines that the run begins with. sample: a group of the dataset; None only loads them.
    ask_judge: False sends the judge nothing. Raises UserError where one cannot be used. Not for use in an event loop.
    """
    return asyncio.run(_check(config, sample, ask_judge))


async def _check(config: Config, sample: RewardInput | None, ask_judge: bool) -> list[str]:
    specs = function_specs(config.reward, config.run.dir, config.rollout.max_response_tokens)
    own = tuple(spec for spec in specs if ":" in spec.name)
    for spec in specs:
        if spec not in own and spec.name not in CONCURRENT:
            build_function(spec)
    lines = []
    for spec in specs:
        if spec.name == "code":
            try:
                isolation = await build_concurrent(spec).check()
            except SandboxFailed as failed:
                said = str(failed)
                raise DataError(said if said.startswith("reward.code") else f"reward.code: {said}") from None
            lines.append(f"reward.code: programs of responses run at isolation {isolation}")
    others = await _try(config, own, sample, waits=False) if own else set()
    waiting = tuple(
        spec
        for spec in specs
        if spec.label in others or (sample and (spec.name == "code" or (spec.name == "judge" and ask_judge)))
    )
    if waiting:
        await _try(config, waiting, sample, waits=True)
    return lines


async def _try(config: Config, specs: Sequence[FunctionSpec], sample: RewardInput | None, *, waits: bool) -> set[str]:
    """One worker, with one group where there is one. Returns the labels of functions that it leaves to the other kind."""
    workers = Workers(specs, config.reward.timeout_s, waits=waits)
    try:
        await workers.start()
        reply = await workers.score(sample) if sample else {}
    except DeadlineExceeded as late:
        raise DataError(f"reward.functions: {late}") from None
    finally:
        await workers.close()
    if reply.get("fatal"):
        raise DataError(reply["fatal"])
    if "failure" in reply:
        names = ", ".join(spec.name for spec in specs)
        raise DataError(
            f"reward.functions: {names} did not reward a group of the dataset: {reply['failure']}; correct what its output above "
            f"says"
        )
    for label, error in reply.get("errors", {}).items():
        what = f"reward.judge.url: {config.reward.judge.url}" if label == "judge" else f"reward.functions: {label}"
        remedy = "let its server answer" if label == "judge" else "correct the function"
        raise DataError(f"{what} fails for a group of the dataset: {error}; {remedy}")
    return workers.others


def sample_group(prompt: str, answer: str, row: Mapping[str, Any], size: int) -> RewardInput:
    """A made-up group to try reward functions on: every other response is right."""
    responses = [f"#### {answer}" if number % 2 == 0 else "I do not know." for number in range(size)]
    return RewardInput(prompt, answer, responses, [8] * size, row)
