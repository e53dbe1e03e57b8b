"""Engines get HF's tensors bit for bit, of the model and the version that they asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import PublishStats
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Manifest
from pa_npu.weight_transfer.receiver import Receiver, check_model
from tests.helpers.publish_world import World, assert_equal_weights, received
from tests.helpers.weights import FAMILIES, Stage, gloo_group, make_checkpoint, run_threads

LAYOUTS = [(False, 1, 1, 2), (False, 2, 1, 1), (True, 2, 2, 2), (True, 4, 1, 1)]
EXPERTS = [*((family, 1) for family in FAMILIES), ("qwen3_moe", 2), ("qwen3_moe", 4)]


@pytest.mark.parametrize(
    ("family", "ep_size", "tied", "tp_size", "stages", "workers"),
    [  # in CI every family once, and one of them and shared experts in every layout
        pytest.param(
            *digest,
            *layout,
            marks=[]
            if layout == LAYOUTS[2] or digest in (EXPERTS[0], EXPERTS[-1])
            else [pytest.mark.nightly],
        )
        for digest in EXPERTS
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
        sent, arrived = world.publish(version, publishers, receivers)
        for weights in arrived:
            assert_equal_weights(weights, expected, version)
        assert sum(s.bytes for s in sent) == sum(tensor.nbytes for tensor in expected.values())
        digests = [digests for receiver in receivers for digests in receiver.digests]
        assert digests and all(len(digest.split()) > 1 for digest in digests), (
            "one bucket would show nothing about cutting"
        )
        expected = {name: tensor + 1 for name, tensor in expected.items()}
        world.add(1)


def test_weights_travel_in_the_parameters_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path, "qwen3", tied=False)
    world = World(monkeypatch, spec, tp_size=2)
    publishers = world.publishers(dtype=torch.bfloat16)
    (receiver,) = world.connect(publishers)
    _, (weights,) = world.publish(0, publishers, [receiver])
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(weights[name], tensor.bfloat16()), name


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
