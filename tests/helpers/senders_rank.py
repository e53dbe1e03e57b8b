"""One fsdp rank that writes down what it would send to engines, by each way to divide that among ranks.

run_job starts it in place of tests.helpers.trainer_rank. With `faults` it sends two versions, and in
the second one a tensor with each of these faults.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BUCKET_BYTES = 4096

DAMAGED, LIKE = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (1, 0))
"""The tensor that a fault is in, and another one of its shape."""
SHIFTED_ROW = "the last rank's shard shifted by a row"
SHIFTED_ELEMENT = "the last rank's shard shifted by an element"
TURNED = "the last rank's shard turned"
EXCHANGED_RANKS = "shards exchanged between the ranks"
EXCHANGED_TENSORS = "the last rank's shards of two tensors exchanged"
OLD = "the last rank's shard of the version before"
LEFT_OUT = "the last rank's shard left out"
HONEST = "no fault"
FAULTS = (SHIFTED_ROW, SHIFTED_ELEMENT, TURNED, EXCHANGED_RANKS, EXCHANGED_TENSORS, OLD, LEFT_OUT)
DTYPES = ("fp32", "bf16")
SENDERS = ("leader", "shards")


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.config.load import load_config
    from pa_npu.control.channel import connect
    from pa_npu.families.spec import ModelSpec
    from pa_npu.telemetry.timeline import Timeline

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    rank = int(os.environ["RANK"])
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), 60)
    backend: Any = backend_module(config.trainer.backend).create(
        config,
        ModelSpec.from_config(config),
        platforms.get(config.run.device),
        dist.PrefixStore("trainer", store),
        rank,
        0,
        Timeline(None, ""),
    )
    sent = _with_faults(backend) if job["faults"] else _by_each_way(backend, job["lora"])
    torch.save(sent, Path(job_file).with_name(f"sent-{rank}.pt"))
    dist.barrier()
    if rank == 0:
        Path(job["out"]).write_text("[]")
    backend.close()


def _by_each_way(backend: Any, kinds: list[str]) -> dict[str, Any]:
    sent = {}
    for lora in kinds:
        for senders in ("leader", "shards", "all"):
            source = _source(backend, lora=lora, senders=senders)
            if source is not None:
                sent[f"{lora} {senders}"] = _written(source)
    return sent


def _with_faults(backend: Any) -> dict[str, Any]:
    ways = [(dtype, senders) for dtype in DTYPES for senders in SENDERS]
    sent = {}
    for dtype, senders in ways:
        source = _source(backend, dtype, senders=senders)
        sent[f"{dtype} {senders} before"] = _written(source)
    (weight,) = [whole for name, _, whole in source._weights if name == DAMAGED]
    old = weight.to_local().detach().clone()
    with torch.no_grad():
        for parameter in backend._models["policy"].parameters():
            parameter.mul_(1.03125)
    for dtype, senders in ways:
        for fault in (HONEST, *FAULTS):
            source = _source(backend, dtype, senders=senders)
            if fault != HONEST:
                source.parts = _damaged(fault, source.parts, backend.place.rank, old)
            sent[f"{dtype} {senders} {fault}"] = _written(source)
    return sent


def _source(backend: Any, dtype: str = "", **publish: str) -> Any:
    """Returns what this rank would send, or None if it takes no part."""
    config = backend._config
    sections = {"publish": config.publish.model_copy(update=publish)}
    if dtype:
        sections["model"] = config.model.model_copy(update={"dtype": dtype})
    backend._config = config.model_copy(update=sections)
    return backend.published_weights(BUCKET_BYTES)


def _written(source: Any) -> tuple[Any, list[torch.Tensor], dict[str, str]]:
    """Returns the manifest, None of a rank that sends nothing, the buckets and the contents."""
    from pa_npu.weight_transfer.transport import Deadline

    buckets = [bucket.clone() for bucket in source.buckets(Deadline(60.0)) if bucket is not None]
    contents = source.contents()
    return source.manifest.to_json() if source.is_leader else None, buckets, contents


def _damaged(
    fault: str, honest: Callable[[bool], Mapping[str, Any]], rank: int, old: torch.Tensor
) -> Callable[[bool], Mapping[str, Any]]:
    """Returns `parts` of a source whose shard of DAMAGED is not what this rank trains of it."""

    def parts(leads: bool) -> Mapping[str, Any]:
        changed = dict(honest(leads))
        part = changed[DAMAGED]
        if fault == EXCHANGED_RANKS:
            shards = [torch.empty_like(part.shard) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, part.shard.contiguous())
            changed[DAMAGED] = replace(part, shard=shards[1 - rank])
        elif rank != dist.get_world_size() - 1:
            return changed
        elif fault == EXCHANGED_TENSORS:
            changed[DAMAGED], changed[LIKE] = changed[LIKE], part
        else:
            shard = _values(fault, part.shard.view_as(old), old)
            changed[DAMAGED] = replace(part, shard=shard.reshape(-1))
        return changed

    return parts


def _values(fault: str, rows: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Returns what the faulty rank sends in place of its rows, [rows, columns]."""
    if fault == SHIFTED_ROW:
        return rows.roll(1, 0)
    if fault == SHIFTED_ELEMENT:
        return rows.reshape(-1).roll(1)
    if fault == TURNED:
        return rows.flip(0)
    if fault == LEFT_OUT:
        return torch.zeros_like(rows)
    assert fault == OLD, fault
    return old


if __name__ == "__main__":
    main(sys.argv[1])
