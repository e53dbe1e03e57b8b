"""A part of a large cluster on which schedules are tried: the same share of engines, replicas and groups, in all their variety.

Simulating an iteration costs what its sequences cost, and engines multiply that; a border has a share of an iteration for it. What
an iteration takes follows from groups per engine and per replica, which a part has like the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup
from pa_npu.planning.iteration_model.messages import IterationOutlook, Rules

# With so many engines a sequence costs twice what it costs with one: 5.5 and 0.063 microseconds per engine, with 16 to 256 of them.
_ENGINES_OF_TWICE = 87
# Of a part, at least, where the whole has as many: fewer say little about how engines and replicas wait for each other.
_LEAST_ENGINES, _LEAST_GROUPS = 4, 64


@dataclass(frozen=True)
class Part:
    """outlook: of the part. indices: of its groups among all, rising. total, share: groups of the whole, and those per engine.

    train_scale, engine_scale: by which times are multiplied where numbers do not divide evenly.
    """

    outlook: IterationOutlook
    indices: tuple[int, ...]
    replicas: int
    total: int
    share: int
    is_whole: bool = True
    train_scale: float = 1.0
    engine_scale: float = 1.0

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster of the part, from one that has its engines."""
        if self.is_whole:
            return cluster
        engines = {name: cluster.engines[name].scaled(self.engine_scale) for name in self.outlook.engines}
        return replace(cluster, engines=engines, replicas=self.replicas)

    def scaled(self, groups: Sequence[VirtualGroup]) -> list[VirtualGroup]:
        """Groups of the part, with what training them takes on its replicas."""
        if self.is_whole:
            return list(groups)
        return [replace(group, train_s=self.train_scale * group.train_s) for group in groups]

    def of(self, groups: Sequence[VirtualGroup]) -> list[VirtualGroup] | None:
        """The part's of all groups of an iteration, which are numbered; behind them as many replacements as it takes. None where
        there are too few of these."""
        if self.is_whole:
            return list(groups)
        found = [groups[index] for index in self.indices]
        missing = len(found) - sum(group.informative for group in found)
        for group in groups[self.total :]:
            if not missing:
                break
            found.append(group)
            missing -= group.informative
        if missing:
            return None
        return self.scaled([replace(group, index=number) for number, group in enumerate(found)])


def whole(outlook: IterationOutlook, rules: Rules) -> Part:
    """All of it."""
    total = len(outlook.groups)
    return Part(outlook, tuple(range(total)), rules.replicas, total, math.ceil(total / max(1, len(outlook.engines))))


def halves(outlook: IterationOutlook, rules: Rules) -> int:
    """How often the whole can be halved."""
    most = min(
        len(outlook.engines) // _LEAST_ENGINES,
        len(outlook.groups) // max(_LEAST_GROUPS, rules.updates),
    )
    return max(0, most.bit_length() - 1)


def part_of(outlook: IterationOutlook, cluster: Cluster, rules: Rules, parts: int) -> Part:
    """One of so many parts. Engines are every so manieth by speed, groups by the length that is expected of them."""
    names = _every(sorted(outlook.engines, key=lambda name: cluster.engines[name].step_s), parts)
    replicas = max(1, round(rules.replicas / parts))
    unit = replicas * rules.updates
    groups, engines = len(outlook.groups), len(outlook.engines)
    count = min(groups // unit, max(1, round(groups * len(names) / engines / unit))) * unit
    ranked = sorted(range(groups), key=lambda index: outlook.groups[index].longest)
    indices = sorted(ranked[int((number + 0.5) * groups / count)] for number in range(count))
    some = replace(
        outlook,
        groups=[outlook.groups[index] for index in indices],
        engines=tuple(name for name in outlook.engines if name in names),
    )
    return Part(
        some,
        tuple(indices),
        replicas,
        groups,
        math.ceil(groups / engines),
        False,
        (groups / rules.replicas) / (count / replicas),
        (groups / engines) / (count / len(names)),
    )


def cost(groups: float, responses: int, engines: float) -> float:
    """Estimate the cost of simulating an iteration, in sequences that are alone on an engine."""
    return groups * responses * (1.0 + engines / _ENGINES_OF_TWICE)


def _every(names: Sequence[str], parts: int) -> list[str]:
    count = max(1, round(len(names) / parts)) if names else 0
    return [names[int((number + 0.5) * len(names) / count)] for number in range(count)]
