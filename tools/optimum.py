"""A bound to measure schedules against: an iteration run backwards with all lengths known."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from pa_npu.dispatch.schedule import Windows, engine_with_room
from pa_npu.planning.iteration_model.subjects import VirtualCluster, VirtualGroup

_SAME_STEP = 1e-6


def optimum_s(cluster: VirtualCluster, groups: Sequence[VirtualGroup], windows: Windows) -> float:
    """Returns the iteration with all lengths known, sequence by sequence: a bound to measure
    schedules against, not a schedule to follow.

    Optimal for equal lengths on one engine; with unequal ones the best of some orders of emission,
    which a better one may beat by a few percent. One update per iteration. The step's and the
    delivery's seconds are added.
    """
    if cluster.updates != 1:
        raise ValueError(f"optimum_s knows one update per iteration, not {cluster.updates}")
    work = {group.index: sum(group.lengths) / len(group.lengths) for group in groups}
    speed = next(iter(cluster.engines.values()))
    keys = (
        lambda group: group.longest,
        lambda group: group.longest - 0.5 * work[group.index],
        lambda group: (
            group.longest * speed.step_s + work[group.index] * len(group.lengths) * speed.sequence_s
        ),
    )
    orders = [sorted(groups, key=key, reverse=True) for key in keys]
    if cluster.order == "prompt":
        orders = [sorted(groups, key=lambda group: -group.index)]
    return (
        min(_reversed_s(cluster, order, windows) for order in orders)
        + cluster.step_s
        + cluster.delivery_s
    )


def _reversed_s(cluster: VirtualCluster, order: Sequence[VirtualGroup], windows: Windows) -> float:
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
            chosen = engine_with_room(engines, len(waiting[0].lengths), windows.on_engine)
            if chosen is None:
                break
            ended += engines[chosen].add(waiting.popleft(), now_s)
        left -= len(ended)
        last_s = max([last_s, *(now_s + prompt_s for prompt_s in ended)])
    return last_s


class _ReversedEngine:
    """An engine whose groups begin with their longest response alone, which the others join, and
    end with all of them.
    """

    def __init__(self, cluster: VirtualCluster, name: str) -> None:
        self._speed = cluster.engines[name]
        self._now_s = 0.0
        self._steps = 0.0
        self._prompts_s = 0.0
        self._living = 0
        self._events: list[
            tuple[float, int, int, VirtualGroup]
        ] = []  # (clock, 0 a response joins or 1 all end, index, group)
        self.in_flight_sequences = 0
        self.in_flight_tokens = 0.0
        self.next_s = math.inf

    def add(self, group: VirtualGroup, now_s: float) -> list[float]:
        """At now_s; returns the seconds of the prompts of groups that end in this very step."""
        self._advance(now_s)
        self.in_flight_sequences += len(group.lengths)
        self.in_flight_tokens += sum(group.lengths)
        for length in group.lengths:
            heapq.heappush(
                self._events, (self._steps + group.longest - length, 0, group.index, group)
            )
        heapq.heappush(self._events, (self._steps + group.longest, 1, group.index, group))
        ended = self._take(self._steps)
        self._set_next()
        return ended

    def pass_some(self) -> list[float]:
        """At next_s: what joins, and which groups end; returns the seconds of the prompt of each
        that ends.
        """
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
        seconds = now_s - self._now_s
        self._now_s = now_s
        if not self._living:
            self._prompts_s = 0.0
            return
        spent = min(self._prompts_s, seconds)
        self._prompts_s -= spent
        self._steps += (seconds - spent) / self._step_time()

    def _set_next(self) -> None:
        self.next_s = math.inf
        if self._events:
            self.next_s = (
                self._now_s
                + self._prompts_s
                + (self._events[0][0] - self._steps) * self._step_time()
            )

    def _step_time(self) -> float:
        return self._speed.step_s + self._speed.sequence_s * self._living
