"""The groups through which weights travel, and waits with a deadline, for both ends of a publish.

Imports torch only. There is one group per sender, of which each pipeline stage has one or more:
rank 0 is the sender, ranks 1.. are the workers of all engines. Rank 0 broadcasts everything. A
publish is, in each sender's group and in this order on every rank:

    header       int64 [2]: weight version, digest of the manifest
    bucket 0..n  one flat tensor each; its segments, one after another, are pieces of flattened HF
                 tensors, or blocks of their columns

All senders send at the same time; workers take the messages of all groups in turn.

Some backends do not let two ranks of a group share a device. Engines on the trainers' devices are
then in a second group of each sender, in which it sends the same messages another way
(Way):

    group     the usual one
    host      a torch group through host memory (HOST_BACKEND)

Under a group's own prefix the store has the keys `member/RANK` (it is about to join), `abandoned`
(the reason why the group is given up), and `begun/VERSION` (it is about to be sent).
pa_npu.weight_transfer.collectives has the differences between backends of collectives.
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

# The longest pause between polls, and its share of the time waited: the pause grows, so that a
# short wait ends promptly and a long one costs nothing.
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
# Dropped groups, and threads that never came back from making one: the end of the interpreter would
# wait for them.
_left_behind: list[object] = []
# The backend's own timeout comes after the one here, whose message says more.
_BACKEND_MARGIN_S = 15.0


class WeightSyncError(PaNpuError):
    """Trainer and engine disagree about the weights, or their connection broke.

    The message names both.
    """


class Abandonment:
    """The key under which a group's publish is given up, because a member is gone.

    All that still wait must stop. A name a/b/c also stops with a/b and with a: everything of one
    attempt of a run can be given up together, and all groups of an epoch (group_name).

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
        """Returns why the publish was given up, or None; asks the store at most every 0.1 s."""
        if time.monotonic() - self._asked_s < _ABANDONED_POLL_S:
            return None
        self._asked_s = time.monotonic()
        store = self._client()
        parts = self._name.split("/")
        keys = [f"{'/'.join(parts[:end])}/abandoned" for end in range(len(parts), 0, -1)]
        for key in keys:
            if store.check([key]):
                return store.get(key).decode()
        return None

    def _client(self) -> dist.Store:
        if self._store is None:
            timeout = timedelta(seconds=_ABANDONED_CONNECT_S)
            self._store = dist.TCPStore(
                *self._address, is_master=False, wait_for_workers=False, timeout=timeout
            )
        return self._store


class Deadline:
    """A point in time that several waits share.

    `given_up` returns the reason to end a wait before it, or None.
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


def wait_until(
    done: Callable[[], bool],
    deadline: Deadline,
    polls: Polls,
    action: str,
    remedy: str,
    late: Callable[[], str] = lambda: "not done",
) -> None:
    """Polls until `done` returns True.

    Raises DeadlineExceeded, and WeightSyncError if it is given up meanwhile. Messages of errors
    read "ACTION: LATE within 3 s; REMEDY".
    """
    start = time.monotonic()
    longest_s, share = polls
    while not done():
        if deadline.remaining_s <= 0:
            raise DeadlineExceeded(f"{action}: {late()} within {deadline.seconds:g} s; {remedy}")
        if reason := deadline.given_up():
            raise WeightSyncError(f"{action}: given up after {deadline.elapsed_s:.1f} s: {reason}")
        time.sleep(min(longest_s, _SHORTEST_POLL_S + (time.monotonic() - start) * share))


def wait(
    work: dist.Work,
    deadline: Deadline,
    action: str,
    remedy: str,
) -> None:
    """Waits for a collective of any backend.

    Polls, because Work.wait's timeout differs by backend (gloo gives up; NCCL and HCCL have none
    unless in blocking mode). Raises as `wait_until` does, and WeightSyncError if the connection
    broke.
    """
    wait_until(work.is_completed, deadline, _OF_A_BROADCAST, action, remedy)
    try:
        work.wait()
    except RuntimeError as error:
        why = _reason(error)
        if given_up := _given_up_after(deadline):
            why = f"{why}; given up: {given_up}"
        raise WeightSyncError(
            f"{action}: the connection broke after {deadline.elapsed_s:.1f} s ({why}); {remedy}"
        ) from error


def _given_up_after(deadline: Deadline) -> str | None:
    """Returns why the publish was given up, if that broke the connection.

    The key may be seen later than the break.
    """
    time.sleep(_ABANDONED_POLL_S)
    try:
        return deadline.given_up()
    except dist.DistError:  # the store has gone as well
        return None


def _reason(error: Exception) -> str:
    """Returns the informative part of torch's message, without source file and general advice."""
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
    """Joins the group `name` beside this process's default group. A name serves once.

    Args:
        host, port: of any c10d TCPStore that all members reach; each uses a client of its own.
        name: of the group.
        rank: of this member.
        size: number of members.
        backend: of collectives.
        timeout_s: until all members are there, communicator included; and of one publish.
        describe: the member's part, for messages.
        device: of the tensors that will be sent.

    Raises DeadlineExceeded with the ranks that are missing, or WeightSyncError, also if the group
    is abandoned meanwhile.
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
    """Returns the group, its communicator included.

    Both are made in a thread: neither call has a deadline of its own.
    """
    rules = collectives.rules(backend)
    # torch's public API makes groups only inside the default group; this helper makes one beside it.
    helper = c10d._new_process_group_helper
    options = "pg_options"
    if "backend_options" in inspect.signature(helper).parameters:
        options = "backend_options"
    arguments: dict[str, Any] = {"group_name": name, "timeout": timeout, options: None}
    index = _device_index(device)
    made: list[dist.ProcessGroup] = []
    first: list[dist.Work] = []

    def make() -> None:
        if index is not None:  # each thread has a current device of its own
            torch.accelerator.set_device_index(index)
        with rules.making():
            made.append(helper(size, rank, [], dist.Backend(backend), store, **arguments)[0])
        if rules.lazy and size > 1:
            first.append(made[0].broadcast(torch.zeros(1, device=device), 0))

    action = f"{describe}: making the communicator of group {name} of {size} members"
    remedy = (
        "look at the logs of its members for one that died or cannot be reached, or raise "
        "publish.timeout_s"
    )
    try:
        _within(make, deadline, action, remedy)
        for work in first:
            wait(work, deadline, action, remedy)
    except (DeadlineExceeded, WeightSyncError):
        for group in made:
            drop_group(group, device, "its communicator could not be made")
        raise
    return made[0]


def _within(call: Callable[[], T], deadline: Deadline, action: str, remedy: str) -> T:
    """Runs `call` in a thread, for calls that block as long as they like.

    The thread stays behind if it is given up. Raises what `call` raises, and as `wait_until` does.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # handed to the caller
            result.set_exception(error)

    thread = threading.Thread(target=run, name=action, daemon=True)
    thread.start()
    try:
        wait_until(result.done, deadline, _OF_JOINING, action, remedy)
    except PaNpuError:
        _left_behind.append(thread)
        raise
    return result.result()


def _device_index(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    if device.index is not None:
        return device.index
    return torch.accelerator.current_device_index()


def wait_for_members(
    store: dist.Store, rank: int, size: int, terms: str, deadline: Deadline, describe: str
) -> None:
    """Waits in the store until all members are there.

    The backends' own waits do not report who is missing, and take long on the first to come.
    `terms`: values that must be equal on all members (Gloo.terms).
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
    wait_until(
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
        if (member_terms := store.get(f"member/{member}").decode()) != terms:
            raise WeightSyncError(
                f"{describe}: rank {member} has {member_terms or 'none of it'}, this process {terms}; "
                "set it alike in the environments of engines and trainers"
            )


def epoch_name(name: str, epoch: int) -> str:
    """Returns the name of all groups that form after the `epoch`-th change of their members.

    They are given up by it together.
    """
    return f"{name}/{epoch}"


def group_name(name: str, epoch: int, way: Way = "group") -> str:
    """Returns the name of the group that goes this way; a name serves once."""
    return f"{epoch_name(name, epoch)}/{way}"


def announce_begin(group: dist.ProcessGroup, version: int, before: int | None) -> None:
    """Announces that the sender is about to send `version`; it sent `before` the last time.

    Receivers that were asked to load ahead of time wait for this with no collective open, whose own
    timeout would run meanwhile.
    """
    store = _group_store(group)
    store.set(_begun(version), "")
    if before is not None and before != version:
        store.delete_key(_begun(before))


def has_begun(group: dist.ProcessGroup, version: int) -> bool:
    """Returns whether the sender of this group is about to send `version`, or has begun."""
    return bool(_group_store(group).check([_begun(version)]))


def _begun(version: int) -> str:
    return f"begun/{version}"


def _group_store(group: Any) -> dist.Store:
    """Returns the store on which the group met, with the group's own prefix."""
    if hasattr(group, "get_group_store"):
        store: dist.Store = group.get_group_store()
        return store
    return c10d._world.pg_map[group][1]


def leave_group(group: dist.ProcessGroup) -> None:
    """Frees a group made by join_group."""
    dist.destroy_process_group(group)


def drop_group(
    group: dist.ProcessGroup, device: torch.device = _CPU, reason: str = "it lost a member"
) -> None:
    """Stops using a group made by join_group in which a member is gone or hangs.

    Ends what is pending if the backend can. gloo cannot: the group's destructor would wait, with
    Python's lock held, until the group's timeout. So the object stays until the process ends, for
    which run_and_exit exists.
    """
    _left_behind.append(group)
    backend, _ = c10d._world.pg_map.get(group, ("gloo", None))
    action = f"ending what is pending in a group of {backend} that was given up"
    try:
        _within(
            lambda: collectives.rules(backend).abort(group, device, reason),
            Deadline(_ABORT_S),
            action,
            "it stays as it is",
        )
    except (DeadlineExceeded, RuntimeError) as error:
        logger.warning("%s failed, and it may end this process later: %s", action, _reason(error))


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main()'s code, at once.

    The end of the interpreter would wait for what is pending in dropped groups and for libraries'
    exit functions, and would abort over a thread that waits in a store.
    """
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
    """Starts a broadcast from the member `root` of the group."""
    assert group is not None
    try:
        work: dist.Work = group.broadcast(tensor, root)
        return work
    except RuntimeError as error:
        raise WeightSyncError(
            f"a broadcast could not be started ({_reason(error)}); look at the members' logs"
        ) from error
