"""Predicts what roles that follow the work gain over turns, from an iteration that was simulated in turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pa_npu.dispatch.roles import Rest, Speeds, decoding_units
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup
from pa_npu.planning.iteration_model.simulate import Outcome

# Parts of a cluster are put side by side until they have so many units, where the cluster has: fewer change in steps that
# are too large.
_UNITS = 8


def gain_s(cluster: Cluster, groups: Sequence[VirtualGroup], turns: Outcome, units: int, replicas: int) -> float:
    """Seconds by which the iteration ends earlier where units change their roles, as dispatch/roles.py would decide once all groups
    have been dispatched. What a change itself takes is left out.

    units: of so many replicas; the cluster may be a part of that.
    """
    if units < 2:
        return 0.0
    own = max(1, round(units * cluster.replicas / replicas))
    copies = max(1, min(units, _UNITS) // own)
    begin_s = max(timing.start_s for timing in turns.timings)
    by_index = {group.index: group for group in groups}
    remaining, numbers, written = [np.zeros(0)], [np.zeros(0, np.int64)], [np.zeros(0)]
    trains_s: list[float] = []
    ready_s: list[float] = []
    for timing in turns.timings:
        group = by_index[timing.index]
        train_s = group.train_s if group.informative else 0.0
        if timing.end_s <= begin_s:
            ready_s.append(train_s)
            continue
        steps = group.longest * (begin_s - timing.start_s) / (timing.end_s - timing.start_s)
        left = np.asarray([length - steps for length in group.lengths if length > steps])
        remaining.append(left)
        numbers.append(np.full(len(left), len(trains_s)))
        written.append(np.full(len(left), steps + group.prompt_tokens))
        trains_s.append(train_s)
    rest = Rest(
        np.tile(np.concatenate(remaining), copies),
        np.concatenate([np.concatenate(numbers) + copy * len(trains_s) for copy in range(copies)]),
        np.tile(np.concatenate(written), copies),
        decoding=copies * own,
        engines=len(cluster.engines) / own,
        replicas=cluster.replicas / own,
        trains_s=np.tile(trains_s, copies),
        ready_s=ready_s * copies,
        free_s=[],
        most=cluster.max_num_seqs,
    )
    engines = [(speed.step_s, speed.sequence_s, speed.prompt_token_s) for speed in cluster.engines.values()]
    _, roles_s, turns_s = decoding_units(rest, Speeds(*np.mean(engines, axis=0).tolist()))
    return turns_s - roles_s
