"""Buckets cover the model exactly once and stay small, and the next is ready before the last has left."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.config.mesh import Mesh
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import PublishStats
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.manifest import Assembler, Manifest
from tests.helpers.publish_world import publisher
from tests.helpers.weights import Stage, make_checkpoint


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
    received = [
        item
        for bucket, buffer in zip(tensors.manifest.buckets, buckets, strict=True)
        for item in assembler.completed(bucket, buffer)
    ]
    assert len(received) == len(hf)
    for name, tensor in received:
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
        self._log = log
        self._index = len(log)
        self._total = total
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
