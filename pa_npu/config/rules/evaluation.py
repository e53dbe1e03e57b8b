"""Rules for evaluations, the metrics they yield, and the checkpoints that are kept by them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree


def broken_evaluation(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    s = c.schedule
    if c.checkpoint.keep_best and not c.checkpoint.keep_last:
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best} has no effect with checkpoint.keep_last = 0, which keeps all; set "
            f"keep_last, or remove the key"
        )
    yield from _evaluation_rules(c)
    if c.checkpoint.keep_best and not (c.evaluation_sets and s.evaluate_every):
        yield (
            f"checkpoint.keep_best: {c.checkpoint.keep_best}: without evaluations in between no checkpoint is better than "
            f"another; set data.test and schedule.evaluate_every, or remove the key"
        )


def _evaluation_rules(c: ConfigTree) -> Iterator[str]:
    e = c.evaluate
    if "test" in e.sets and c.data.test:
        yield "evaluate.sets: test is the name of data.test; choose another"
    for name in e.sets:
        if not _SET_NAME.fullmatch(name) or not name.strip("."):
            yield f"evaluate.sets: {name!r} is no name of a set; use letters, digits, dots, dashes and underlines"
    name, _, metric = (e.metric or "").partition("/")
    names = metric_names(e.samples)
    if e.metric is not None and (name not in c.evaluation_sets or metric not in names):
        yield (
            f"evaluate.metric: {e.metric} is none of {', '.join(c.evaluation_sets) or 'no sets'} with one of {', '.join(names)}; "
            f"write SET/NAME"
        )
    if (e.max_response_tokens or 0) > c.rollout.max_response_tokens:
        yield (
            f"evaluate.max_response_tokens: {e.max_response_tokens} is more than rollout.max_response_tokens = "
            f"{c.rollout.max_response_tokens}, which engines are started for; lower it, or raise that"
        )
    if e.overlap and any(c.is_shared(index) for index in range(c.num_engines)):
        yield "evaluate.overlap: engines on the trainers' devices have no time beside training; remove it, or give them devices"


_SET_NAME = re.compile(r"[\w.-]{1,64}")


def metric_names(samples: int) -> list[str]:
    """Names the metrics of each set: greedy, avg@n, and pass@k and maj@k for the powers of two up to n, and n."""
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
