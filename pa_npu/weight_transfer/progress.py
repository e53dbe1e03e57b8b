"""Tells through the group's store how far sender and receivers are in a publish.

The sender puts `begun/VERSION` right before its header. Receivers that were asked to load ahead of time wait for that key, with
no collective open, whose own timeout would run meanwhile.

Every engine worker puts `at/RANK` = "version messages wall-time" when it begins to receive and then at most once per
BEAT_S, also while it waits. Only a sender that has run out of time reads it, to name whom it waits for. Imports torch only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

BEAT_S = 1.0
# A worker that says nothing for so long is stopped or dead: it beats while it waits, and loads a bucket in less.
SILENT_S = 10.0
_NAMED = 8


def announce_begin(group: Any, version: int, before: int | None) -> None:
    """The sender is about to send `version`, and was at `before` the last time."""
    store = group_store(group)
    store.set(_begun(version), "")
    if before is not None and before != version:
        store.delete_key(_begun(before))


def has_begun(group: Any, version: int) -> bool:
    """Whether the sender of this group is about to send `version`, or has begun."""
    return bool(group_store(group).check([_begun(version)]))


def _begun(version: int) -> str:
    return f"begun/{version}"


class Progress:
    """One receiver's, in the groups of all stages: call `beat` as often as is convenient."""

    def __init__(self, groups: Sequence[Any], rank: int) -> None:
        self._stores = [group_store(group) for group in groups]
        self._key = f"at/{rank}"
        self._version = 0
        self._messages = [0] * len(groups)
        self._next_s = 0.0

    def begin(self, version: int) -> None:
        """This worker is about to receive `version`."""
        self._version, self._messages, self._next_s = version, [0] * len(self._stores), 0.0
        self.beat()

    def arrived(self, stage: int) -> None:
        """One more message, header or bucket, of the stage-th group."""
        self._messages[stage] += 1
        self.beat()

    def beat(self) -> None:
        """This worker is alive."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + BEAT_S
        for store, messages in zip(self._stores, self._messages, strict=True):
            store.set(self._key, f"{self._version} {messages} {time.time():.3f}")


def laggards(group: Any, ranks: Iterable[int], version: int, messages: int) -> str:
    """For a message: which of `ranks` keep `version`, of so many messages, from completing, and what is known of each."""
    store = group_store(group)
    absent, silent, behind = [], [], []
    for rank in ranks:
        key = f"at/{rank}"
        at = store.get(key).decode().split() if store.check([key]) else None
        if at is None or int(at[0]) != version:
            absent.append(rank)
        elif (age_s := time.time() - float(at[2])) > SILENT_S:
            silent.append(f"{rank} ({at[1]} of {messages} messages, silent for {age_s:.0f} s)")
        else:
            behind.append(f"{rank} ({at[1]} of {messages} messages)")
    # a broadcast passes nobody by: who is there and alive waits for those who are not
    if absent:
        return f"not in pa_receive of version {version}: {_ranks(absent)}"
    if silent:
        return f"stopped or dead: {_ranks(silent)}"
    return f"all alive, slow: {_ranks(behind)}"


def group_store(group: Any) -> dist.Store:
    """The store on which the group met, with the group's own prefix."""
    if hasattr(group, "get_group_store"):
        store: dist.Store = group.get_group_store()
        return store
    return c10d._world.pg_map[group][1]


def _ranks(names: list[int] | list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names[:_NAMED]))}{more}"
