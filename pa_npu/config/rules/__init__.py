"""The rules between keys, in the order in which they are checked: the first that is broken is what the user reads."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.rules.inputs import broken_data, broken_evaluation, broken_rewards
from pa_npu.config.rules.learning import (
    broken_algorithm,
    broken_shards,
    broken_staleness,
    broken_training,
)
from pa_npu.config.rules.processes import broken_deadlines, broken_engines, broken_placement
from pa_npu.config.rules.unread import broken_unread
from pa_npu.config.texts import broken_texts
from pa_npu.config.tree import ConfigTree


def broken_rules(c: ConfigTree) -> Iterator[str]:
    """Yields one line per rule that is broken: keys, values, rule, remedy."""
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
    yield from broken_algorithm(c)
    yield from broken_evaluation(c)
    yield from broken_engines(c)
    yield from broken_placement(c)
    yield from broken_rewards(c)
