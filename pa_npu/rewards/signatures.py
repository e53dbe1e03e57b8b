"""Adapts a user's reward function to a group; one that is written for verl or TRL works unchanged.

    group   f(group)                                                    -> G rewards
    verl    f(data_source, solution_str, ground_truth, extra_info)      -> a reward, or a dictionary
                                                                           with `score`
            f(data_sources, solution_strs, ground_truths, extra_infos)  -> G of these (verl's batch
                                                                           manager)
    TRL     f(prompts, completions, **columns)                          -> G rewards, None for
                                                                           "does not apply"

Functions for verl and TRL are recognised by the names of their parameters, and are called by these
names. Each may be an `async def`. docs/porting_rewards.md describes the arguments.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pa_npu.config.user_code import source_of
from pa_npu.errors import ConfigError
from pa_npu.rewards.values import NotAReward

if TYPE_CHECKING:
    from pa_npu.rewards.functions import RewardInput

_VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
_VERL_BATCH = frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"})
_TRL_MISSING = {
    "completion_ids": "the tokens of the responses",
    "prompts_ids": "the tokens of the prompts",
    "trainer_state": "the trainer's state",
    "environments": "environments",
}
_QUESTIONS = ("question", "problem")
GroupFunction = Callable[["RewardInput"], Any]
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def adapted(name: str, function: Callable[..., Any]) -> GroupFunction:
    """Returns the function as a function of a group.

    `name`: module:function, for messages. Raises ConfigError if its parameters match none of the
    three.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # a function of C has no signature to look at; a wrong call shows when it is tried
        return function
    names = {
        parameter.name for parameter in signature.parameters.values() if parameter.kind in _KEYWORD
    }
    if "solution_str" in names:
        return _verl(name, function, signature)
    if "solution_strs" in names:
        return _verl_batch(name, function, signature)
    if "completions" in names:
        return _trl(name, function, signature)
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigError(
            f"reward.functions: {name} ({source_of(function)}) takes {signature}, which is neither "
            "one group, nor verl's (data_source, solution_str, ground_truth, extra_info), nor "
            "TRL's (prompts, completions, **columns); give it one of these "
            "(docs/porting_rewards.md)"
        ) from None
    return function


def _verl(name: str, function: Callable[..., Any], signature: inspect.Signature) -> GroupFunction:
    accepts = _accepted(name, function, signature, _VERL, "verl's compute_score")

    def arguments(group: RewardInput, response: str) -> dict[str, Any]:
        values = {**_verl_values(group), "solution_str": response}
        return {key: value for key, value in values.items() if key in accepts}

    if _is_async(function):

        @functools.wraps(function)
        async def score_group(group: RewardInput) -> list[Any]:
            results = await asyncio.gather(
                *(function(**arguments(group, response)) for response in group.responses)
            )
            return [_score(result) for result in results]

        return score_group

    @functools.wraps(function)
    def score_each(group: RewardInput) -> list[Any]:
        return [_score(function(**arguments(group, response))) for response in group.responses]

    return score_each


def _verl_batch(
    name: str, function: Callable[..., Any], signature: inspect.Signature
) -> GroupFunction:
    accepts = _accepted(name, function, signature, _VERL_BATCH, "verl's batch compute_score")

    def arguments(group: RewardInput) -> dict[str, Any]:
        values = {
            f"{key}s": [value] * len(group.responses) for key, value in _verl_values(group).items()
        }
        values["solution_strs"] = list(group.responses)
        return {key: value for key, value in values.items() if key in accepts}

    return _called(function, arguments, _score)


def _verl_values(group: RewardInput) -> dict[str, Any]:
    """Returns the values that verl reads from its parquet, or their equals in other layouts."""
    truth = None
    reward_model = group.row.get("reward_model")
    if isinstance(reward_model, Mapping):
        truth = reward_model.get("ground_truth")
    extra_info = group.row.get("extra_info")
    return {
        "data_source": group.row.get("data_source", ""),
        "ground_truth": group.answer if truth is None else truth,
        "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
    }


def _score(result: Any) -> Any:
    """Returns the reward in the result of a function for verl."""
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        keys = ", ".join(map(repr, list(result)[:10]))
        raise NotAReward(f"returned a dictionary without 'score' (it has {keys})")
    return result["score"]


def _trl(name: str, function: Callable[..., Any], signature: inspect.Signature) -> GroupFunction:
    for parameter in signature.parameters.values():
        if parameter.name in _TRL_MISSING and parameter.default is parameter.empty:
            raise ConfigError(
                f"reward.functions: {name} ({source_of(function)}) takes {parameter.name}, "
                f"{_TRL_MISSING[parameter.name]}, which reward functions do not get here; give the "
                "parameter a default, or write a function of the group"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"reward.functions: {name} ({source_of(function)}) takes {parameter.name} by "
                "position only; TRL's functions are called by name, so remove the slash"
            )
    takes_all = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in _KEYWORD and parameter.default is parameter.empty
    ]

    def arguments(group: RewardInput) -> dict[str, Any]:
        values = _trl_values(group, required)
        if missing := [key for key in required if key not in values]:
            raise NotAReward(
                f"takes {', '.join(missing)}, which is no column of the row (it has "
                f"{', '.join(map(str, group.row))})"
            )
        if takes_all:
            return values
        return {key: value for key, value in values.items() if key in signature.parameters}

    return _called(function, arguments, lambda reward: 0.0 if reward is None else reward)


def _trl_values(group: RewardInput, required: Sequence[str]) -> dict[str, Any]:
    """Returns TRL's keyword arguments.

    Prompts and completions have the row's form; every column is repeated for each response.
    """
    size = len(group.responses)
    prompt, is_conversation = _trl_prompt(group)
    completions: list[Any] = list(group.responses)
    if is_conversation:
        completions = [[{"role": "assistant", "content": response}] for response in group.responses]
    values: dict[str, Any] = {
        key: [value] * size
        for key, value in group.row.items()
        if key not in ("prompt", "completion")
    }
    if "answer" in required:
        values.setdefault("answer", [group.answer] * size)
    values["log_extra"] = values["log_metric"] = _ignore
    return {**values, "prompts": [prompt] * size, "completions": completions}


def _trl_prompt(group: RewardInput) -> tuple[Any, bool]:
    """Returns the prompt as TRL would have it, and whether it is a conversation.

    It is a conversation unless the row has a text as `prompt`.
    """
    prompt = group.row.get("prompt")
    if isinstance(prompt, str):
        return prompt, False
    for messages in (prompt, group.row.get("messages")):
        if isinstance(messages, list) and messages:
            return messages, True
    for column in _QUESTIONS:
        if isinstance(text := group.row.get(column), str):
            return [{"role": "user", "content": text}], True
    return group.prompt, False


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces TRL's log_extra and log_metric, which add columns and metrics to its own logs."""


def _called(
    function: Callable[..., Any],
    arguments: Callable[[RewardInput], dict[str, Any]],
    reward: Callable[[Any], Any],
) -> GroupFunction:
    """Returns a function of a group that calls `function` once, by name.

    `reward` takes the reward out of each result.
    """
    if _is_async(function):

        @functools.wraps(function)
        async def score_group(group: RewardInput) -> Any:
            return _each(await function(**arguments(group)), reward)

        return score_group

    @functools.wraps(function)
    def score(group: RewardInput) -> Any:
        return _each(function(**arguments(group)), reward)

    return score


def _each(results: Any, reward: Callable[[Any], Any]) -> Any:
    """Returns the rewards of a list of results.

    Anything else is returned unchanged: the check of rewards refuses it.
    """
    if not isinstance(results, (list, tuple)):
        return results
    return [reward(result) for result in results]


def _accepted(
    name: str,
    function: Callable[..., Any],
    signature: inspect.Signature,
    known: frozenset[str],
    whose: str,
) -> frozenset[str]:
    """Returns which of the known arguments a function accepts.

    Raises ConfigError if it needs another one.
    """
    parameters = signature.parameters.values()
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind in _KEYWORD
        if parameter.kind is parameter.POSITIONAL_ONLY or (
            is_needed and parameter.name not in known
        ):
            raise ConfigError(
                f"reward.functions: {name} ({source_of(function)}) takes {parameter.name}, which "
                f"{whose} is not called with here; give it a default (known: "
                f"{', '.join(sorted(known))})"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    return known & set(signature.parameters)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )
