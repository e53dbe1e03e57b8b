"""Publishing: buckets cover the model exactly once, engines get HF's tensors bit for bit, and every failure has a deadline."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh, Place
from pa_npu.errors import DeadlineExceeded
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Assembler, Manifest
from pa_npu.weight_transfer.receiver import Receiver, check_model
from tests.helpers.weights import FAMILIES, Stage, gloo_group, make_checkpoint, run_threads

# the backend's own timeout comes after ours, as in join_group, and soon enough for a group that
# goes with its test
BACKEND_MARGIN_S = 3.0


class World:
    """Trainer ranks and engine workers as threads of this process, in real gloo groups."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        spec: ModelSpec,
        tp_size: int = 1,
        stages: int = 1,
        workers: int = 1,
        ep_size: int = 1,
    ) -> None:
        self.spec, self.workers = spec, workers
        self.stages = [Stage(tp_size, stage, stages, ep_size) for stage in range(stages)]
        self.store = dist.HashStore()
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.modules: list[torch.nn.Module] = []
        monkeypatch.setattr(transport, "join_group", self._join)
        monkeypatch.setattr(transport, "leave_group", lambda group: None)

    def _join(
        self, host: str, port: int, name: str, *, rank: int, size: int, timeout_s: float, **_: Any
    ) -> Any:
        return gloo_group(self.store, name, rank, size, timeout_s + BACKEND_MARGIN_S)

    def publishers(
        self, bucket_bytes: int = 4096, timeout_s: float = 30.0, dtype: torch.dtype = torch.float32
    ) -> list[Publisher]:
        """All trainer ranks, stage by stage; the TP leader first in each."""
        everyone = [(stage, rank) for stage in self.stages for rank in range(stage.num_ranks)]
        deadline_s = timeout_s + BACKEND_MARGIN_S
        groups = run_threads(
            *(
                lambda s=stage, r=rank: gloo_group(
                    self.store, f"shards of {s.stage}", r, s.num_ranks, deadline_s
                )
                for stage, rank in everyone
            )
        )
        made = []
        for (stage, rank), group in zip(everyone, groups, strict=True):
            assert isinstance(group, dist.ProcessGroup), group
            module = stage.load(self.spec, rank, dtype)
            self.modules.append(module)
            made.append(
                publisher(
                    module,
                    self.spec,
                    stage.place(rank),
                    bucket_bytes,
                    timeout_s,
                    self.server.port,
                    group,
                )
            )
        return made

    def connect(
        self, publishers: list[Publisher], timeout_s: float = 30.0, epoch: int = 0
    ) -> list[Receiver]:
        """Join trainers and engine workers; returns one Receiver per worker."""
        self.members = PublishMembers(epoch, self.workers)
        leaders = [p for p in publishers if p.is_leader]
        announced = [p.manifest() for p in leaders]
        manifests = [Manifest.from_json(entry.manifest) for entry in announced]
        size = 1 + self.workers

        def join(rank: int) -> Receiver:
            names = [transport.group_name(entry.name, epoch) for entry in announced]
            groups = [gloo_group(self.store, name, rank, size, timeout_s) for name in names]
            abandonments = [
                transport.Abandonment("127.0.0.1", self.server.port, name) for name in names
            ]
            return Receiver(manifests, groups, rank, torch.device("cpu"), timeout_s, abandonments)

        results: list[Any] = run_threads(
            *(lambda p=p: p.connect(self.members) for p in leaders),
            *(lambda r=r: join(r) for r in range(1, size)),
        )
        errors = [r for r in results if isinstance(r, Exception)]
        assert not errors, errors
        return results[len(leaders) :]


def publisher(
    module: torch.nn.Module,
    spec: ModelSpec,
    place: Place,
    bucket_bytes: int = 4096,
    timeout_s: float = 30.0,
    store_port: int = 1,
    tensor_group: dist.ProcessGroup | None = None,
) -> Publisher:
    return Publisher(
        StageTensors(module, spec, place, bucket_bytes, tensor_group) if place.sends else None,
        store_host="127.0.0.1",
        store_port=store_port,
        timeout_s=timeout_s,
        backend="gloo",
        device=torch.device("cpu"),
    )


def received(receiver: Receiver, version: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: dict(receiver.receive(version))


LAYOUTS = [(False, 1, 1, 2), (False, 2, 1, 1), (True, 2, 2, 2), (True, 4, 1, 1)]
EXPERTS = [*((family, 1) for family in FAMILIES), ("qwen3_moe", 2), ("qwen3_moe", 4)]


@pytest.mark.parametrize(
    ("family", "ep_size", "tied", "tp_size", "stages", "workers"),
    [  # in CI every family once, and one of them and shared experts in every layout
        pytest.param(
            *one,
            *layout,
            marks=[]
            if layout == LAYOUTS[2] or one in (EXPERTS[0], EXPERTS[-1])
            else [pytest.mark.nightly],
        )
        for one in EXPERTS
        for layout in LAYOUTS
    ],
)
def test_engines_receive_the_checkpoint_bit_for_bit(
    family: str,
    ep_size: int,
    tied: bool,
    tp_size: int,
    stages: int,
    workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets of 4 KiB cut most tensors; 61 tokens need vocabulary padding under TP.

    A second publish sends the changed weights.
    """
    spec = make_checkpoint(tmp_path, family, tied=tied, vocab=61)
    world = World(monkeypatch, spec, tp_size, stages, workers, ep_size)
    publishers = world.publishers()
    receivers = world.connect(publishers)
    expected = load_file(tmp_path / "model.safetensors")
    for version in (0, 1):
        results: list[Any] = run_threads(
            *(lambda p=p, v=version: p.publish(v, world.members) for p in publishers),
            *(received(r, version) for r in receivers),
        )
        errors = [r for r in results if isinstance(r, Exception)]
        assert not errors, errors
        for weights in results[len(publishers) :]:
            assert weights.keys() == expected.keys()
            different = [
                name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)
            ]
            assert not different, f"version {version}: {different}"
        sent = sum(stats.bytes for stats in results[: len(publishers)])
        assert sent == sum(tensor.nbytes for tensor in expected.values())
        digests = [digests for receiver in receivers for digests in receiver.digests]
        assert digests and all(len(one.split()) > 1 for one in digests), (
            "one bucket would show nothing about cutting"
        )
        expected = {name: tensor + 1 for name, tensor in expected.items()}
        with torch.no_grad():
            for module in world.modules:
                for parameter in module.parameters():
                    parameter.add_(1)


def test_weights_travel_in_the_parameters_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen3", tied=False)
    world = World(monkeypatch, spec, tp_size=2)
    publishers = world.publishers(dtype=torch.bfloat16)
    (receiver,) = world.connect(publishers)
    *_, weights = run_threads(
        *(lambda p=p: p.publish(0, world.members) for p in publishers), received(receiver, 0)
    )
    assert isinstance(weights, dict)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(weights[name], tensor.bfloat16()), name


@pytest.mark.parametrize("bucket_bytes", [1, 300, 1000, 4096, 10_000, 2**20])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_buckets_cover_every_tensor_once_and_stay_small(
    bucket_bytes: int, tp_size: int, tmp_path: Path
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False, vocab=61)
    manifest = StageTensors(
        Stage(tp_size).build(spec), spec, Mesh(tp_size).place(0), bucket_bytes
    ).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    hf = load_file(tmp_path / "model.safetensors")
    assert manifest.shapes == {
        name: tuple(tensor.shape)
        for name, tensor in sorted(hf.items(), key=lambda i: [*manifest.shapes].index(i[0]))
    }
    largest_row = max(math.prod(tensor.shape[1:]) for tensor in hf.values()) * 4 * tp_size
    assert all(bucket.num_bytes <= max(bucket_bytes, largest_row) for bucket in manifest.buckets)
    for bucket in manifest.buckets:
        for segment in bucket.segments:
            whole = segment.size == math.prod(manifest.shapes[segment.name])
            assert (
                whole or math.prod(manifest.shapes[segment.name]) * 4 > bucket_bytes - 16 * 4 * 32
            ), f"{segment.name} was cut needlessly"


def test_two_types_in_one_stage_go_in_buckets_of_their_own(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    module = Stage().load(spec, 0, torch.bfloat16)
    for name, parameter in module.named_parameters():
        if "layernorm" in name:
            parameter.data = parameter.data.float()
    tensors = StageTensors(module, spec, Mesh().place(0), 2**20)
    buckets = [
        bucket.clone() for bucket in tensors.buckets(transport.Deadline(5)) if bucket is not None
    ]
    hf = load_file(tmp_path / "model.safetensors")
    assembler = Assembler(tensors.manifest)
    found = [
        item
        for bucket, buffer in zip(tensors.manifest.buckets, buckets, strict=True)
        for item in assembler.completed(bucket, buffer)
    ]
    assert len(found) == len(hf)
    for name, tensor in found:
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
        assert torch.equal(tensor, hf[name].bfloat16().to(tensor.dtype)), name


@pytest.mark.parametrize("break_it", ["gap", "overlap", "unknown", "dtype", "missing key"])
def test_manifest_that_does_not_cover_its_tensors_is_refused(break_it: str, tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    raw = json.loads(
        json.dumps(
            StageTensors(Stage().build(spec), spec, Mesh().place(0), 4096).manifest.to_json()
        )
    )
    segments = raw["buckets"][0][1]
    if break_it == "gap":
        segments[0][2] -= 1
    elif break_it == "overlap":
        segments.append(list(segments[0]))
    elif break_it == "unknown":
        segments.append(["model.extra", 0, 4])
    elif break_it == "dtype":
        raw["buckets"][0][0] = "float7"
    else:
        del raw["shapes"]
    with pytest.raises(transport.WeightSyncError, match=r"do not cover|unknown dtype|malformed"):
        Manifest.from_json(raw)


def test_engines_on_the_trainers_devices_receive_the_same_weights_through_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of their own beside the others', and alone, as in a late delivery; their loss ends
    the publish for both.
    """
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec)
    (leader,) = world.publishers(timeout_s=5.0)
    expected = load_file(tmp_path / "model.safetensors")

    def joined(way: transport.Way, epoch: int) -> Receiver:
        name = transport.group_name(announced.name, epoch, way)
        group = gloo_group(world.store, name, 1, 2, 30.0)
        abandonment = transport.Abandonment("127.0.0.1", world.server.port, name)
        return Receiver(
            [Manifest.from_json(announced.manifest)],
            [group],
            1,
            torch.device("cpu"),
            5.0,
            [abandonment],
        )

    announced = leader.manifest()
    ways: tuple[transport.Way, ...] = ("group", "host")
    for epoch, members, joins in (
        (0, PublishMembers(0, 1, 1), ways),
        (1, PublishMembers(1, 0, 1), ways[1:]),
    ):
        _, *receivers = run_threads(
            lambda m=members: leader.connect(m),
            *(lambda w=way, e=epoch: joined(w, e) for way in joins),
        )
        stats, *results = run_threads(
            lambda e=epoch, m=members: leader.publish(e, m),
            *(received(r, epoch) for r in receivers),
        )
        assert isinstance(stats, PublishStats) and len(results) == len(joins), stats
        for weights, receiver in zip(results, receivers, strict=True):
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
            assert receiver.digests == (stats.digests,)
    error, _ = run_threads(
        lambda: leader.publish(2, PublishMembers(1, 0, 1)),
        lambda: transport.Abandonment(
            "127.0.0.1", world.server.port, transport.epoch_name(announced.name, 1)
        ).declare("gone"),
    )
    assert (
        isinstance(error, transport.WeightSyncError)
        and transport.group_name(announced.name, 1, "host") in str(error)
        and "gone" in str(error)
    )


def test_only_the_tp_leader_of_the_first_replica_speaks(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    other_replica = publisher(Stage().load(spec, 0), spec, Mesh(data=2).at(data=1))
    other_replica.connect(PublishMembers(0, 1))
    assert (
        other_replica.publish(3, PublishMembers(0, 1)) == PublishStats()
        and not other_replica.is_leader
    )
    peer = publisher(Stage(2).load(spec, 1), spec, Mesh(2).place(1))
    peer.connect(PublishMembers(0, 1))
    assert not peer.is_leader


class LateWork:
    """A broadcast that ends only once the next one is posted, or when there is no next."""

    def __init__(self, log: list[LateWork], total: int) -> None:
        self._log, self._index, self._total = log, len(log), total
        log.append(self)

    def is_completed(self) -> bool:
        return len(self._log) > min(self._index + 1, self._total - 1)

    def wait(self) -> None:
        assert self.is_completed()


def test_the_next_bucket_is_ready_before_the_one_on_the_wire_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that waits for bucket i before it gathers bucket i+1 would run into its deadline
    here.
    """
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    monkeypatch.setattr(transport, "join_group", lambda *_, **__: object())
    monkeypatch.setattr(transport, "leave_group", lambda group: None)
    monkeypatch.setattr(transport, "announce_begin", lambda *_: None)
    with closing(publisher(Stage().load(spec, 0), spec, Mesh().place(0), timeout_s=5.0)) as sender:
        total = 1 + len(sender.manifest().manifest["buckets"])
        posted: list[LateWork] = []
        monkeypatch.setattr(transport, "broadcast", lambda group, tensor: LateWork(posted, total))
        sender.connect(PublishMembers(0, 1))
        assert (
            len(sender.publish(0, PublishMembers(0, 1)).digests.split())
            == len(posted) - 1
            == total - 1
            > 3
        )


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
    publishers = world.publishers()
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
    with subprocess.Popen([*command, "1"], stdin=subprocess.PIPE) as other:
        process = subprocess.Popen([*command, "0"], **both)  # type: ignore[call-overload]
        assert process.stdout.readline() == "leaving\n"
        start = time.monotonic()
        rest = process.stdout.read()
        code = process.wait(60)
        seconds = time.monotonic() - start
        other.kill()
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
    results: list[Any] = run_threads(
        lambda: publishers[0].publish(1, world.members),
        lambda: publishers[1].publish(1, world.members),
        received(receiver, 1),
    )
    weights = results[-1]
    reference = load_file(tmp_path / "model.safetensors")
    assert set(weights) == set(reference)
    assert all(torch.equal(weights[key], reference[key]) for key in reference)


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


def test_engine_asked_for_another_version_or_manifest_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    world = World(monkeypatch, spec)
    publishers = world.publishers(timeout_s=3.0)
    (receiver,) = world.connect(publishers, timeout_s=3.0)
    _, worker = run_threads(lambda: publishers[0].publish(4, world.members), received(receiver, 5))
    assert (
        isinstance(worker, transport.WeightSyncError)
        and "sent weight version 4" in str(worker)
        and "version 5" in str(worker)
    )

    publishers = world.publishers(timeout_s=3.0)
    (receiver,) = world.connect(publishers, timeout_s=3.0)
    receiver._manifests[0] = msgspec.structs.replace(receiver._manifests[0], stage=9)
    _, worker = run_threads(lambda: publishers[0].publish(4, world.members), received(receiver, 4))
    assert isinstance(
        worker, transport.WeightSyncError
    ) and "other buckets than the manifest" in str(worker)


def test_engine_with_another_model_refuses_to_connect(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path, "qwen2", tied=False)
    manifests = [
        StageTensors(Stage(1, s, 2).build(spec), spec, Mesh(pipeline=2).place(s), 4096).manifest
        for s in range(2)
    ]
    engine = SimpleNamespace(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    check_model(manifests, engine)
    with pytest.raises(
        transport.WeightSyncError, match=r"embed_tokens.weight is announced by two trainer stages"
    ):
        check_model([manifests[0], manifests[0]], engine)
    engine.hidden_size = 64
    with pytest.raises(
        transport.WeightSyncError, match="stage 0 has hidden_size=32, the engine's model 64"
    ):
        check_model(manifests, engine)


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
