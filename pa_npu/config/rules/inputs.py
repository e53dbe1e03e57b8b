"""Rules for what a run is given and judged by: datasets and templates, rewards, evaluations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pa_npu.config.sections.learning import REWARDS
from pa_npu.config.sections.reward import JudgeConfig
from pa_npu.config.texts import shown, url_problem
from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import choose_among

TEMPLATE_ENDING = ".jinja"
_SET_NAME = re.compile(r"[\w.-]{1,64}")


def broken_data(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    data = c.data
    for name, count in Counter(dataset.called for dataset in data.datasets).items():
        if count > 1:
            yield f"data.train: {count} datasets are called {name}; give each a name of its own"
    if data.chat_template not in ("auto", "always", "never") and not data.chat_template.endswith(
        TEMPLATE_ENDING
    ):
        yield (
            f"data.chat_template: {shown(data.chat_template)} is not auto, always, never or a "
            f"file's name that ends in {TEMPLATE_ENDING}; use one of these"
        )


def broken_rewards(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    yield from _unknown_names(c)
    for function in c.reward.functions:
        if function.name == "format" and not function.pattern:
            yield "reward.functions: format needs a pattern; add pattern=REGEX to it"
        if (
            function.name == "overlong"
            and (function.buffer_tokens or 0) > c.rollout.max_response_tokens
        ):
            yield (
                f"reward.functions: overlong has buffer_tokens = {function.buffer_tokens}, more "
                f"than rollout.max_response_tokens = {c.rollout.max_response_tokens}; lower "
                "buffer_tokens"
            )
    names = [function.name for function in c.reward.functions]
    for name in ("judge", "code"):
        if names.count(name) > 1:
            yield (
                f"reward.functions: {name} is listed twice, and there is one reward.{name}; list "
                "it once"
            )
    if "judge" in names:
        yield from _broken_judge(c.reward.judge)


def _unknown_names(c: ConfigTree) -> Iterator[str]:
    """Values that name a function: one of ours, or module:function of the user's (imported by the
    checks before a run).
    """
    for reward in c.reward.functions:
        module, separator, function = reward.name.partition(":")
        if reward.name not in REWARDS and not (separator and module.strip() and function.strip()):
            yield (
                f"reward.functions: {reward.name!r} is not {', '.join(REWARDS)} or "
                f"module:function; {choose_among(reward.name, REWARDS)}"
            )


def _broken_judge(j: JudgeConfig) -> Iterator[str]:
    if j.url is None:
        yield (
            "reward.judge.url: the function judge needs the URL of a server; write "
            "http://HOST:PORT/v1"
        )
    elif problem := url_problem(j.url):
        yield (
            f"reward.judge.url: {shown(j.url)} {problem}; write http://HOST:PORT/v1, keys go "
            "into the environment"
        )
    if j.model is None:
        yield (
            "reward.judge.model: the function judge needs the name of a model, as its server "
            "knows it; set it"
        )
    for key in ("template", "score_pattern", "request"):
        if j.api == "pooling" and getattr(j, key) != JudgeConfig.model_fields[key].default:
            yield (
                f"reward.judge.{key}: is not read with reward.judge.api=pooling, where no words "
                "are; remove it, or use chat"
            )
    if "{response}" not in j.template:
        yield (
            "reward.judge.template: has no {response}, so that every response would be judged "
            "alike; add it"
        )
    lowest, highest = j.scores
    if not lowest < highest:
        yield (
            f"reward.judge.scores: {lowest:g} is not below {highest:g}; write the score of "
            "reward 0 before that of reward 1"
        )
    try:
        groups = re.compile(j.score_pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        yield (
            f"reward.judge.score_pattern: {shown(j.score_pattern)} is not a regular expression "
            f"({error}); correct it"
        )
        return
    if groups != 1:
        yield (
            f"reward.judge.score_pattern: {shown(j.score_pattern)} has {groups} groups; put one, "
            "around the number"
        )


def broken_evaluation(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
    s, e = c.schedule, c.evaluate
    if c.checkpoint.keep_best and not c.checkpoint.keep_last:
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best} has no effect with "
            "checkpoint.keep_last = 0, which keeps all; set keep_last, or remove the key"
        )
    if "test" in e.sets and c.data.test:
        yield "evaluate.sets: test is the name of data.test; choose another"
    for name in e.sets:
        if not _SET_NAME.fullmatch(name) or not name.strip("."):
            yield (
                f"evaluate.sets: {name!r} is no name of a set; use letters, digits, dots, dashes "
                "and underlines"
            )
    name, _, metric = (e.metric or "").partition("/")
    names = metric_names(e.samples) if c.rollout.has_engines else ["loss"]
    if e.metric is not None and (
        name not in c.evaluate.all_sets(c.data.test) or metric not in names
    ):
        yield (
            f"evaluate.metric: {e.metric} is none of {', '.join(c.evaluate.all_sets(c.data.test)) or 'no sets'} "
            f"with one of {', '.join(names)}; write SET/NAME"
        )
    if (e.max_response_tokens or 0) > c.rollout.max_response_tokens:
        yield (
            f"evaluate.max_response_tokens: {e.max_response_tokens} is more than "
            f"rollout.max_response_tokens = {c.rollout.max_response_tokens}, which engines are "
            "started for; lower it, or raise that"
        )
    if e.overlap and c.placement.colocate:
        yield (
            "evaluate.overlap: engines on the trainers' devices have no time beside training; "
            "remove it, or give them devices"
        )
    if c.checkpoint.keep_best and not (c.evaluate.all_sets(c.data.test) and s.evaluate_every):
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best}: without evaluations in between no "
            "checkpoint is better than another; set data.test and schedule.evaluate_every, or "
            "remove the key"
        )


def metric_names(samples: int) -> list[str]:
    """Names the metrics of each set: greedy, avg@n, and pass@k and maj@k for the powers of two up
    to n, and n.
    """
    if not samples:
        return ["greedy"]
    ks = [2**exponent for exponent in range(1, samples.bit_length()) if 2**exponent < samples]
    ks += [samples] if samples > 1 else []
    return [
        "greedy",
        f"avg@{samples}",
        *(f"pass@{k}" for k in ks),
        *(f"maj@{k}" for k in ks if k > 2),
    ]
