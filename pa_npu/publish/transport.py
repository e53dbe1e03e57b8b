"""What both ends of a weight publish share: manifest, communication group, waits with a deadline. Imports torch only.

One group per pipeline stage: rank 0 is the stage's tensor-parallel leader, ranks 1.. are the workers of all engines.
Everything flows from rank 0 by broadcast. A publish is, in each stage's group and in this order on every rank:

    header       int64 [2]: weight version, digest of the manifest
    bucket 0..n  one flat tensor each; its segments, laid out one after another, are pieces of flattened HF tensors

The manifest (sent beforehand, as JSON) says which segments a bucket has, so nothing but data crosses the wire.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pa_npu.errors import DeadlineExceeded, PaNpuError

# The pause between polls grows with the time waited, so that a short wait ends promptly and a long one costs nothing.
_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 0.0001, 0.005, 0.002
_LONGEST_JOIN_POLL_S = 0.05
_ABANDONED_POLL_S = 0.1
_ABANDONED_CONNECT_S = 30.0
_dropped: list[dist.ProcessGroup] = []
# The backend's own timeout comes after ours, whose message says more.
_BACKEND_MARGIN_S = 15.0


class WeightSyncError(PaNpuError):
    """Trainer and engine disagree about the weights to exchange, or their connection broke; the message names both."""


def _count(value: Any) -> int:
    """The value of a JSON number that counts something."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


@dataclass(frozen=True)
class Segment:
    """Elements [start, start + size) of the flattened HF tensor `name`."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """One broadcast: segments of one dtype (torch name without prefix, e.g. bfloat16), one after another."""

    dtype: str
    segments: tuple[Segment, ...]

    @property
    def num_elements(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize

    @property
    def summary(self) -> str:
        """First and last tensor, for messages."""
        first, last = self.segments[0].name, self.segments[-1].name
        return first if first == last else f"{first} to {last}"


@dataclass(frozen=True)
class Manifest:
    """What one stage sends: shapes of its HF tensors, and its buckets in order. `model`: sizes that engines compare."""

    stage: int
    model: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def digest(self) -> int:
        text = json.dumps(self.to_json(), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "model": self.model,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "buckets": [
                [bucket.dtype, [[s.name, s.start, s.size] for s in bucket.segments]] for bucket in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Manifest:
        """Raises WeightSyncError unless the segments of each tensor cover it exactly once."""
        try:
            manifest = cls(
                stage=_count(raw["stage"]),
                model={key: _count(value) for key, value in raw["model"].items()},
                shapes={name: tuple(map(_count, shape)) for name, shape in raw["shapes"].items()},
                buckets=tuple(
                    Bucket(
                        str(dtype),
                        tuple(Segment(str(name), _count(start), _count(size)) for name, start, size in segments),
                    )
                    for dtype, segments in raw["buckets"]
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightSyncError(
                f"weight manifest is malformed ({error!r}); trainer and engine must run the same pa_npu"
            ) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for bucket in self.buckets:
            if not all(segment.size for segment in bucket.segments) or not bucket.segments:
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: a bucket or a segment of one is empty; trainer and engine must run "
                    f"the same pa_npu"
                )
            if not isinstance(getattr(torch, bucket.dtype, None), torch.dtype):
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: unknown dtype {bucket.dtype!r}; update torch in the engine"
                )
            for segment in bucket.segments:
                covered.setdefault(segment.name, []).append((segment.start, segment.start + segment.size))
        for name, ranges in covered.items():
            end = 0
            for start, stop in sorted(ranges):
                if start != end:
                    break
                end = stop
            if name not in self.shapes or end != math.prod(self.shapes[name]):
                raise WeightSyncError(
                    f"weight manifest of stage {self.stage}: the segments of {name} do not cover shape "
                    f"{self.shapes.get(name)} exactly once"
                )


class Assembler:
    """Puts a stage's HF tensors together from its buckets, which must come in order."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: dict[str, torch.Tensor] = {}
        self._remaining: dict[str, int] = {}

    def buffer(self, bucket: Bucket, device: torch.device) -> torch.Tensor:
        """Memory to receive a bucket in. Where the bucket is one piece of a tensor, it is the tensor's own memory."""
        segment = bucket.segments[0]
        if len(bucket.segments) == 1 and segment.size < self._size(segment.name):
            return self._place(segment, bucket.torch_dtype, device)
        return torch.empty(bucket.num_elements, dtype=bucket.torch_dtype, device=device)

    def take(self, bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that `buffer`, filled with `bucket`, completes.

        One that came in one piece is a view of the buffer, which must not be reused while the tensor is needed.
        """
        offset = 0
        for segment in bucket.segments:
            data = buffer[offset : offset + segment.size]
            offset += segment.size
            name, shape = segment.name, self._manifest.shapes[segment.name]
            if segment.size == self._size(name):
                yield name, data.view(shape)
                continue
            place = self._place(segment, buffer.dtype, buffer.device)
            if place.data_ptr() != data.data_ptr():
                place.copy_(data)
            self._remaining[name] -= segment.size
            if self._remaining[name] == 0:
                yield name, self._open.pop(name).view(shape)

    def _place(self, segment: Segment, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where a segment lies in its tensor, for which memory is made when the first comes."""
        if segment.name not in self._open:
            size = self._size(segment.name)
            self._open[segment.name] = torch.empty(size, dtype=dtype, device=device)
            self._remaining[segment.name] = size
        return self._open[segment.name][segment.start : segment.start + segment.size]

    def _size(self, name: str) -> int:
        return math.prod(self._manifest.shapes[name])


class Abandonment:
    """The key under which a group's publish is given up, because a member is gone: whoever still waits must stop.

    A name a/b also stops with a, so that everything of one attempt of a run can be given up at once.
    A backend may not notice a dead member (NCCL and HCCL wait for it), so both ends ask, through a store client of their own.
    """

    def __init__(self, host: str, port: int, name: str) -> None:
        self._address = (host, port)
        self._name = name
        self._store: dist.Store | None = None
        self._asked_s = time.monotonic()

    def declare(self, reason: str) -> None:
        self._client().set(f"{self._name}/abandoned", reason)

    def reason(self) -> str | None:
        """Why the publish was given up, if it was; asks the store at most every 0.1 s."""
        if time.monotonic() - self._asked_s < _ABANDONED_POLL_S:
            return None
        self._asked_s = time.monotonic()
        store = self._client()
        scopes = (self._name, self._name.rpartition("/")[0])
        keys = [f"{scope}/abandoned" for scope in scopes if scope]
        return next((store.get(key).decode() for key in keys if store.check([key])), None)

    def _client(self) -> dist.Store:
        if self._store is None:
            timeout = timedelta(seconds=_ABANDONED_CONNECT_S)
            self._store = dist.TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timeout)
        return self._store


class Deadline:
    """A point in time that several waits share; given_up says why they should end before it, if they should."""

    def __init__(self, seconds: float, given_up: Callable[[], str | None] = lambda: None) -> None:
        self.seconds = seconds
        self.given_up = given_up
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        return self.seconds - self.elapsed_s


def wait(
    work: dist.Work,
    deadline: Deadline,
    what: str,
    remedy: str,
    *,
    meanwhile: Callable[[], None] | None = None,
    blame: Callable[[], str] | None = None,
) -> None:
    """Wait for a collective of any backend. `what` and `remedy` are for the message, and `blame`, asked past the deadline.

    `meanwhile` runs between the polls.

    Raises DeadlineExceeded past the deadline and WeightSyncError when the connection broke. Polls, because the timeout
    of Work.wait means different things per backend (gloo: give up; NCCL, HCCL: none unless in blocking mode).
    """
    start = time.monotonic()
    while not work.is_completed():
        if deadline.remaining_s <= 0:
            missing = f" ({blame()})" if blame is not None else ""
            raise DeadlineExceeded(f"{what}: not done within {deadline.seconds:g} s{missing}; {remedy}")
        if reason := deadline.given_up():
            raise WeightSyncError(f"{what}: given up after {deadline.elapsed_s:.1f} s: {reason}")
        if meanwhile is not None:
            meanwhile()
        waited_s = time.monotonic() - start
        time.sleep(min(_LONGEST_POLL_S, _SHORTEST_POLL_S + waited_s * _POLL_SHARE))
    try:
        work.wait()
    except RuntimeError as error:
        raise WeightSyncError(
            f"{what}: the connection broke after {deadline.elapsed_s:.1f} s ({_reason(error)}); {remedy}"
        ) from error


def _reason(error: Exception) -> str:
    """The informative part of torch's message: without source file in front and general advice behind."""
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return first_line.split("] ", 1)[-1].split(". This is typically")[0]


def join_group(
    host: str,
    port: int,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout_s: float,
    describe: str,
    members_timeout_s: float | None = None,
) -> dist.ProcessGroup:
    """Join the group `name` beside whatever default group this process has. A name serves once.

    `host:port` is any c10d TCPStore that all members reach; each uses a client of its own. Blocks until all members are
    there, at most members_timeout_s (default timeout_s). timeout_s is that of one publish. Raises DeadlineExceeded with
    the ranks that are missing, or WeightSyncError, also when the group is abandoned meanwhile.
    """
    timeout = timedelta(seconds=timeout_s + _BACKEND_MARGIN_S)
    deadline = Deadline(members_timeout_s or timeout_s, Abandonment(host, port, name).reason)
    try:
        store = dist.PrefixStore(
            name, dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        )
        _wait_for_members(store, rank, size, deadline, describe)
        # torch's public API makes groups only inside the default group; this helper makes one beside it
        helper = c10d._new_process_group_helper
        options = "backend_options" if "backend_options" in inspect.signature(helper).parameters else "pg_options"
        arguments: dict[str, Any] = {"group_name": name, "timeout": timeout, options: None}
        group, _ = helper(size, rank, [], dist.Backend(backend), store, **arguments)
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(
            f"{describe}: could not join the group of {size} members through the store at {host}:{port} "
            f"({_reason(error)}); check that the store is that of this run, that {backend} is available, and "
            f"that the members reach each other over the network"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _wait_for_members(store: dist.Store, rank: int, size: int, deadline: Deadline, describe: str) -> None:
    """Meet in the store first: the backends' own waits cannot tell who is missing, and take long on the first to come."""
    store.set(f"member/{rank}", "1")
    missing = [member for member in range(size) if member != rank]
    while missing := [member for member in missing if not store.check([f"member/{member}"])]:
        if deadline.remaining_s <= 0:
            raise DeadlineExceeded(
                f"{describe}: ranks {missing} of {size} did not join within {deadline.seconds:g} s (rank 0 is the trainer's, "
                f"the others are engine workers); check that they are alive and were given this run's store and manifests"
            )
        if reason := deadline.given_up():
            raise WeightSyncError(f"{describe}: given up: {reason}")
        time.sleep(min(_LONGEST_JOIN_POLL_S, _SHORTEST_POLL_S + deadline.elapsed_s * 0.1))


def epoch_name(name: str, epoch: int) -> str:
    """The group's name after the `epoch`-th change of its members; a name serves once."""
    return f"{name}.{epoch}" if epoch else name


def leave_group(group: dist.ProcessGroup) -> None:
    """Free a group made by join_group."""
    dist.destroy_process_group(group)


def drop_group(group: dist.ProcessGroup) -> None:
    """Stop using a group made by join_group in which a member is gone or hangs.

    NCCL and HCCL are told to end what is pending. gloo cannot be, and its destructor waits for it, with Python's lock held,
    until the group's timeout: so the object stays until the process ends, which run_and_exit is for.
    """
    if hasattr(group, "abort"):
        group.abort()
    _dropped.append(group)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """sys.exit(main()), which does not wait for what is pending in dropped groups, as the end of the interpreter would."""
    try:
        code = main()
    except Exception:
        if not _dropped:
            raise
        traceback.print_exc()
        code = 1
    if _dropped:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def broadcast(group: dist.ProcessGroup | None, tensor: torch.Tensor, root: int = 0) -> dist.Work:
    """Start a broadcast from the member `root` of the group."""
    assert group is not None
    return group.broadcast(tensor, root)
