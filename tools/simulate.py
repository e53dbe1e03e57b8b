"""One iteration in virtual time: the coordinator's own dispatch and assignment code between virtual engines and trainers.

    Dispatching ──turn, window──> engine_with_room ──> VirtualEngine ──complete──> delivery ──> Assignment ──slot──> replica

The order of dispatch, the windows, which engine a group goes to and which replica trains it in
which slot are decided by pa_npu/dispatch, as in a run. Replicas take their slots in turn and wait
for each other at an optimizer step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pa_npu.dispatch.assignment import Assignment
from pa_npu.dispatch.schedule import Dispatching, Schedule, engine_with_room
from pa_npu.planning.iteration_model.subjects import GroupTiming, VirtualCluster, VirtualGroup
from tools.virtual_engine import VirtualEngine

# Two moments this close are one: turns that are computed from completions meet them but for
# rounding.
_SAME_MOMENT_S = 1e-9


@dataclass(frozen=True)
class Outcome:
    """Seconds from the first dispatch. end_s: the last optimizer step is done; generated_s: the
    last response is there.

    train_s: seconds that replicas trained, their mean, steps included. timings: of the groups, as
    they completed.
    """

    end_s: float
    generated_s: float
    train_s: float
    timings: tuple[GroupTiming, ...]


def simulate(
    cluster: VirtualCluster,
    groups: Sequence[VirtualGroup],
    schedule: Schedule,
    *,
    streams: bool = True,
) -> Outcome:
    """Returns an iteration of `groups`, which are numbered from 0 and as many as the replicas'
    slots, plus replacements.

    streams: groups are delivered as they complete, not all at the end. With dynamic sampling the
    groups from len(schedule.order) on are the replacements, each dispatched when an uninformative
    one is complete.
    """
    return _Iteration(cluster, groups, schedule, streams).run()


@dataclass
class _Replica:
    slots: dict[int, float] = field(default_factory=dict)  # slot -> seconds of what is in it
    next_slot: int = 0
    finish_s: float = math.inf
    busy_s: float = 0.0


class _Iteration:
    def __init__(
        self,
        cluster: VirtualCluster,
        groups: Sequence[VirtualGroup],
        schedule: Schedule,
        streams: bool,
    ) -> None:
        self._cluster = cluster
        self._groups = groups
        self._streams = streams
        self._engines: dict[str, VirtualEngine[tuple[VirtualGroup, float]]] = {
            name: VirtualEngine(speed, cluster.max_num_seqs)
            for name, speed in cluster.engines.items()
        }
        # what happens next, found without asking every engine and replica: (time, number), those of
        # engines with old entries
        self._by_number = list(self._engines.values())
        self._numbers = {name: number for number, name in enumerate(self._engines)}
        self._ends: list[tuple[float, int]] = []
        self._finishes: list[tuple[float, int]] = []
        self._dispatching = Dispatching(schedule, len(self._engines))
        self._waiting = deque(groups[index] for index in schedule.order)
        self._replacements = deque(groups[len(schedule.order) :])
        self._total = len(schedule.order)
        per_replica = self._total // cluster.replicas
        self._per_share = per_replica // cluster.updates
        first = groups[: self._total]
        self._assignment = Assignment(
            cluster.order,
            cluster.replicas,
            per_replica,
            cluster.updates,
            sum(group.train_s for group in first),
        )
        self._replicas = [_Replica() for _ in range(cluster.replicas)]
        self._idle: list[int] = []  # replicas that may begin a slot now
        self._num_ended = 0  # replicas that have trained their part of the share
        self._deliveries: list[tuple[float, int, VirtualGroup]] = []
        self._held: list[VirtualGroup] = []
        self._num_informative = self._num_assigned = self._num_steps = 0
        self._step_ends_s = math.inf
        self._now_s = self._generated_s = 0.0
        self._timings: list[GroupTiming] = []

    def run(self) -> Outcome:
        names = list(self._engines)
        engines = list(self._engines.values())
        timer_s = self._dispatch()
        while self._num_steps < self._cluster.updates:
            engine_s = self._next_end_s()
            finish_s = self._finishes[0][0] if self._finishes else math.inf
            delivery_s = self._deliveries[0][0] if self._deliveries else math.inf
            self._now_s = min(engine_s, finish_s, delivery_s, self._step_ends_s, timer_s)
            if self._now_s == math.inf:
                raise ValueError(
                    f"nothing happens any more: of {self._total} groups {self._num_informative} "
                    f"are complete and {self._num_assigned} assigned"
                )
            if self._now_s == engine_s:
                number = heapq.heappop(self._ends)[1]
                complete = engines[number].end_some()
                heapq.heappush(self._ends, (engines[number].next_s, number))
                if not complete:
                    continue  # only sequences whose groups go on
                self._complete(names[number], complete)
                timer_s = self._dispatch()
            elif self._now_s == delivery_s:
                self._deliver(heapq.heappop(self._deliveries)[2])
            elif self._now_s == finish_s:
                number = heapq.heappop(self._finishes)[1]
                self._replicas[number].finish_s = math.inf
                self._replicas[number].next_slot += 1
                self._idle.append(number)
                self._end_share(number)
            elif self._now_s == self._step_ends_s:
                self._step_ends_s = math.inf
                self._num_steps += 1
                self._num_ended = 0
                self._idle = list(range(len(self._replicas)))
            else:
                timer_s = self._dispatch()
            self._train()
        busy_s = sum(replica.busy_s for replica in self._replicas) / len(self._replicas)
        train_s = busy_s + self._cluster.updates * self._cluster.step_s
        return Outcome(self._now_s, self._generated_s, train_s, tuple(self._timings))

    def _next_end_s(self) -> float:
        """When the next sequence ends on any engine; entries of the heap that an engine has left
        behind are dropped.
        """
        engines = self._by_number
        while self._ends and self._ends[0][0] != engines[self._ends[0][1]].next_s:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def _dispatch(self) -> float:
        """Gives out what may go; returns the time at which to come back even if nothing happens
        before.
        """
        dispatching = self._dispatching
        while self._waiting:
            ready_s = dispatching.ready_at()
            if ready_s > self._now_s + _SAME_MOMENT_S:
                return ready_s
            group = self._waiting[0]
            name = engine_with_room(self._engines, len(group.lengths), dispatching.window)
            if name is None:
                break
            group = self._next_for(name)
            self._engines[name].add(
                (group, self._now_s),
                self._now_s,
                group.prompt_tokens,
                group.lengths,
                group.expected_tokens,
            )
            heapq.heappush(self._ends, (self._engines[name].next_s, self._numbers[name]))
            dispatching.note_dispatched()
        return math.inf

    def _next_for(self, engine: str) -> VirtualGroup:
        """Takes the group that goes to this engine from those that wait."""
        limit = self._dispatching.schedule.slow_engine_limit
        if limit is None or self._waiting[0].index >= self._total:
            return self._waiting.popleft()
        place = limit.place(
            engine,
            [group.index for group in self._waiting if group.index < self._total],
            self._now_s,
        )
        group = self._waiting[place]
        del self._waiting[place]
        return group

    def _complete(self, engine: str, jobs: list[tuple[VirtualGroup, float]]) -> None:
        for group, start_s in jobs:
            self._generated_s = self._now_s
            self._dispatching.note_completed(self._now_s)
            lengths = tuple(round(length) for length in group.lengths)
            timing = GroupTiming(
                group.index,
                engine,
                start_s,
                self._now_s,
                group.prompt_tokens,
                lengths,
                self._cluster.delivery_s,
                group.informative,
            )
            self._timings.append(timing)
            if not group.informative:
                if self._replacements:
                    self._waiting.append(self._replacements.popleft())
                continue
            number = self._num_informative
            self._num_informative = self._num_informative + 1
            if self._streams:
                heapq.heappush(
                    self._deliveries, (self._now_s + self._cluster.delivery_s, number, group)
                )
                continue
            self._held.append(group)
            if self._num_informative == self._total:
                self._deliver_held()

    def _deliver(self, group: VirtualGroup) -> None:
        # with replacements groups are numbered as they are released
        replaced = len(self._groups) > self._total
        index = self._num_assigned if replaced else group.index
        self._num_assigned += 1
        replica, slot = self._assignment.assign(index, group.train_s)
        self._replicas[replica].slots[slot] = group.train_s
        self._idle.append(replica)

    def _deliver_held(self) -> None:
        replaced = len(self._groups) > self._total
        indices = [number if replaced else group.index for number, group in enumerate(self._held)]
        slots = self._assignment.assign_all(indices, [group.train_s for group in self._held])
        self._num_assigned = len(slots)
        for group, (replica, slot) in zip(self._held, slots, strict=True):
            self._replicas[replica].slots[slot] = group.train_s
            self._idle.append(replica)

    def _train(self) -> None:
        """Replicas that stand still begin their next slot, if it is there and belongs to the share
        that is trained now.
        """
        end = (self._num_steps + 1) * self._per_share
        for number in self._idle:
            replica = self._replicas[number]
            if (
                replica.finish_s == math.inf
                and replica.next_slot < end
                and replica.next_slot in replica.slots
            ):
                seconds = replica.slots.pop(replica.next_slot)
                replica.finish_s = self._now_s + seconds
                replica.busy_s += seconds
                heapq.heappush(self._finishes, (replica.finish_s, number))
        self._idle.clear()

    def _end_share(self, number: int) -> None:
        """The optimizer step begins when every replica has trained its part of a share."""
        self._num_ended += (
            self._replicas[number].next_slot == (self._num_steps + 1) * self._per_share
        )
        if self._num_ended == len(self._replicas):
            self._step_ends_s = self._now_s + self._cluster.step_s
