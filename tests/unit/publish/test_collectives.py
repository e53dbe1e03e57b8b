"""Groups that are given up or never come about, with stand-ins for NCCL and HCCL that behave as their sources say."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pa_npu.errors import DeadlineExceeded
from pa_npu.weight_transfer import collectives, transport
from pa_npu.weight_transfer.transport import Abandonment, WeightSyncError

WAIT_S = 20.0
NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
HCCL = "HCCL_ASYNC_ERROR_HANDLING"


class Work:
    """A broadcast that ends when the group is aborted, with an error, or when it is `complete`."""

    def __init__(self, group: Group, complete: bool) -> None:
        self.group = group
        self.complete = complete

    def is_completed(self) -> bool:
        return self.complete or self.group.aborted

    def wait(self) -> None:
        if not self.complete:
            raise RuntimeError("communicator was aborted")


class Group:
    """A process group of one backend. The first broadcast makes the communicator, and blocks while
    a member is missing.

    pending: works that the watchdog knows. watchdog: what it does with one that fails or times out.
    """

    def __init__(self, backend: str, members: threading.Event) -> None:
        self.backend = backend
        self._members = members
        self.handling = os.environ.get(NCCL if backend == "nccl" else HCCL)
        self.connected = self.aborted = False
        self.pending: list[Work] = []
        self.calls: list[str] = []

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        first = not self.connected
        self.connected = True
        if first:
            self._members.wait(WAIT_S)
        work = Work(self, complete=first)
        if not first:
            self.pending.append(work)
        return work

    def watchdog(self) -> bool:
        """Returns whether it ends the process, now that what is pending has timed out or failed."""
        ends = {"nccl": self.handling not in ("0", "2"), "hccl": self.handling != "0"}[self.backend]
        return ends and bool(self.pending)

    def abort(self) -> None:
        """ProcessGroup.abort: ProcessGroupNCCL overrides it; for HCCL it is Backend's own, which
        does nothing.
        """
        self.calls.append("abort")
        if self.backend == "nccl":
            self.aborted = True

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort_hccl_comm(self, reason: str) -> None:
        assert self.backend == "hccl"
        self.calls.append(f"abort_hccl_comm {reason}")
        self.aborted = True

    def clear_workmeta_list(self) -> None:
        assert self.backend == "hccl"
        self.calls.append("clear_workmeta_list")
        self.pending.clear()


Make = Callable[..., Any]


@pytest.fixture
def members() -> Iterator[threading.Event]:
    """Set once every member of the group takes part in making its communicator."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, members: threading.Event) -> Iterator[Make]:
    """join_group with stand-ins; the other member of the group of two has said that it comes."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[Group] = []

    def helper(
        size: int, rank: int, ranks: list[int], backend: str, store: Any, **_: Any
    ) -> tuple[Group, None]:
        made.append(Group(str(backend), members))
        c10d._world.pg_map[made[-1]] = (str(backend), store)  # type: ignore[index]
        return made[-1], None

    monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(dist, "Backend", str)
    monkeypatch.setattr(transport, "_left_behind", [])

    def run(backend: str, timeout_s: float = WAIT_S) -> Any:
        terms = run.terms or collectives.rules(backend).terms()  # type: ignore[attr-defined]
        dist.PrefixStore("group", server).set("member/1", terms)
        return transport.join_group(
            "127.0.0.1", server.port, "group", 0, 2, backend, timeout_s, "stage 0"
        )

    run.made = made  # type: ignore[attr-defined]
    run.server = server  # type: ignore[attr-defined]
    run.terms = ""  # type: ignore[attr-defined]
    yield run
    for group in made:
        c10d._world.pg_map.pop(group, None)  # type: ignore[call-overload]
        c10d._world.pg_group_ranks.pop(group, None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("backend", "variable", "value"), [("nccl", NCCL, "2"), ("hccl", HCCL, "0")]
)
@pytest.mark.parametrize("users", [None, "1"])
def test_a_publish_group_alone_is_made_so_that_its_failures_do_not_end_the_process(
    backend: str,
    variable: str,
    value: str,
    users: str | None,
    join: Make,
    members: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    if users is not None:
        monkeypatch.setenv(variable, users)
    members.set()
    group = join(backend)
    assert group.handling == value
    assert os.environ.get(variable) == users, "all other groups of the process keep the default"


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_a_dropped_group_leaves_nothing_that_a_watchdog_could_end_the_process_for(
    backend: str, join: Make, members: Any
) -> None:
    members.set()
    group = join(backend)
    work = transport.broadcast(group, torch.zeros(1))
    assert not work.is_completed()
    transport.drop_group(group, reason="an engine died")
    assert group.aborted and work.is_completed()
    assert not group.watchdog()
    wanted = {"nccl": ["abort"], "hccl": ["abort_hccl_comm an engine died", "clear_workmeta_list"]}
    assert group.calls == wanted[backend]
    with pytest.raises(WeightSyncError, match="the connection broke"):
        transport.wait(work, transport.Deadline(1.0), "a broadcast", "look")


@pytest.mark.parametrize(("backend", "variable"), [("nccl", NCCL), ("hccl", HCCL)])
def test_the_stand_ins_watchdog_ends_a_process_that_does_as_torch_does_by_default(
    backend: str, variable: str, join: Make, members: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with torch's own handling, and its own abort, a failed publish ends the survivor
    of a good retry.
    """
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(collectives._RULES, backend, collectives.Gloo())
    members.set()
    group = join(backend)
    group.connected = True
    transport.broadcast(group, torch.zeros(1))
    group.abort()
    assert group.watchdog() and (backend == "nccl") == group.aborted


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_a_member_that_dies_while_the_communicator_is_made_ends_the_join_at_its_deadline(
    backend: str, join: Make
) -> None:
    """The call that makes it blocks; the other member was there when the group met, and never takes
    part.
    """
    with pytest.raises(
        DeadlineExceeded,
        match=r"stage 0: making the communicator of group group of 2 members: not done within 0.3 "
        r"s",
    ):
        join(backend, timeout_s=0.3)
    assert join.made[0].aborted  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_an_attempt_that_is_given_up_ends_a_join_that_is_blocked(backend: str, join: Make) -> None:
    Abandonment("127.0.0.1", join.server.port, "group").declare("engine b is gone")  # type: ignore[attr-defined]
    with pytest.raises(WeightSyncError, match="engine b is gone"):
        join(backend)


def test_an_abort_that_blocks_or_fails_holds_up_nobody_for_long(
    join: Make, members: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "_ABORT_S", 0.1)
    members.set()
    group = join("nccl")
    never = threading.Event()
    group.abort = lambda: never.wait(WAIT_S)
    transport.drop_group(group)
    assert "not done within 0.1 s" in caplog.text
    group.abort = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error"))
    transport.drop_group(group)
    assert "CUDA error" in caplog.text
    assert group in transport._left_behind, "its destructor may wait"
    never.set()


def test_a_broadcast_that_cannot_be_started_is_a_failed_publish(join: Make, members: Any) -> None:
    members.set()
    group = join("nccl")
    group.broadcast = lambda tensor, root: (_ for _ in ()).throw(
        RuntimeError("NCCL error: remote process exited")
    )
    with pytest.raises(WeightSyncError, match=r"could not be started .*remote process exited"):
        transport.broadcast(group, torch.zeros(1))


@pytest.mark.parametrize("variable", ["RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"])
def test_variables_under_which_hccl_makes_other_groups_are_refused(
    variable: str, join: Make, members: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.set()
    monkeypatch.setenv(variable, "x")
    with pytest.raises(WeightSyncError, match=rf"stage 0: {variable}=x is set.*unset it"):
        join("hccl")
    assert join("nccl").connected, "no concern of another backend"


def test_buffers_of_different_sizes_are_refused_and_the_default_counts(
    join: Make, members: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.set()
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    join.terms = "HCCL_BUFFSIZE=512"  # type: ignore[attr-defined]
    with pytest.raises(
        WeightSyncError,
        match=r"rank 1 has HCCL_BUFFSIZE=512, this process HCCL_BUFFSIZE=200 "
        r"HCCL_DETERMINISTIC=false; set it alike",
    ):
        join("hccl")
    join.terms = ""  # type: ignore[attr-defined]
    monkeypatch.delenv("HCCL_BUFFSIZE")
    assert collectives.rules("hccl").terms() == "HCCL_BUFFSIZE=200 HCCL_DETERMINISTIC=false"
    monkeypatch.setenv("HCCL_DETERMINISTIC", "STRICT")
    assert collectives.rules("hccl").terms() == "HCCL_BUFFSIZE=200 HCCL_DETERMINISTIC=strict"
    assert join("hccl").connected
