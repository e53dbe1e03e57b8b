"""The rules between keys, in the order in which they are checked: the first that is broken is what the user reads."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.rules.algorithm import broken_algorithm
from pa_npu.config.rules.data import broken_data
from pa_npu.config.rules.deadlines import broken_deadlines
from pa_npu.config.rules.engines import broken_engines, broken_single_engines
from pa_npu.config.rules.evaluation import broken_evaluation
from pa_npu.config.rules.placement import broken_placement
from pa_npu.config.rules.rewards import broken_functions, broken_rewards
from pa_npu.config.rules.staleness import broken_staleness
from pa_npu.config.rules.training import broken_lora, broken_shards, broken_training
from pa_npu.config.rules.unread import broken_unread
from pa_npu.config.texts import broken_texts
from pa_npu.config.tree import ConfigTree


def broken_rules(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    yield from broken_texts(c)
    yield from broken_deadlines(c)
    shards = list(broken_shards(c))
    if shards:
        yield from shards
        return  # the others divide by the number of replicas
    yield from broken_unread(c)
    yield from broken_data(c)
    yield from broken_staleness(c)
    yield from broken_training(c)
    yield from broken_lora(c)
    yield from broken_algorithm(c)
    yield from broken_evaluation(c)
    yield from broken_engines(c)
    yield from broken_single_engines(c)
    yield from broken_placement(c)
    yield from broken_functions(c)
    yield from broken_rewards(c)
