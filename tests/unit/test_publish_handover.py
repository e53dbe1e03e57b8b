"""Engines on the trainers' devices map the sender's memory: same bits, no memory used before it was taken, every wait ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pa_npu import platform as platforms
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config import Config
from pa_npu.config.mesh import Mesh
from pa_npu.engines.membership import Member
from pa_npu.engines.pool import EnginePool
from pa_npu.errors import DeadlineExceeded
from pa_npu.planning.known_models import known_spec
from pa_npu.planning.memory import trainer_memory
from pa_npu.planning.plan_text import derived_lines
from pa_npu.planning.shared_way import way_to_shared
from pa_npu.platform.accelerator import AcceleratorPlatform
from pa_npu.publish.engine_groups import Connection, EngineGroups
from pa_npu.publish.messages import PublishMembers, StageManifest
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.weight_transfer import handover, memory_handles, transport
from pa_npu.weight_transfer.handover import Meeting, MemoryGroup, Slots
from pa_npu.weight_transfer.receiver import Receiver
from tests.helpers.mapped_weights import publish_to_processes
from tests.helpers.weights import Stage, make_checkpoint, run_threads

CPU = torch.device("cpu", 0)
TIMEOUT_S = 60.0
GIB = 2**30


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class DeviceMemory:
    """Contract of `_share_KIND_` and `_new_shared_KIND`: eight fields of these types; the allocation stays the sender's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.exported: dict[bytes, torch.UntypedStorage] = {}
        self.opened_at: list[int] = []

        def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
            handle = f"handle {len(self.exported)}".encode() + b"\x00\xff"
            self.exported[handle] = storage
            return 3, handle, storage.nbytes(), 1024, b"/torch_1_2_3", 7, b"\x01event", kind == "cuda"

        def new_shared(
            device: int, handle: bytes, size: int, offset: int, counter: bytes, at: int, event: bytes, waits: bool
        ) -> torch.UntypedStorage:
            assert (size, offset, counter, at, event, waits) == (
                self.exported[handle].nbytes(),
                1024,
                b"/torch_1_2_3",
                7,
                b"\x01event",
                kind == "cuda",
            )
            self.opened_at.append(device)
            return self.exported[handle]

        monkeypatch.setattr(torch.UntypedStorage, f"_share_{kind}_", share, raising=False)
        monkeypatch.setattr(torch.UntypedStorage, f"_new_shared_{kind}", staticmethod(new_shared), raising=False)


def memory(kind: str) -> Any:
    return SimpleNamespace(handle_kind=kind, exportable_memory=platforms.get("cpu").exportable_memory)


def sender(
    directory: Path, store: dist.TCPStore, kind: str = "cpu", timeout_s: float = TIMEOUT_S, family: str = "qwen3"
) -> tuple[Publisher, Any]:
    """One stage of one rank, whose buckets of 4 KiB cut most tensors; and its module."""
    spec = make_checkpoint(directory, family, tied=False, vocab=61)
    module = Stage().load(spec, 0)
    tensors = StageTensors(module, spec, Mesh().place(0), 4096)
    arguments: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": store.port, "timeout_s": timeout_s}
    made = Publisher(tensors, **arguments, backend="gloo", device=torch.device("cpu"), memory=memory(kind))
    return made, module


def receiver(publisher: Publisher, store: dist.TCPStore, rank: int, size: int, epoch: int = 0) -> Receiver:
    stage = publisher.manifest().by("handles").of_epoch(epoch).to_json()
    place: dict[str, Any] = {"rank": rank, "world_size": size, "backend": transport.HANDLES, "device": CPU}
    return Receiver.join(
        ("127.0.0.1", store.port), [stage], **place, timeout_s=TIMEOUT_S, model=SimpleNamespace(), directory=""
    )


def meeting(store: dist.TCPStore, rank: int, size: int = 2, timeout_s: float = TIMEOUT_S) -> Meeting:
    return Meeting(("127.0.0.1", store.port), "group", rank, size, timeout_s, f"member {rank}")


def pair(store: dist.TCPStore, message_bytes: int) -> tuple[MemoryGroup, MemoryGroup]:
    slots = Slots.of(memory("cpu"), message_bytes)
    found: list[Any] = run_threads(
        lambda: handover.offer(meeting(store, 0), slots), lambda: handover.take(meeting(store, 1), CPU)
    )
    assert all(isinstance(group, MemoryGroup) for group in found), found
    return found[0], found[1]


# ------------------------------------------------------------------------------------------------------------- handles


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_kind_of_handle_survives_json_and_opens_the_same_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceMemory(monkeypatch, kind) if kind != "cpu" else None
    sent = platforms.get("cpu").exportable_memory(1000)
    handle = json.loads(json.dumps(memory_handles.export(sent, kind)))
    opened = memory_handles.open_memory(handle, kind, 1000, CPU)
    sent.copy_(torch.arange(1000) % 251)
    assert torch.equal(opened, sent) and opened.dtype == torch.uint8
    opened[5] = 99
    assert sent[5] == 99
    if device is not None:
        assert device.opened_at == [0], "the receiver's own index of the device, not the sender's"
    assert {memory_handles.machine() for _ in range(2)} != {""}


def test_a_kind_without_handles_is_named() -> None:
    with pytest.raises(ValueError, match="kind 'toy' has no handles here; known are cuda, npu, cpu"):
        memory_handles.export(torch.empty(4, dtype=torch.uint8), "toy")


@pytest.mark.parametrize(("configured", "switched"), [("", []), ("expandable_segments:True", ["False", "True"])])
def test_memory_for_handles_is_taken_outside_of_expandable_segments(
    configured: str, switched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_TOY_ALLOC_CONF", f"max_split_size_mb:64,{configured}")
    said: list[str] = []
    toy = AcceleratorPlatform()
    toy.name = "toy"
    monkeypatch.setattr(
        torch, "toy", SimpleNamespace(memory=SimpleNamespace(_set_allocator_settings=said.append)), raising=False
    )
    monkeypatch.setattr(toy, "device", lambda index: torch.device("cpu"))
    assert len(toy.exportable_memory(10)) == 10 and toy.handle_kind == "toy"
    assert said == [f"expandable_segments:{value}" for value in switched]


# ------------------------------------------------------------------------------------------------------------- publishes


def test_a_process_that_maps_the_trainers_memory_gets_the_checkpoint_bit_for_bit(
    tmp_path: Path, store: dist.TCPStore
) -> None:
    """And what is sent to a process after its death ends when the publish is given up."""
    publisher, module = sender(tmp_path, store, timeout_s=20.0)
    publish_to_processes(publisher, module, tmp_path, store.port, "cpu")
    error, _ = run_threads(
        lambda: publisher.publish(1),
        lambda: transport.Abandonment("127.0.0.1", store.port, _name(publisher, 1)).declare("it is dead"),
    )
    assert isinstance(error, transport.WeightSyncError) and "given up" in str(error) and "it is dead" in str(error)


def _name(publisher: Publisher, epoch: int) -> str:
    # the leader asks under the stage's usual name, whatever the ways of its members
    return publisher.manifest().of_epoch(epoch).name


@pytest.mark.parametrize(("kind", "family"), [("cuda", "qwen3"), ("npu", "qwen3_moe")])
def test_publishes_by_device_handles_follow_the_contract(
    kind: str, family: str, tmp_path: Path, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers map one leader's memory; groups that form anew export the same memory again."""
    device = DeviceMemory(monkeypatch, kind)
    publisher, _ = sender(tmp_path, store, kind, family=family)
    expected = load_file(tmp_path / "model.safetensors")
    for epoch in range(2):
        _, *receivers = run_threads(
            lambda e=epoch: publisher.connect(PublishMembers(e, 0, handles_workers=2)),
            *(lambda r=rank, e=epoch: receiver(publisher, store, r, 3, e) for rank in (1, 2)),
        )
        assert all(isinstance(one, Receiver) for one in receivers), receivers
        stats, *arrived = run_threads(
            lambda e=epoch: publisher.publish(e), *(lambda r=one, e=epoch: dict(r.receive(e)) for one in receivers)
        )
        assert isinstance(stats, PublishStats), stats
        for weights, one in zip(arrived, receivers, strict=True):
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
            assert one.digests == (stats.digests,)
            one.close()
    assert device.opened_at == [0] * 4 and len(device.exported) == 2
    assert len({storage.data_ptr() for storage in device.exported.values()}) == 1


def test_the_senders_memory_is_not_used_again_before_it_was_taken(store: dist.TCPStore) -> None:
    first, second, third = (torch.full((64,), float(n)) for n in range(3))
    sends, takes = pair(store, first.nbytes)
    works = [sends.broadcast(first), sends.broadcast(second)]
    assert not any(work.is_completed() for work in works)
    with pytest.raises(transport.WeightSyncError, match="message 3 would overwrite one that a receiver has not taken"):
        sends.broadcast(third)
    got = torch.empty(64)
    taken = takes.broadcast(got)
    assert taken.is_completed() and torch.equal(got, first)
    assert works[0].is_completed() and not works[1].is_completed()
    waits = takes.broadcast(got)
    assert waits.is_completed() and torch.equal(got, second) and works[1].is_completed()
    assert not takes.broadcast(got).is_completed(), "nothing was sent"


def test_a_message_that_is_larger_than_the_senders_memory_is_refused(store: dist.TCPStore) -> None:
    sends, _ = pair(store, 100)
    assert handover.slot_bytes(100) == 512 and sends.taken_by_all() == 0
    with pytest.raises(transport.WeightSyncError, match="of 516 bytes does not fit into the sender's slots of 512"):
        sends.broadcast(torch.empty(129))


def test_what_keeps_a_receiver_from_mapping_is_said_at_both_ends(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> torch.Tensor:
        raise RuntimeError("pidfd_getfd: Operation not permitted\nmore")

    monkeypatch.setattr(memory_handles, "open_memory", refused)
    slots = Slots.of(memory("cpu"), 100)
    ends = run_threads(lambda: handover.offer(meeting(store, 0), slots), lambda: handover.take(meeting(store, 1), CPU))
    for end in ends:
        assert isinstance(end, transport.WeightSyncError) and "\n" not in str(end)
        assert "cannot map the trainer's memory of kind cpu (pidfd_getfd: Operation not permitted)" in str(end)
        assert "set publish.shared_through=host" in str(end)


def test_a_receiver_on_another_machine_is_refused(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(["one", "another"])
    monkeypatch.setattr(memory_handles, "machine", lambda: next(machines))
    slots = Slots.of(memory("cpu"), 100)
    for end in run_threads(
        lambda: handover.offer(meeting(store, 0), slots), lambda: handover.take(meeting(store, 1), CPU)
    ):
        assert isinstance(
            end, transport.WeightSyncError
        ) and "is on another machine than the trainer that sends" in str(end)


def test_a_receiver_that_does_not_come_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(DeadlineExceeded, match=r"member 0: ranks \[1\] of 2 did not join within 0.2 s"):
        handover.offer(meeting(store, 0, timeout_s=0.2), Slots.of(memory("cpu"), 100))


# ---------------------------------------------------------------------------------------------------------- which way


def shared(through: str = "auto", rollout: dict[str, Any] | None = None, **sections: Any) -> Any:
    publish = {"shared_through": through}
    sections["placement"] = {"colocate": True, **sections.get("placement", {})}
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout or {}, "publish": publish, **sections}
    )


def test_weights_go_by_handles_where_two_ranks_cannot_share_a_device_and_all_is_on_one_machine() -> None:
    one, many = shared(), shared(placement={"cluster": "ray", "nnodes": 2, "devices_per_node": 8})
    attached = shared(rollout={"attach": ["http://127.0.0.1:1"]})
    assert [way_to_shared(config, one_group=True) for config in (one, many, attached)] == ["group"] * 3
    assert [way_to_shared(config, one_group=False) for config in (one, many, attached)] == ["handles", "host", "host"]
    assert way_to_shared(shared("host"), one_group=True) == "host"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"placement": {"colocate": False}, "through": "host"},
            "is for engines on the trainers' devices, of which there are none",
        ),
        (
            {"through": "handles", "placement": {"cluster": "ray", "nnodes": 2, "devices_per_node": 8}},
            "handles are for one machine, and placement.nnodes = 2",
        ),
    ],
)
def test_a_way_that_cannot_be_is_refused_in_one_line(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        shared(**arguments)


@pytest.mark.parametrize(
    ("backend", "through", "expected"),
    [("gloo", "auto", "gloo"), ("nccl", "auto", "handles"), ("hccl", "auto", "handles"), ("hccl", "host", "host")],
)
async def test_no_publish_group_has_two_ranks_on_a_device_where_the_backend_forbids_it(
    backend: str, through: str, expected: str
) -> None:
    """Two engines of two workers, the one on a trainer's device started first, and one stage."""
    config = shared(through, rollout={"tensor_parallel": 2}, trainer={"devices": 2})
    async with EnginePool() as pool:
        engines = {name: SimpleNamespace(name=name, close=lambda: asyncio.sleep(0)) for name in ("shared", "own")}
        for name, engine in engines.items():
            pool.add(engine, shared=name == "shared")  # type: ignore[arg-type]
        connection = Connection(("127.0.0.1", 1), backend, [StageManifest("stage", {})], [StageManifest("late", {})])
        members = [Member(number, 0, True, engine) for number, engine in enumerate(engines.values())]  # type: ignore[arg-type]
        groups = EngineGroups(config, pool, connection)
        joined = groups.of_members(members, 0)
    found = {member.name: one for member, one in zip(members, joined, strict=True)}
    shape = {name: (g.backend, g.stages[0]["name"], g.first_rank, g.world_size) for name, g in found.items()}
    if expected == "gloo":
        assert shape == {"shared": ("gloo", "stage", 1, 5), "own": ("gloo", "stage", 3, 5)}
    elif expected == "handles":
        assert shape == {"shared": ("handles", "stage.handles", 1, 3), "own": (backend, "stage", 1, 3)}
    else:
        assert shape == {"shared": ("gloo", "stage.host", 1, 3), "own": (backend, "stage", 1, 3)}


def test_the_dry_run_says_the_way_and_what_its_buffers_cost() -> None:
    """Two buffers of 64 MiB, once more than what every publish keeps."""
    device, host = shared("handles", run={"device": "npu"}), shared("host", run={"device": "npu"})
    spec = known_spec("models/Qwen2.5-7B")
    assert spec is not None
    parts = dict(trainer_memory(device, spec).parts)
    assert parts["handed buckets"] == 2 * 64 * 2**20 == parts["publish buckets"]
    assert trainer_memory(device, spec).total - trainer_memory(host, spec).total == 2 * 64 * 2**20
    lines = {line.partition("  ")[0]: line for line in derived_lines(device, spec, 64 * GIB, own_memory=True)}
    assert (
        "by memory handles from the stages' leaders (publish.shared_through=handles); buffers of 128.0 MiB"
        in lines["shared weights"]
    )
    lines = {line.partition("  ")[0]: line for line in derived_lines(shared(), spec, 64 * GIB, own_memory=False)}
    assert "in the group of the other engines (publish.shared_through=auto)" in lines["shared weights"]
