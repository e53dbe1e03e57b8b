"""Plays the trainers of one pipeline stage to an engine: its group, and the weights of an HF directory as a version."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pa_npu.engines.protocol import LoadedWeights, RolloutEngine, WeightGroups
from pa_npu.weight_transfer import transport
from pa_npu.weight_transfer.adapters import Base
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment

TIMEOUT_S = 60.0
_BUCKET_ELEMENTS = 20_000
_names = itertools.count()


class WeightSender:
    """Hosts the store of the groups; `publish` makes a new group each time."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    async def publish(
        self,
        engine: RolloutEngine,
        version: int,
        model: Path,
        *,
        sent_version: int | None = None,
        joined: asyncio.Event | None = None,
        base: Base | None = None,
        **sizes: int,
    ) -> LoadedWeights:
        """One engine of one worker joins, receives and loads. sent_version: what the header says
        instead of `version`. joined: it receives while engines generate, and keeps what it has until it
        swaps; set when that may begin. base: what the tensors of `model` are adapters of.

        sizes: of the model, which engines compare with their own.
        """
        tensors = tensors_of(model)
        manifest = msgspec.structs.replace(manifest_of(tensors, sizes), base=base)
        name = f"sender-{next(_names)}"
        stages = [{"name": name, "manifest": manifest.to_json()}]
        groups = WeightGroups(("127.0.0.1", self._store.port), 1, 2, stages, "gloo", TIMEOUT_S)
        header = version if sent_version is None else sent_version
        sending = asyncio.get_running_loop().run_in_executor(
            None, self._send, name, header, manifest, tensors
        )
        try:
            await engine.join_weight_groups(groups, deadline_s=TIMEOUT_S)
            if joined is None:
                loaded = await engine.load_weights(version, deadline_s=TIMEOUT_S)
            else:
                joined.set()
                loaded = await engine.prepare_weights(version, deadline_s=TIMEOUT_S)
        except BaseException:
            transport.Abandonment("127.0.0.1", self._store.port, name).declare("the engine refused")
            await asyncio.gather(sending, return_exceptions=True)
            raise
        await sending
        return loaded

    def _send(
        self, name: str, version: int, manifest: Manifest, tensors: dict[str, torch.Tensor]
    ) -> None:
        group = transport.join_group(
            "127.0.0.1",
            self._store.port,
            name,
            rank=0,
            size=2,
            backend="gloo",
            timeout_s=TIMEOUT_S,
            describe="the test's sender",
        )
        deadline = transport.Deadline(
            TIMEOUT_S, transport.Abandonment("127.0.0.1", self._store.port, name).reason
        )
        try:
            buffers = [
                torch.tensor([version, manifest.digest, len(manifest.buckets)], dtype=torch.int64)
            ]
            for bucket in manifest.buckets:
                parts = [
                    tensors[s.name].flatten()[s.start : s.start + s.size] for s in bucket.segments
                ]
                buffers.append(torch.cat(parts))
            for buffer in buffers:
                transport.wait(
                    transport.broadcast(group, buffer),
                    deadline,
                    "the test sends",
                    "look at the engine's log",
                )
        except BaseException:
            transport.drop_group(group)
            raise
        transport.leave_group(group)


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def manifest_of(tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> Manifest:
    """Buckets of whole and cut tensors."""
    segments: list[Segment] = []
    for name, tensor in tensors.items():
        starts = range(0, tensor.numel(), _BUCKET_ELEMENTS)
        segments += [
            Segment(name, start, min(_BUCKET_ELEMENTS, tensor.numel() - start)) for start in starts
        ]
    buckets: list[list[Segment]] = [[]]
    for segment in segments:
        if (
            sum(bucket.size for bucket in buckets[-1]) + segment.size > _BUCKET_ELEMENTS
            and buckets[-1]
        ):
            buckets.append([])
        buckets[-1].append(segment)
    shapes: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return Manifest(0, sizes, shapes, tuple(Bucket(dtype, tuple(bucket)) for bucket in buckets))
