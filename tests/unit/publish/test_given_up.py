"""A publish that cannot go on ends on every side, by its deadline or at once where a process has died."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from pa_npu.errors import DeadlineExceeded
from pa_npu.publish.publisher import PublishStats
from pa_npu.weight_transfer import transport
from tests.helpers.publish_world import World, assert_equal_weights, received
from tests.helpers.weights import make_checkpoint, run_threads


def test_members_that_do_not_join_are_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("lonely/member/2", "1")
    arguments = {
        "name": "lonely",
        "rank": 0,
        "size": 4,
        "backend": "gloo",
        "timeout_s": 0.3,
        "describe": "stage 0",
    }
    with pytest.raises(
        DeadlineExceeded, match=r"stage 0: ranks \[1, 3\] of 4 did not join within 0.3 s"
    ):
        transport.join_group("127.0.0.1", store.port, **arguments)
    group = transport.join_group(
        "127.0.0.1", store.port, **arguments | {"name": "alone", "size": 1}
    )
    assert group.size() == 1
    transport.leave_group(group)


def test_publish_without_its_engine_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec, workers=2)
    publishers = world.publishers(timeout_s=2.0)
    receivers = world.connect(publishers, timeout_s=5.0)
    start = time.monotonic()
    sender, *_ = run_threads(
        lambda: publishers[0].publish(7, world.members), received(receivers[0], 7)
    )
    assert time.monotonic() - start < 25
    assert isinstance(sender, DeadlineExceeded), sender
    for part in ("version 7", "stage 0", "the header", "ranks 1 to 2", "publish.timeout_s"):
        assert part in str(sender)


def test_engine_whose_trainer_stops_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec, stages=2)
    publishers = world.publishers(timeout_s=4.0)
    (receiver,) = world.connect(publishers, timeout_s=2.0)
    _, worker = run_threads(lambda: publishers[0].publish(1, world.members), received(receiver, 1))
    assert isinstance(worker, DeadlineExceeded), worker
    for part in ("engine worker 1", "version 1", "stage 1, header", "not done within 2 s"):
        assert part in str(worker)


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "get_group_store"),
    reason="this torch destroys groups with the interpreter locked, so that threads cannot play "
    "both ends of one that breaks",
)
def test_engine_that_dies_ends_the_publish_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec)
    publishers = world.publishers(timeout_s=30.0, bucket_bytes=1000)
    receivers = world.connect(publishers)

    def die() -> None:
        weights: Any = receivers[0].receive(1)
        for _ in range(3):
            next(weights)
        weights.close()
        receivers.clear()  # nothing holds the worker's end of the connection any more

    start = time.monotonic()
    sender, _ = run_threads(lambda: publishers[0].publish(1, world.members), die)
    assert time.monotonic() - start < 25
    assert isinstance(sender, transport.WeightSyncError), sender
    for part in (
        "version 1, stage 0, bucket",
        "the connection broke after",
        "engine workers (ranks 1 to 1",
    ):
        assert part in str(sender)


@pytest.mark.parametrize(
    "how",
    [
        "returns",
        "raises",
        pytest.param("as a control, does not know of it", marks=pytest.mark.nightly),
    ],
)
def test_a_process_that_dropped_a_group_ends_at_once(how: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = f"""
        import sys
        import torch
        from pa_npu.weight_transfer import transport

        def main():
            rank = int(sys.argv[1])
            group = transport.join_group("127.0.0.1", {server.port}, "pair", rank, 2, "gloo", 30.0, "a member")
            if rank:
                sys.stdin.read()
            work = transport.broadcast(group, torch.zeros(1), root=1)
            assert not work.is_completed()
            del work
            transport.drop_group(group)
            print("leaving", flush=True)
            print("the last word")
            if {how!r} == "raises":
                raise ValueError("an end nobody expected")
            return 3

        sys.exit(main()) if {how!r}.startswith("as a control") else transport.run_and_exit(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, "1"], stdin=subprocess.PIPE) as another:
        process = subprocess.Popen([*command, "0"], **both)  # type: ignore[call-overload]
        assert process.stdout.readline() == "leaving\n"
        start = time.monotonic()
        rest = process.stdout.read()
        code = process.wait(60)
        seconds = time.monotonic() - start
        another.kill()
    assert "the last word\n" in rest and code == (1 if how == "raises" else 3)
    assert ("ValueError: an end nobody expected" in rest) == (how == "raises")
    assert seconds < 10 if how in ("returns", "raises") else seconds > 10


@pytest.mark.parametrize(
    "how", ["run_and_exit(main)", pytest.param("sys.exit(main())", marks=pytest.mark.nightly)]
)
def test_a_process_ends_with_its_own_code_while_a_thread_waits_in_a_store(how: str) -> None:
    """As a trainer does that stops at a broken invariant, its feed waiting for the next group; the
    launcher goes by the code.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = f"""
        import sys, threading, time
        from datetime import timedelta
        import torch.distributed as dist
        from pa_npu.weight_transfer.transport import run_and_exit

        def main():
            store = dist.TCPStore("127.0.0.1", {server.port}, is_master=False, wait_for_workers=False)

            def wait():
                while True:
                    try:
                        store.wait(["never"], timedelta(seconds=0.2))
                    except RuntimeError:
                        pass

            threading.Thread(target=wait, daemon=True).start()
            time.sleep(0.3)
            return 3

        {how}
    """
    codes = [
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60).returncode
        for _ in range(3)
    ]
    assert codes == [3] * 3 if how.startswith("run") else codes != [3] * 3, codes


def test_a_publish_that_is_given_up_ends_on_both_sides_and_leaves_the_tp_peers_ready_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend alone would let both wait for the worker that never comes until their deadline of
    30 s.
    """
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec, tp_size=2, workers=2)
    publishers = world.publishers(timeout_s=30.0)
    receivers = world.connect(publishers)
    name = transport.epoch_name(publishers[0].manifest().name, 0)

    def give_up() -> None:
        time.sleep(0.3)
        transport.Abandonment("127.0.0.1", world.server.port, name).declare("engine b is gone")

    start = time.monotonic()
    leader, peer, worker, _ = run_threads(
        *(lambda p=p: p.publish(1, world.members) for p in publishers[:2]),
        received(receivers[0], 1),
        give_up,
    )
    assert time.monotonic() - start < 25
    assert isinstance(leader, transport.WeightSyncError) and "engine b is gone" in str(leader)
    assert isinstance(worker, Exception), worker
    assert isinstance(peer, PublishStats), "the TP peer has come to the end of its gather"
    receivers[0].close()

    world.workers = 1
    (receiver,) = world.connect(publishers, epoch=1)
    _, (weights,) = world.publish(1, publishers, [receiver])
    assert_equal_weights(weights, load_file(tmp_path / "model.safetensors"), version=1)


def test_tp_peer_that_stops_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec, tp_size=2)
    monkeypatch.setattr("pa_npu.publish.publisher._GATHER_MARGIN_S", 0.0)
    publishers = world.publishers(timeout_s=2.0)
    world.connect(publishers, timeout_s=5.0)
    (leader,) = run_threads(lambda: publishers[0].publish(1, world.members))
    assert isinstance(leader, DeadlineExceeded), leader
    for part in (
        "over the ranks of stage 0, bucket 1 of",
        "embed_tokens",
        "rank 0 waits for the parts of ranks [1]",
    ):
        assert part in str(leader)


def test_an_attempts_groups_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_ABANDONED_POLL_S", 0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_first, of_second = (
        transport.Abandonment("127.0.0.1", store.port, f"pa/{n}/publish-0") for n in (0, 1)
    )
    assert of_first.reason() is None
    transport.Abandonment("127.0.0.1", store.port, "pa/0").declare("started again")
    assert (of_first.reason(), of_second.reason()) == ("started again", None)
    with pytest.raises(transport.WeightSyncError, match=r"given up after .*: started again"):
        transport.join_group(
            "127.0.0.1", store.port, "pa/0/publish-0", 1, 2, "gloo", 30.0, "engine worker 1"
        )


def test_an_engine_that_is_asked_ahead_of_time_waits_for_the_trainers_with_no_collective_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, make_checkpoint(tmp_path, "qwen2", tied=False))
    (sender,) = world.publishers()
    (receiver,) = world.connect([sender])
    posted: list[int] = []
    broadcast = transport.broadcast
    monkeypatch.setattr(
        transport,
        "broadcast",
        lambda *args: posted.append(threading.get_ident()) or broadcast(*args),
    )
    waits = threading.Event()
    has_begun = transport.has_begun
    monkeypatch.setattr(transport, "has_begun", lambda *args: waits.set() or has_begun(*args))
    received: list[Any] = []

    def receive(version: int) -> None:
        received.append(dict(receiver.receive(version, begins_within_s=60.0)))

    for version in range(2):  # the second with the key of the first behind it
        waits.clear(), posted.clear(), received.clear()
        thread = threading.Thread(target=receive, args=(version,), daemon=True)
        thread.start()
        assert waits.wait(10.0) and not posted, "nothing is posted before the trainers begin"
        sender.publish(version, world.members)
        thread.join(30.0)
        assert received and receiver.digests

    with pytest.raises(
        DeadlineExceeded, match=r"begin with weight version 2: they did not within 0.05 s"
    ):
        next(receiver.receive(2, begins_within_s=0.05))
    transport.Abandonment(
        "127.0.0.1", world.server.port, transport.epoch_name(sender._name, 0)
    ).declare("an engine died")
    with pytest.raises(
        transport.WeightSyncError, match=r"begin with weight version 2: given up .*an engine died"
    ):
        next(receiver.receive(2, begins_within_s=30.0))
