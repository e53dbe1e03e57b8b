"""Reward functions: their input and result, the built-in ones, and how a user's is loaded and called.

Functions that wait (judge, code, and a user's `async def`) are built here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.reward import RESPONSE_CPU_S
from pa_npu.config.user_code import ERROR_CHARACTERS, describe, import_function, source_of
from pa_npu.data.limits import TimeLimitReached, time_limit
from pa_npu.data.records import CHOICE_COLUMN
from pa_npu.errors import DataError
from pa_npu.rewards.answers import chosen_letter, is_correct
from pa_npu.rewards.signatures import adapted
from pa_npu.rewards.thoughts import opened_thought
from pa_npu.rewards.values import NotAReward, as_rewards

if TYPE_CHECKING:
    from pa_npu.config.sections.reward import RewardConfig
    from pa_npu.config.sections.rollout import EnvironmentConfig

SHAPING = frozenset({"format", "overlong"})
"""Functions that judge a response's form, not its content."""
JUDGE_SCORES = "judge_scores.sqlite"


def needs_answers(reward: RewardConfig, environment: EnvironmentConfig) -> bool:
    """Returns whether every row of the data must have a reference answer.

    It need not where agents, or an environment with rewards of its own, may give them.
    """
    return reward.reads_answers and not environment.has_sessions


@dataclass(frozen=True)
class RewardInput:
    """A finished group: one prompt and its G responses.

    prompt: the rendered prompt.
    answer: the reference answer.
    responses: G texts.
    response_tokens: their lengths in tokens.
    row: the dataset row as JSON can hold it; values of other types arrive as text.
    """

    prompt: str
    answer: str
    responses: Sequence[str]
    response_tokens: Sequence[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RewardResult:
    """Rewards of a group.

    total: float32 [G], the weighted sum.
    functions: rewards of each function, float32 [G], unweighted, by name (a repeated name gets #2).
    correct: bool [G], the verdict of the first function that is not in SHAPING: its reward is at
        least half, or of `code` all tests pass.
    errors: failures, one line each; a function that failed gave zeros.
    no_verdict: number of responses without a verdict of a judge or a sandbox, by function; they got
        the mean of the other responses.
    scored: scored_digest of the texts and the total; empty where nobody has computed it.
    """

    total: npt.NDArray[np.float32]
    functions: dict[str, npt.NDArray[np.float32]]
    correct: npt.NDArray[np.bool_]
    errors: tuple[str, ...]
    no_verdict: Mapping[str, int] = field(default_factory=dict)
    scored: str = ""

    @property
    def judged(self) -> npt.NDArray[np.float32]:
        """Rewards of the first function that is not in SHAPING, float32 [G]; else the total."""
        for name, values in self.functions.items():
            if name.partition("#")[0] not in SHAPING:
                return values
        return self.total

    @cached_property
    def is_informative(self) -> bool:
        """Returns whether rewards for content (not for form, such as length) differ within the
        group.
        """
        return len(set(self.judged.tolist())) > 1


def scored_digest(prompt: str, answer: str, responses: Sequence[str], rewards: object) -> str:
    """Returns a digest that binds rewards to the texts that they were given to, in their order, and
    to the reference answer that these were compared with.

    `rewards`: anything that JSON can hold.
    """
    texts = json.dumps([prompt, answer, list(responses), rewards], default=str).encode()
    return hashlib.blake2b(texts, digest_size=16).hexdigest()


Function = Callable[[RewardInput], Sequence[float]]


@dataclass(frozen=True)
class FunctionSpec:
    """One configured function, with the settings of the built-in ones.

    name: a built-in function, or module:function.
    label: the name, made unique.
    pattern: of format.
    max_tokens, buffer_tokens: of overlong.
    settings: of judge and code, their section of the configuration as JSON values.
    cache: of judge, the path of its stored scores.
    programs: of code, how many run at the same time.
    """

    name: str
    label: str
    pattern: str | None = None
    max_tokens: int = 0
    buffer_tokens: int = 0
    settings: Mapping[str, Any] | None = None
    cache: str | None = None
    programs: int = 0


_OVERLONG_SHARE = 5  # DAPO, section 4.1: of 20,480 tokens the last 4,096
CONCURRENT = frozenset({"judge", "code"})
"""Built-in functions that wait more than they compute.

They score many groups at once, in a process of their own (pool.py).
"""


def function_specs(
    config: RewardConfig, run_dir: str | Path | None = None, max_response_tokens: int = 0
) -> tuple[FunctionSpec, ...]:
    """Returns specs in the order of the configuration; a second `format` is labelled format#2.

    `run_dir`: directory of the judge's stored scores. `max_response_tokens`: rollout's, for
    overlong.
    """
    seen: dict[str, int] = {}
    specs = []
    for function in config.functions:
        name = function.name
        if name == "overlong" and not max_response_tokens:
            raise ValueError("overlong goes by rollout.max_response_tokens, which is not given")
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name}#{seen[name]}"
        settings = None
        if name in CONCURRENT:
            settings = getattr(config, name).model_dump(mode="json")
        cache = None
        if name == "judge" and run_dir is not None:
            cache = str(Path(run_dir) / JUDGE_SCORES)
        spec = FunctionSpec(
            name=name,
            label=label,
            pattern=function.pattern,
            max_tokens=max_response_tokens,
            buffer_tokens=(
                function.buffer_tokens or max(1, max_response_tokens // _OVERLONG_SHARE)
            ),
            settings=settings,
            cache=cache,
            programs=config.programs,
        )
        specs.append(spec)
    return tuple(specs)


def build_function(spec: FunctionSpec) -> Function:
    """Returns the function that `spec` names.

    Raises ConfigError or DataError if it cannot be imported or called.
    """
    if spec.name == "math":
        return math_reward
    if spec.name == "format":
        return format_reward(spec.pattern or "")
    if spec.name == "overlong":
        return overlong_reward(spec.max_tokens, spec.buffer_tokens)
    if spec.name == "reasoning_gym":
        from pa_npu.rewards.gym_reward import gym_reward

        return gym_reward
    return import_reward(spec.name)


def is_users(spec: FunctionSpec) -> bool:
    """Returns whether the function is a user's module:function."""
    return ":" in spec.name


def math_reward(group: RewardInput) -> list[float]:
    """Returns 1 for each response whose final answer equals the reference, else 0.

    In a multiple choice (data/records.py) the letter is compared. A response whose answer is not
    found within RESPONSE_CPU_S of processor time gets 0.
    """
    letters = str(group.row.get(CHOICE_COLUMN) or "")
    rewards = [0.0] * len(group.responses)
    for number, response in enumerate(group.responses):
        with contextlib.suppress(TimeLimitReached), time_limit(RESPONSE_CPU_S):
            if letters:
                right = chosen_letter(response, letters, group.prompt) == group.answer
            else:
                right = is_correct(response, group.answer, group.prompt)
            rewards[number] = float(right)
    return rewards


def format_reward(pattern: str) -> Function:
    """Returns a function that gives 1 to a response that contains the pattern, else 0.

    A dot also matches line ends. If the prompt opened a thought, the pattern may also match with
    the prompt's <think> in front of the response.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise DataError(
            f"reward.functions: format pattern {pattern!r} is not a regular expression ({error}); "
            "correct it"
        ) from None

    def is_in(text: str) -> bool:
        try:
            with time_limit(RESPONSE_CPU_S):
                return expression.search(text) is not None
        except TimeLimitReached:
            raise ValueError(
                f"format: the pattern {pattern!r:.200} is not done with a response within "
                f"{RESPONSE_CPU_S:g} s of processor time; write one that tries fewer ways"
            ) from None

    def score(group: RewardInput) -> list[float]:
        opened = opened_thought(group.prompt)
        rewards = []
        for response in group.responses:
            matches = is_in(response) or (bool(opened) and is_in(opened + response))
            rewards.append(float(matches))
        return rewards

    return score


def overlong_reward(max_tokens: int, buffer_tokens: int) -> Function:
    """Returns DAPO's penalty of long responses (arXiv 2503.14476, eq. 13).

    It is 0 up to max_tokens - buffer_tokens, then falls linearly to -1 at max_tokens and beyond;
    L_max = max_tokens and L_cache = buffer_tokens. A response that was cut at
    rollout.max_response_tokens has that many tokens.
    """
    free_tokens = max_tokens - buffer_tokens

    def score(group: RewardInput) -> list[float]:
        penalties = [(free_tokens - length) / buffer_tokens for length in group.response_tokens]
        return [max(-1.0, min(0.0, penalty)) for penalty in penalties]

    return score


def import_reward(name: str) -> Function:
    """Returns a user's `module:function` as a function of a group.

    It may be written for verl or TRL (signatures.py).
    """
    return adapted(name, import_function("reward.functions", name))


def is_concurrent(function: Any) -> bool:
    """Returns whether a function is an `async def`, or an object that is called like one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def build_concurrent(spec: FunctionSpec) -> Any:
    """Returns the judge or the sandbox that `spec` names, for use in one event loop."""
    if spec.name == "judge":
        from pa_npu.config.sections.reward import JudgeConfig
        from pa_npu.rewards.judge import JudgeReward

        cache = Path(spec.cache) if spec.cache else None
        return JudgeReward(JudgeConfig.model_validate(spec.settings), cache)
    from pa_npu.config.sections.reward import CodeConfig
    from pa_npu.rewards.code_reward import CodeReward

    return CodeReward(CodeConfig.model_validate(spec.settings), spec.programs)


def call_function(function: Function, group: RewardInput) -> tuple[list[float], str | None]:
    """Returns the group's rewards, and why the function failed, in one line, if it did.

    The rewards of a function that failed are zeros.
    """
    try:
        returned = function(group)
    # Whatever a reward function raises costs its reward, not the run.
    except BaseException as error:
        return [0.0] * len(group.responses), reason_of(function, error)
    return checked_rewards(function, group, returned)


def checked_rewards(
    function: Any, group: RewardInput, returned: Any
) -> tuple[list[float], str | None]:
    """Returns a function's rewards; zeros and the reason if it is not one reward per response."""
    try:
        return as_rewards(returned, len(group.responses)), None
    except BaseException as error:  # a generator is users' code
        return [0.0] * len(group.responses), reason_of(function, error)


def reason_of(function: Any, error: BaseException) -> str:
    """Returns why a function gave no rewards and where, in one line."""
    if isinstance(error, NotAReward):
        return f"{' '.join(str(error).split())[:ERROR_CHARACTERS]}, {source_of(function)}"
    return describe(error)
