"""Rules for values that name a function, one of ours or `module:function` of the user's, and for reward functions."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.sections import ADVANTAGES, LOSSES, REWARDS
from pa_npu.config.tree import ConfigTree


def broken_functions(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    yield from _unknown_names(c)
    for function in c.reward.functions:
        if function.name == "format" and not function.pattern:
            yield "reward.functions: format needs a pattern; add pattern=REGEX to it"
        if function.name == "overlong" and (function.buffer_tokens or 0) > (function.max_tokens or 0):
            yield (
                f"reward.functions: overlong has buffer_tokens = {function.buffer_tokens}, more than its max_tokens = "
                f"{function.max_tokens}; lower buffer_tokens"
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
