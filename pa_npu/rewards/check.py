"""The check of reward functions before a run: the workers of the run load them, and score one group."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.data.prompts import PromptSet
from pa_npu.errors import DataError, DeadlineExceeded
from pa_npu.rewards.code_tests import row_tests
from pa_npu.rewards.functions import (
    CONCURRENT,
    RewardInput,
    build_concurrent,
    build_function,
    function_specs,
)
from pa_npu.rewards.judge import judge_key
from pa_npu.rewards.pool import RewardPool
from pa_npu.rewards.sandbox import SandboxFailed


def check_reward_functions(
    config: Config, sample: RewardInput | None = None, ask_judge: bool = True
) -> list[str]:
    """Loads the reward functions as the workers will, and rewards one group with the user's, the
    judge and the sandbox.

    Call it before a run; it returns the lines that the run begins with. sample: a group of the
    dataset; None only loads them. ask_judge: False sends the judge nothing. Raises UserError where
    one cannot be used. Not for use in an event loop.
    """
    return asyncio.run(_check(config, sample, ask_judge))


async def _check(config: Config, sample: RewardInput | None, ask_judge: bool) -> list[str]:
    reward = config.reward
    # Scores of a run that is there are asked for; a run that is refused leaves no directory behind.
    run_dir = config.run.dir if Path(config.run.dir).is_dir() else None
    place = (run_dir, config.rollout.max_response_tokens)
    if any(function.name == "judge" for function in reward.functions):
        judge_key()
    lines = []
    for spec in function_specs(reward, *place):
        if spec.name == "code":
            try:
                isolation = await build_concurrent(spec).check()
            except SandboxFailed as failed:
                said = str(failed)
                raise DataError(
                    said if said.startswith("reward.code") else f"reward.code: {said}"
                ) from None
            lines.append(f"reward.code: programs of responses run at isolation {isolation}")
        elif ":" not in spec.name and spec.name not in CONCURRENT:
            build_function(spec)
    tried = {"code", *(["judge"] if ask_judge else [])} if sample else set()
    functions = tuple(one for one in reward.functions if ":" in one.name or one.name in tried)
    try:
        async with RewardPool(
            reward.model_copy(update={"functions": functions, "workers": 1}), *place
        ) as pool:
            for labels, reply in await pool.replies(sample) if sample else ():
                _refuse(config, labels, reply)
    except DeadlineExceeded as late:
        raise DataError(f"reward.functions: {late}") from None
    return lines


def check_row_tests(config: Config, prompts: PromptSet, key: str, first_id: int = 0) -> None:
    """Reads the tests of every row where `code` is a reward. Raises DataError that names the first
    row with a test that is bad.

    key: the configuration key that names the dataset. first_id: prompt_id of the dataset's first
    row.
    """
    if all(function.name != "code" for function in config.reward.functions):
        return
    for prompt in prompts.prompts:
        try:
            row_tests(prompt.row, config.reward.code.tests)
        except DataError as error:
            raise DataError(
                f"{key}: {prompts.path}, row {prompt.prompt_id - first_id + 1}: {error}"
            ) from None


def _refuse(config: Config, labels: Collection[str], reply: Mapping[str, Any]) -> None:
    """Raises DataError where functions have not rewarded the group."""
    if "failure" in reply:
        raise DataError(
            f"reward.functions: {', '.join(labels)} did not reward a group of the dataset: "
            f"{reply['failure']}; correct what its output above says"
        )
    for label, error in reply["errors"].items():
        what = (
            f"reward.judge.url: {config.reward.judge.url}"
            if label == "judge"
            else f"reward.functions: {label}"
        )
        remedy = "let its server answer" if label == "judge" else "correct the function"
        raise DataError(f"{what} fails for a group of the dataset: {error}; {remedy}")


def sample_group(prompt: str, answer: str, row: Mapping[str, Any], size: int) -> RewardInput:
    """A made-up group to try reward functions on: every other response is right."""
    responses = [
        f"#### {answer}" if number % 2 == 0 else "I do not know." for number in range(size)
    ]
    return RewardInput(prompt, answer, responses, [8] * size, row)
