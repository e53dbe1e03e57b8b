"""The groups through which weights travel, and waits with a deadline, which both ends of a publish share. Imports torch only.

One group per pipeline stage: rank 0 is the stage's tensor-parallel leader, ranks 1.. are the
workers of all engines. Everything flows from rank 0 by broadcast. A publish is, in each stage's
group and in this order on every rank:

    header       int64 [2]: weight version, digest of the manifest
    bucket 0..n  one flat tensor each; its segments, laid out one after another, are pieces of
                 flattened HF tensors

Engines on the trainers' devices, where the backend does not let two ranks of a group share one, are
in a second group of each stage, to which the same leader sends the same messages in another way
(Way):

    group     the usual one
    host      a torch group through host memory (HOST_BACKEND)

Keys under a group's own prefix in the store: `member/RANK` (it is about to join), `abandoned` (it
is given up, and why), and `begun/VERSION` (it is about to be sent). What backends of collectives do
differently is in pa_npu.weight_transfer.collectives.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pa_npu.errors import DeadlineExceeded, PaNpuError
from pa_npu.weight_transfer import collectives

logger = logging.getLogger(__name__)

# The pause between polls grows with the time waited, so that a short wait ends promptly and a long
# one costs nothing: the longest pause, and the share of the time waited.
Polls = tuple[float, float]
_SHORTEST_POLL_S = 0.0001
_OF_A_BROADCAST: Polls = (0.005, 0.002)
_OF_JOINING: Polls = (0.05, 0.1)
_ABANDONED_POLL_S = 0.1
_ABANDONED_CONNECT_S = 30.0
_ABORT_S = 30.0
_CPU = torch.device("cpu")
HOST_BACKEND = "gloo"
"""Backend of groups that go through host memory."""
Way = Literal["group", "host"]
T = TypeVar("T")
# Groups that were dropped, and threads that never came back from making one: the end of the
# interpreter would wait for them.
_left_behind: list[object] = []
# The backend's own timeout comes after ours, whose message says more.
_BACKEND_MARGIN_S = 15.0


class WeightSyncError(PaNpuError):
    """Trainer and engine disagree about the weights to exchange, or their connection broke; the
    message names both.
    """


class Abandonment:
    """The key under which a group's publish is given up, because a member is gone: whoever still
    waits must stop.

    A name a/b/c also stops with a/b and with a: everything of one attempt of a run can be given up
    at once, and all groups of an epoch (group_name).
    A backend may not notice a dead member (NCCL and HCCL wait for it), so both ends ask, through a
    store client of their own.
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
        parts = self._name.split("/")
        keys = [f"{'/'.join(parts[:end])}/abandoned" for end in range(len(parts), 0, -1)]
        return next((store.get(key).decode() for key in keys if store.check([key])), None)

    def _client(self) -> dist.Store:
        if self._store is None:
            timeout = timedelta(seconds=_ABANDONED_CONNECT_S)
            self._store = dist.TCPStore(
                *self._address, is_master=False, wait_for_workers=False, timeout=timeout
            )
        return self._store


class Deadline:
    """A point in time that several waits share; given_up says why they should end before it, if
    they should.
    """

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


def until(
    done: Callable[[], bool],
    deadline: Deadline,
    polls: Polls,
    what: str,
    remedy: str,
    late: Callable[[], str] = lambda: "not done",
) -> None:
    """Poll until `done`. Raises DeadlineExceeded, and WeightSyncError when it is given up
    meanwhile.

    what, late, remedy: of the message of an error: "WHAT: LATE within 3 s; REMEDY".
    """
    start = time.monotonic()
    longest_s, share = polls
    while not done():
        if deadline.remaining_s <= 0:
            raise DeadlineExceeded(f"{what}: {late()} within {deadline.seconds:g} s; {remedy}")
        if reason := deadline.given_up():
            raise WeightSyncError(f"{what}: given up after {deadline.elapsed_s:.1f} s: {reason}")
        time.sleep(min(longest_s, _SHORTEST_POLL_S + (time.monotonic() - start) * share))


def wait(
    work: dist.Work,
    deadline: Deadline,
    what: str,
    remedy: str,
) -> None:
    """Wait for a collective of any backend. Raises as `until`, and WeightSyncError when the
    connection broke.

    Polls, because Work.wait's timeout differs by backend (gloo: give up; NCCL, HCCL: none unless in
    blocking mode).
    """
    until(work.is_completed, deadline, _OF_A_BROADCAST, what, remedy)
    try:
        work.wait()
    except RuntimeError as error:
        why = (
            f"{_reason(error)}; given up: {given_up}"
            if (given_up := _given_up_after(deadline))
            else _reason(error)
        )
        raise WeightSyncError(
            f"{what}: the connection broke after {deadline.elapsed_s:.1f} s ({why}); {remedy}"
        ) from error


def _given_up_after(deadline: Deadline) -> str | None:
    """Whether a connection broke because the publish was given up, which is said beside it and may
    be seen later.
    """
    time.sleep(_ABANDONED_POLL_S)
    try:
        return deadline.given_up()
    except dist.DistError:  # the store has gone as well
        return None


def _reason(error: Exception) -> str:
    """The informative part of torch's message: without source file in front and general advice
    behind.
    """
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
    device: torch.device = _CPU,
) -> dist.ProcessGroup:
    """Join the group `name` beside whatever default group this process has. A name serves once.

    Args:
        host, port: of any c10d TCPStore that all members reach; each uses a client of its own.
        timeout_s: until all members are there, communicator included; and of one publish.
        device: of the tensors that will be sent.
    Raises DeadlineExceeded, with the ranks that are missing, or WeightSyncError, also when the
    group is abandoned meanwhile.
    """
    timeout = timedelta(seconds=timeout_s + _BACKEND_MARGIN_S)
    deadline = Deadline(timeout_s, Abandonment(host, port, name).reason)
    try:
        store = dist.PrefixStore(
            name,
            dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
        )
        rules = collectives.rules(backend)
        if problem := rules.check():
            raise WeightSyncError(f"{describe}: {problem}")
        wait_for_members(store, rank, size, rules.terms(), deadline, describe)
        group = _make_group(store, name, rank, size, backend, timeout, device, deadline, describe)
    except (RuntimeError, ValueError) as error:
        raise WeightSyncError(
            f"{describe}: could not join the group of {size} members through the store at "
            f"{host}:{port} ({_reason(error)}); check that the store is that of this run, that "
            f"{backend} is available, and that the members reach each other over the network"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _make_group(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    deadline: Deadline,
    describe: str,
) -> dist.ProcessGroup:
    """The group, its communicator included.

    Both are made in a thread: neither call can be told our deadline.
    """
    rules = collectives.rules(backend)
    # torch's public API makes groups only inside the default group; this helper makes one beside it
    helper = c10d._new_process_group_helper
    options = (
        "backend_options"
        if "backend_options" in inspect.signature(helper).parameters
        else "pg_options"
    )
    arguments: dict[str, Any] = {"group_name": name, "timeout": timeout, options: None}
    index = _device_index(device)
    made: list[dist.ProcessGroup] = []
    first: list[dist.Work] = []

    def make() -> None:
        if index is not None:  # which device is the current one is a thread's own
            torch.accelerator.set_device_index(index)
        with rules.making():
            made.append(helper(size, rank, [], dist.Backend(backend), store, **arguments)[0])
        if rules.lazy and size > 1:
            first.append(made[0].broadcast(torch.zeros(1, device=device), 0))

    what = f"{describe}: making the communicator of group {name} of {size} members"
    remedy = (
        "look at the logs of its members for one that died or cannot be reached, or raise "
        "publish.timeout_s"
    )
    try:
        _within(make, deadline, what, remedy)
        for work in first:
            wait(work, deadline, what, remedy)
    except (DeadlineExceeded, WeightSyncError):
        for group in made:
            drop_group(group, device, "its communicator could not be made")
        raise
    return made[0]


def _within(call: Callable[[], T], deadline: Deadline, what: str, remedy: str) -> T:
    """`call` in a thread, for calls that block as long as they like. The thread stays behind where
    it is given up.

    Raises what it raises, and as `until`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # handed to the caller
            result.set_exception(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    try:
        until(result.done, deadline, _OF_JOINING, what, remedy)
    except PaNpuError:
        _left_behind.append(thread)
        raise
    return result.result()


def _device_index(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    return device.index if device.index is not None else torch.accelerator.current_device_index()


def wait_for_members(
    store: dist.Store, rank: int, size: int, terms: str, deadline: Deadline, describe: str
) -> None:
    """Meet in the store first: the backends' own waits cannot tell who is missing, and take long on
    the first to come.

    terms: what must be equal on all members (Gloo.terms).
    """
    store.set(f"member/{rank}", terms)
    members = [member for member in range(size) if member != rank]
    missing = members

    def all_there() -> bool:
        nonlocal missing
        missing = [member for member in missing if not store.check([f"member/{member}"])]
        return not missing

    remedy = (
        "rank 0 sends, the others are engine workers; check that they are alive and were "
        "given this run's store and manifests"
    )
    until(
        all_there,
        deadline,
        _OF_JOINING,
        describe,
        remedy,
        lambda: f"ranks {missing} of {size} did not join",
    )
    if not terms:
        return
    for member in members:
        if (others := store.get(f"member/{member}").decode()) != terms:
            raise WeightSyncError(
                f"{describe}: rank {member} has {others or 'none of it'}, this process {terms}; "
                "set it alike in the environments of engines and trainers"
            )


def epoch_name(name: str, epoch: int) -> str:
    """The name of all groups that form after the `epoch`-th change of their members; they are given
    up by it together.
    """
    return f"{name}/{epoch}"


def group_name(name: str, epoch: int, way: Way = "group") -> str:
    """The name of the group that goes this way; a name serves once."""
    return f"{epoch_name(name, epoch)}/{way}"


def announce_begin(group: dist.ProcessGroup, version: int, before: int | None) -> None:
    """The sender is about to send `version`, and was at `before` the last time.

    Receivers that were asked to load ahead of time wait for it with no collective open, whose own
    timeout would run meanwhile.
    """
    store = _group_store(group)
    store.set(_begun(version), "")
    if before is not None and before != version:
        store.delete_key(_begun(before))


def has_begun(group: dist.ProcessGroup, version: int) -> bool:
    """Whether the sender of this group is about to send `version`, or has begun."""
    return bool(_group_store(group).check([_begun(version)]))


def _begun(version: int) -> str:
    return f"begun/{version}"


def _group_store(group: Any) -> dist.Store:
    """The store on which the group met, with the group's own prefix."""
    if hasattr(group, "get_group_store"):
        store: dist.Store = group.get_group_store()
        return store
    return c10d._world.pg_map[group][1]


def leave_group(group: dist.ProcessGroup) -> None:
    """Free a group made by join_group."""
    dist.destroy_process_group(group)


def drop_group(
    group: dist.ProcessGroup, device: torch.device = _CPU, reason: str = "it lost a member"
) -> None:
    """Stop using a group made by join_group in which a member is gone or hangs: end what is
    pending, where the backend can.

    Where it cannot, as gloo, the group's destructor would wait for it, with Python's lock held,
    until the group's timeout: so the object stays until the process ends, which run_and_exit is
    for.
    """
    _left_behind.append(group)
    backend, _ = c10d._world.pg_map.get(group, ("gloo", None))
    what = f"ending what is pending in a group of {backend} that was given up"
    try:
        _within(
            lambda: collectives.rules(backend).abort(group, device, reason),
            Deadline(_ABORT_S),
            what,
            "it stays as it is",
        )
    except (DeadlineExceeded, RuntimeError) as error:
        logger.warning("%s failed, and it may end this process later: %s", what, _reason(error))


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main()'s code, and at once, where the end of the interpreter would wait
    for what is pending in dropped groups and for what libraries do at exit, and would abort over a
    thread that waits in a store."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def broadcast(group: dist.ProcessGroup | None, tensor: torch.Tensor, root: int = 0) -> dist.Work:
    """Start a broadcast from the member `root` of the group."""
    assert group is not None
    try:
        work: dist.Work = group.broadcast(tensor, root)
        return work
    except RuntimeError as error:
        raise WeightSyncError(
            f"a broadcast could not be started ({_reason(error)}); look at the members' logs"
        ) from error
