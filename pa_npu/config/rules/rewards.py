"""Rules for rewards, and for values that name a function: one of ours, or `module:function` of the user's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pa_npu.config.sections import ADVANTAGES, LOSSES, REWARDS, JudgeConfig
from pa_npu.config.texts import shown, url_problem
from pa_npu.config.tree import ConfigTree


def broken_functions(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    yield from _unknown_names(c)
    for function in c.reward.functions:
        if function.name == "format" and not function.pattern:
            yield "reward.functions: format needs a pattern; add pattern=REGEX to it"
        if function.name == "overlong" and (function.buffer_tokens or 0) > c.rollout.max_response_tokens:
            yield (
                f"reward.functions: overlong has buffer_tokens = {function.buffer_tokens}, more than rollout.max_response_tokens = "
                f"{c.rollout.max_response_tokens}; lower buffer_tokens"
            )


def _unknown_names(c: ConfigTree) -> Iterator[str]:
    """Values that name a function: one of ours, or module:function of the user's (imported by the checks before a run)."""
    named: list[tuple[str, str, tuple[str, ...]]] = [
        ("algorithm.loss", c.algorithm.loss, LOSSES),
        ("algorithm.advantage", c.algorithm.advantage, ADVANTAGES),
        *(("reward.functions", function.name, REWARDS) for function in c.reward.functions),
    ]
    for key, name, known in named:
        module, separator, function = name.partition(":")
        if name not in known and not (separator and module.strip() and function.strip()):
            yield f"{key}: {name!r} is not {', '.join(known)} or module:function; use one of these"


def broken_rewards(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    names = [function.name for function in c.reward.functions]
    for name in ("judge", "code"):
        if names.count(name) > 1:
            yield f"reward.functions: {name} is listed twice, and there is one reward.{name}; list it once"
    if "judge" in names:
        yield from _broken_judge(c.reward.judge)


def _broken_judge(j: JudgeConfig) -> Iterator[str]:
    if j.url is None:
        yield "reward.judge.url: the function judge needs the URL of a server; write http://HOST:PORT/v1"
    elif problem := url_problem(j.url):
        yield f"reward.judge.url: {shown(j.url)} {problem}; write http://HOST:PORT/v1, keys go into the environment"
    if j.model is None:
        yield "reward.judge.model: the function judge needs the name of a model, as its server knows it; set it"
    for key in ("template", "score_pattern", "request"):
        if j.api == "pooling" and getattr(j, key) != JudgeConfig.model_fields[key].default:
            yield f"reward.judge.{key}: is not read with reward.judge.api=pooling, where no words are; remove it, or use chat"
    if "{response}" not in j.template:
        yield "reward.judge.template: has no {response}, so that every response would be judged alike; add it"
    lowest, highest = j.scores
    if not lowest < highest:
        yield f"reward.judge.scores: {lowest:g} is not below {highest:g}; write the score of reward 0 before that of reward 1"
    try:
        groups = re.compile(j.score_pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield f"reward.judge.score_pattern: {shown(j.score_pattern)} is not a regular expression ({error}); correct it"
        return
    if groups != 1:
        yield f"reward.judge.score_pattern: {shown(j.score_pattern)} has {groups} groups; put one, around the number"
