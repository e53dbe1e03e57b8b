"""Sources of an iteration's groups for the iterator: GroupSource, and LoneReader for a replica of one rank.

A replica of several ranks has one reader, which passes groups on (samples/replica_feed.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Protocol

from pa_npu.errors import DeadlineExceeded
from pa_npu.samples.group import Group
from pa_npu.samples.rollout_buffer import RolloutBuffer


@dataclass(frozen=True)
class Traffic:
    """How groups came to one replica: reads and bytes from the buffer, bytes from the store on the head among them or said of
    them, and bytes that its ranks got over collectives, each receiver's counted."""

    reads: int = 0
    buffer_bytes: int = 0
    head_bytes: int = 0
    collective_bytes: int = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            self.reads + other.reads,
            self.buffer_bytes + other.buffer_bytes,
            self.head_bytes + other.head_bytes,
            self.collective_bytes + other.collective_bytes,
        )

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.reads - before.reads,
            self.buffer_bytes - before.buffer_bytes,
            self.head_bytes - before.head_bytes,
            self.collective_bytes - before.collective_bytes,
        )


@dataclass(frozen=True)
class Parsed:
    """A group and the pieces that it is trained in, which remember their layouts.

    advantages: each sample's, where they were checked against the rewards.
    """

    group: Group
    pieces: list[Group]
    advantages: list[float] | None = None


@dataclass(frozen=True)
class Taken:
    """waited_s: how long this rank stood still for it; None where the group was parsed before it was asked for."""

    parsed: Parsed
    waited_s: float | None


Lost = Callable[[int], None]
"""Raises InvariantViolation where a slot is empty although the coordinator has filled it; asked while the slot is waited for."""

LONGEST_WAIT_S = 1.0
"""A slot is waited for in pieces of this length, between which is asked whether it is lost, or still wanted."""

Parse = Callable[[bytes, bytes | None], Parsed]
"""What is done with a group's bytes beside training. Given the whole, and None, or the two parts of samples.wire.split."""


class GroupSource(Protocol):
    """One rank's way to the groups of its replica in one iteration, asked for in slot order, by one thread."""

    @property
    def traffic(self) -> Traffic:
        """The traffic of the groups taken so far, equal on all ranks of the replica."""

    def take(self, slot: int, wait: bool) -> Taken | None:
        """The slot's group; without `wait` None where it has not arrived, on all ranks of a tensor-parallel group alike.

        Raises DeadlineExceeded (no group in time), GroupFormatError (damaged bytes), GroupsNotPassed (a rank is gone).
        """

    def look_ahead(self, slot: int) -> None:
        """Prepare the slot's group beside training, if it is there."""

    def close(self) -> None:
        """Nothing more will be taken."""


class LoneReader:
    """The only rank of its replica: it reads when it needs a group, and a thread prepares the next one where that is there."""

    def __init__(
        self, buffer: RolloutBuffer, *, replica: int, iteration: int, timeout_s: float, parse: Parse, lost: Lost
    ) -> None:
        self._buffer = buffer
        self._lost = lost
        self._replica, self._iteration, self._timeout_s = replica, iteration, timeout_s
        self._parse = parse
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groups ahead")
        self._ahead: Future[Parsed] | None = None
        self.traffic = Traffic()

    def take(self, slot: int, wait: bool) -> Taken | None:
        if self._ahead is not None:
            parsed = self._prepared(self._ahead, slot)
            self._ahead = None
            return Taken(parsed, None)
        waited_s = 0.0
        if wait:
            waited_s = self._wait(slot)
        elif not self._buffer.ready(self._iteration, self._replica, slot):
            return None
        return Taken(self._parse(self._read(slot), None), waited_s)

    def look_ahead(self, slot: int) -> None:
        if self._ahead is None and self._buffer.ready(self._iteration, self._replica, slot):
            self._ahead = self._thread.submit(self._parse, self._read(slot), None)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _wait(self, slot: int) -> float:
        start_s = time.monotonic()
        while True:
            passed_s = time.monotonic() - start_s
            try:
                piece_s = min(LONGEST_WAIT_S, self._timeout_s - passed_s)
                return passed_s + self._buffer.wait(self._iteration, self._replica, slot, piece_s)
            except DeadlineExceeded:
                self._lost(slot)
                if time.monotonic() - start_s >= self._timeout_s:
                    raise DeadlineExceeded(
                        f"waited for the group of slot {slot}, replica {self._replica}, iteration {self._iteration}, from the "
                        f"coordinator: deadline of {self._timeout_s:g} s reached"
                    ) from None

    def _read(self, slot: int) -> bytes:
        before = self._buffer.head_bytes
        data = self._buffer.read_bytes(self._iteration, self._replica, slot)
        self.traffic = self.traffic.plus(Traffic(1, len(data), self._buffer.head_bytes - before))
        return data

    def _prepared(self, ahead: Future[Parsed], slot: int) -> Parsed:
        try:
            return ahead.result(self._timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"the group of slot {slot} of replica {self._replica} in iteration {self._iteration} was not parsed within "
                f"{self._timeout_s:g} s; is the machine out of memory?"
            ) from None
