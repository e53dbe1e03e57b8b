"""Weights that one engine passes on to others: each message goes on as soon as it has arrived. Imports torch only.

    trainers' leader, rank 0 ──stage's group──> near engine, first worker ──relay, one group per stage──> workers of far engines
                                                  its rank 0 of the relay, with relays behind them, where they have any

To who receives, a relay is a group of a stage like any other: the same messages in the same order, a sender as rank 0 that says
when it begins, the same digests. So the link between trainers and near engine carries every weight once, however many engines are
behind it, and engines behind engines make a tree of any depth. Messages wait for nothing but messages before them, from the
trainers towards the leaves, so that no two of a tree's groups can wait for each other.

Relays go through host memory (gloo), whatever devices the engines have: links between distant machines are networks of hosts,
devices of different kinds have no other backend in common, and a second communicator on the near engine's device would take turns
with the first (collectives). What is on the way at the same time is bounded, so that the slowest link paces all before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pa_npu.errors import DeadlineExceeded
from pa_npu.weight_transfer import progress, transport
from pa_npu.weight_transfer.relay_plan import RelayPlan
from pa_npu.weight_transfer.transport import Deadline, WeightSyncError

# Messages that are sent while the next ones arrive; each keeps a bucket in memory.
_AHEAD = 2
_HOST = torch.device("cpu")


class Relay:
    """The sending end. groups: one per stage, of which this process is rank 0, with so many workers besides."""

    def __init__(self, groups: Sequence[Any], workers: int, messages: Sequence[int]) -> None:
        """messages: how many each stage has, headers included."""
        self._groups = list(groups)
        self._workers = workers
        self._messages = messages
        self._pending: deque[tuple[transport.Work, int, str]] = deque()
        self._version: int | None = None  # the last that was begun in these groups

    @classmethod
    def join(
        cls, store: tuple[str, int], plan: RelayPlan, messages: Sequence[int], timeout_s: float, rank: int
    ) -> Relay:
        """Forms the groups. rank: of this worker in the groups it receives from, for messages.

        Raises WeightSyncError and DeadlineExceeded, with the workers that are missing.
        """
        groups: list[Any] = []
        try:
            for stage, name in enumerate(plan.names):
                group = transport.join_group(
                    *store,
                    name,
                    rank=0,
                    size=1 + plan.workers,
                    backend=transport.HOST_BACKEND,
                    device=_HOST,
                    timeout_s=timeout_s,
                    describe=f"engine worker {rank} passes on stage {stage} to {_workers(plan.workers)}",
                )
                groups.append(group)
        except (WeightSyncError, DeadlineExceeded):
            for group in groups:
                transport.drop_group(group)
            raise
        return cls(groups, plan.workers, messages)

    def begin(self, version: int) -> None:
        """Those behind may open their collectives: `version` is about to come."""
        self._pending.clear()
        for group in self._groups:
            progress.announce_begin(group, version, self._version)
        self._version = version

    def send(
        self, stage: int, tensor: torch.Tensor, what: str, deadline: Deadline, meanwhile: Callable[[], None]
    ) -> int:
        """Pass on a message of the stage-th group, which is not written to any more; waits for one sent before. what: for messages.

        Returns its bytes, counted once for each worker. Raises as transport.wait.
        """
        while len(self._pending) >= _AHEAD:
            self._arrived(deadline, meanwhile)
        # a copy of a message that lies on a device; the work keeps it
        self._pending.append((transport.broadcast(self._groups[stage], tensor.to(_HOST)), stage, what))
        return tensor.nbytes * self._workers

    def finish(self, deadline: Deadline, meanwhile: Callable[[], None]) -> None:
        """Returns when all that was sent is there. Raises as `send`."""
        while self._pending:
            self._arrived(deadline, meanwhile)

    def close(self, *, unfinished: bool) -> None:
        """unfinished: something may still be on the way."""
        for group in self._groups:
            if unfinished:
                transport.drop_group(group)
            else:
                transport.leave_group(group)
        self._groups = []

    def _arrived(self, deadline: Deadline, meanwhile: Callable[[], None]) -> None:
        """The oldest message that is on the way."""
        work, stage, what = self._pending.popleft()
        transport.wait(
            work,
            deadline,
            f"weight version {self._version}, {what}, passed on to {_workers(self._workers)}",
            "check in the logs of the engines behind this one (rollout.engine_settings) that each is alive, or raise "
            "publish.timeout_s",
            meanwhile=meanwhile,
            blame=lambda: self._laggards(stage),
        )

    def _laggards(self, stage: int) -> str:
        ranks = range(1, 1 + self._workers)
        return progress.laggards(self._groups[stage], ranks, self._version or 0, self._messages[stage])


def _workers(count: int) -> str:
    return f"{count} engine workers behind it" if count > 1 else "the engine worker behind it"
