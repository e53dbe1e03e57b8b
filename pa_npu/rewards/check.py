"""Checks reward functions before a run: the run's workers load them and score one group."""

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
    """Loads the reward functions as the workers will, and has one group rewarded.

    Call it before a run, outside of an event loop. Only the user's functions, the judge and the
    sandbox reward the group: the built-in functions cannot fail.

    Args:
        config: the run's configuration.
        sample: a group of the dataset; None loads the functions without calling them.
        ask_judge: False sends the judge nothing.

    Returns the lines that the run begins with. Raises UserError if a function cannot be used.
    """
    return asyncio.run(_check(config, sample, ask_judge))


async def _check(config: Config, sample: RewardInput | None, ask_judge: bool) -> list[str]:
    reward = config.reward
    # An existing run's stored scores are used; a refused run must leave no directory behind.
    run_dir = config.run.dir if Path(config.run.dir).is_dir() else None
    max_tokens = config.rollout.max_response_tokens
    if any(function.name == "judge" for function in reward.functions):
        judge_key()
    lines = []
    for spec in function_specs(reward, run_dir, max_tokens):
        if spec.name == "code":
            try:
                isolation = await build_concurrent(spec).check()
            except SandboxFailed as failed:
                message = str(failed)
                if not message.startswith("reward.code"):
                    message = f"reward.code: {message}"
                raise DataError(message) from None
            lines.append(f"reward.code: programs of responses run at isolation {isolation}")
        elif ":" not in spec.name and spec.name not in CONCURRENT:
            build_function(spec)

    scored: set[str] = set()
    if sample is not None:
        scored.add("code")
        if ask_judge:
            scored.add("judge")
    functions = tuple(
        function for function in reward.functions if ":" in function.name or function.name in scored
    )
    pool_config = reward.model_copy(update={"functions": functions, "workers": 1})
    try:
        async with RewardPool(pool_config, run_dir, max_tokens) as pool:
            if sample is not None:
                for labels, reply in await pool.replies(sample):
                    _refuse(config, labels, reply)
    except DeadlineExceeded as late:
        raise DataError(f"reward.functions: {late}") from None
    return lines


def check_row_tests(config: Config, prompts: PromptSet, key: str, first_id: int = 0) -> None:
    """Reads the tests of every row where `code` is a reward.

    `key`: the configuration key that names the dataset. `first_id`: prompt_id of its first row.
    Raises DataError that names the first row with a bad test.
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
    """Raises DataError if a function has not rewarded the group."""
    if "failures" in reply:
        raise DataError(
            f"reward.functions: {', '.join(labels)} did not reward a group of the dataset: "
            f"{next(iter(reply['failures'].values()))}; correct what its output above says"
        )
    for label, error in reply["errors"].items():
        if label == "judge":
            place = f"reward.judge.url: {config.reward.judge.url}"
            remedy = "let its server answer"
        else:
            place = f"reward.functions: {label}"
            remedy = "correct the function"
        raise DataError(f"{place} fails for a group of the dataset: {error}; {remedy}")


def sample_group(prompt: str, answer: str, row: Mapping[str, Any], size: int) -> RewardInput:
    """Returns a made-up group to try reward functions on: every other response is right."""
    right = f"#### {answer}"
    wrong = "I do not know."
    responses = [right if number % 2 == 0 else wrong for number in range(size)]
    return RewardInput(prompt, answer, responses, [8] * size, row)
