"""Schedules by running an iteration backwards: each group starts as late as it can.

Backwards in time trainers emit a group whenever they have "trained" it, an engine takes it at once and runs its decode steps;
read forwards this is a schedule that ends with the iteration. Letting each group start as early as it can in reversed time is
optimal on one engine where lengths are equal: a later start leaves more steps to do and helps no other group. With unequal lengths
the order of emission matters too: longest first, so that forwards the longest are trained last and trainers have others meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from pa_npu.dispatch.schedule import Turn, Windows, engine_with_room
from pa_npu.planning.iteration_model.cluster import Cluster, VirtualGroup

_SAME_STEP = 1e-6
# Of engines, as the turns are computed for them.
_MOST_KINDS = 32


def backwards_turns(
    cluster: Cluster, groups: Sequence[VirtualGroup], places: int, slack: float
) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """(order, turns) for expected groups, on all engines as one pool; fractions of a millisecond for a hundred groups.

    places: groups that may be in flight, on all engines together. slack: trainers are taken to need this share of their time, so
    that engines stay a little ahead of them. Turns are in completions, which follow the engines when these are slower or faster
    than was thought, and in seconds after them.
    """
    steps = [group.longest for group in groups]
    # what a group adds to each step while it is in flight: its living sequences, and its share of the prompts
    speeds = list(cluster.engines.values())
    mean_living = sum(sum(group.lengths) for group in groups) / sum(steps)
    mean_prompt = sum(group.prompt_tokens / group.longest for group in groups) / len(groups)
    rates = _kinds([(s.step_s, s.sequence_s * mean_living + s.prompt_token_s * mean_prompt) for s in speeds])

    emitted = _emissions(cluster, groups, slack)
    now_s = clock = 0.0
    ends: list[tuple[float, int]] = []
    started_s: list[float] = []
    ended: list[tuple[float, int]] = []
    number = 0
    while len(ended) < len(groups):
        per_engine = max(1.0, len(ends) / len(speeds))
        step_s = len(speeds) / sum(count / max(a + b * per_engine, 1e-12) for a, b, count in rates)
        next_end_s = now_s + (ends[0][0] - clock) * step_s if ends else math.inf
        if number < len(emitted) and len(ends) < places and max(now_s, emitted[number][0]) <= next_end_s:
            at_s = max(now_s, emitted[number][0])
            clock += (at_s - now_s) / step_s if ends else 0.0
            now_s = at_s
            heapq.heappush(ends, (clock + steps[emitted[number][1]], emitted[number][1]))
            started_s.append(now_s)
            number += 1
        else:
            now_s, clock = next_end_s, ends[0][0]
            ended.append((now_s, heapq.heappop(ends)[1]))
    completions_s = [now_s - at_s for at_s in reversed(started_s)]  # forwards, rising
    order: list[int] = []
    turns: list[Turn] = []
    before = 0
    for ended_s, index in reversed(ended):
        at_s = now_s - ended_s
        while before < len(completions_s) and completions_s[before] <= at_s + 1e-9:
            before += 1
        order.append(index)
        turns.append(Turn(before, at_s - (completions_s[before - 1] if before else 0.0)))
    return tuple(order), tuple(turns)


def _kinds(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Engines that are equal, or in a large cluster nearly so, counted together: (a, b, how many)."""
    size = -(-len(rates) // _MOST_KINDS)
    ranked = sorted(rates)
    parts = [ranked[start : start + size] for start in range(0, len(ranked), size)]
    means = [(sum(a for a, _ in part) / len(part), sum(b for _, b in part) / len(part), len(part)) for part in parts]
    if len({(a, b) for a, b in rates}) == 1:
        return [(*rates[0], len(rates))]
    return means


def _emissions(cluster: Cluster, groups: Sequence[VirtualGroup], slack: float) -> list[tuple[float, int]]:
    """(time, index), rising: when reversed trainers emit which group."""
    if cluster.order == "prompt":  # replicas take their slots in turn, so the last slots come out first
        indices = list(reversed(range(len(groups))))
    else:
        indices = sorted(range(len(groups)), key=lambda index: (-groups[index].longest, -index))
    replicas = [
        (0.0, replica) for replica in range(cluster.replicas)
    ]  # busy until then, of which the first is free first
    emitted = []
    for index in indices:
        seconds = slack * groups[index].train_s
        if cluster.order == "prompt":
            replica = index % cluster.replicas
            until_s = replicas[replica][0] + seconds
            replicas[replica] = until_s, replica
        else:
            until_s = replicas[0][0] + seconds
            heapq.heapreplace(replicas, (until_s, replicas[0][1]))
        emitted.append((until_s, index))
    return sorted(emitted)


def optimum_s(cluster: Cluster, groups: Sequence[VirtualGroup], windows: Windows) -> float:
    """The iteration with all lengths known, sequence by sequence: a bound to measure schedules against, not a schedule to follow.

    Optimal for equal lengths on one engine; with unequal ones the best of some orders of emission, which a better one may beat by a
    few percent. One update per iteration. The step's and the delivery's seconds are added.
    """
    if cluster.updates != 1:
        raise ValueError(f"optimum_s knows one update per iteration, not {cluster.updates}")
    work = {group.index: sum(group.lengths) / len(group.lengths) for group in groups}
    speed = next(iter(cluster.engines.values()))
    keys = (
        lambda group: group.longest,
        lambda group: group.longest - 0.5 * work[group.index],
        lambda group: group.longest * speed.step_s + work[group.index] * len(group.lengths) * speed.sequence_s,
    )
    orders = [sorted(groups, key=key, reverse=True) for key in keys]
    if cluster.order == "prompt":
        orders = [sorted(groups, key=lambda group: -group.index)]
    return min(_reversed_s(cluster, order, windows) for order in orders) + cluster.step_s + cluster.delivery_s


def _reversed_s(cluster: Cluster, order: Sequence[VirtualGroup], windows: Windows) -> float:
    busy_until_s = [0.0] * cluster.replicas
    emitted = []
    for group in order:
        free = min(range(cluster.replicas), key=busy_until_s.__getitem__)
        replica = group.index % cluster.replicas if cluster.order == "prompt" else free
        busy_until_s[replica] += group.train_s
        emitted.append((busy_until_s[replica], group.index, group))
    emitted.sort()
    engines = {name: _ReversedEngine(cluster, name) for name in cluster.engines}
    waiting: deque[VirtualGroup] = deque()
    now_s = last_s = 0.0
    number = left = 0
    left = len(emitted)
    while left:
        name = min(engines, key=lambda name: engines[name].next_s)
        emission_s = emitted[number][0] if number < len(emitted) else math.inf
        now_s = min(emission_s, engines[name].next_s)
        ended: list[float] = []
        if emission_s <= engines[name].next_s:
            waiting.append(emitted[number][2])
            number += 1
        else:
            ended += engines[name].pass_some()
        while waiting:
            chosen = engine_with_room(engines, len(waiting[0].lengths), windows.of)
            if chosen is None:
                break
            ended += engines[chosen].add(waiting.popleft(), now_s)
        left -= len(ended)
        last_s = max([last_s, *(now_s + prompt_s for prompt_s in ended)])
    return last_s


class _ReversedEngine:
    """An engine whose groups begin with their longest response alone, which the others join, and end with all of them."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._speed = cluster.engines[name]
        self._now_s, self._steps, self._prompts_s = 0.0, 0.0, 0.0
        self._living = 0
        self._events: list[
            tuple[float, int, int, VirtualGroup]
        ] = []  # (clock, 0 a response joins or 1 all end, index, group)
        self.in_flight_sequences, self.in_flight_tokens = 0, 0.0
        self.next_s = math.inf

    def add(self, group: VirtualGroup, now_s: float) -> list[float]:
        """At now_s; returns the seconds of the prompts of groups that end in this very step."""
        self._advance(now_s)
        self.in_flight_sequences += len(group.lengths)
        self.in_flight_tokens += sum(group.lengths)
        for length in group.lengths:
            heapq.heappush(self._events, (self._steps + group.longest - length, 0, group.index, group))
        heapq.heappush(self._events, (self._steps + group.longest, 1, group.index, group))
        ended = self._take(self._steps)
        self._set_next()
        return ended

    def pass_some(self) -> list[float]:
        """At next_s: what joins, and which groups end; returns the seconds of the prompt of each that ends."""
        self._advance(self.next_s)
        ended = self._take(max(self._steps, self._events[0][0]))
        self._set_next()
        return ended

    def _take(self, steps: float) -> list[float]:
        self._steps = steps
        ended = []
        while self._events and self._events[0][0] <= steps + _SAME_STEP:
            _, is_end, _, group = heapq.heappop(self._events)
            if not is_end:
                self._living += 1
                continue
            self._living -= len(group.lengths)
            self.in_flight_sequences -= len(group.lengths)
            self.in_flight_tokens -= sum(group.lengths)
            prompt_s = self._speed.prompt_token_s * group.prompt_tokens
            self._prompts_s += prompt_s
            ended.append(prompt_s)
        return ended

    def _advance(self, now_s: float) -> None:
        seconds, self._now_s = now_s - self._now_s, now_s
        if not self._living:
            self._prompts_s = 0.0
            return
        spent = min(self._prompts_s, seconds)
        self._prompts_s -= spent
        self._steps += (seconds - spent) / self._step_time()

    def _set_next(self) -> None:
        self.next_s = math.inf
        if self._events:
            self.next_s = self._now_s + self._prompts_s + (self._events[0][0] - self._steps) * self._step_time()

    def _step_time(self) -> float:
        return self._speed.step_s + self._speed.sequence_s * self._living
