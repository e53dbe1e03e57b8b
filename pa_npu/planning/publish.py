"""The bytes of a publish on its busiest links: what each sender sends, and what each engine worker gets."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import Senders
from pa_npu.config.words import counted
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import (
    BYTES,
    FP32,
    adapter_parameters,
    format_bytes,
    stage_parameters,
)

# By kind of device, the number of senders up to which publish.senders=null means shards. A group of
# HCCL takes 400 MiB of a device unless HCCL_BUFFSIZE says otherwise, so that five take 2 GiB.
_MAX_SENDERS = {"npu": 5}


def senders_of(config: Config) -> Senders:
    """Returns publish.senders, with null resolved.

    An engine worker is in a process group with each sender, whose buffers are on its device; those
    of engines on the trainers' devices are in host memory (weight_transfer.transport.Way).
    """
    if config.publish.senders is not None:
        return config.publish.senders
    num_senders = len(config.mesh.publishers("shards"))
    fits = num_senders <= _MAX_SENDERS.get(config.run.device, num_senders)
    return "shards" if fits or config.placement.colocate else "leader"


def publishers_of(config: Config) -> tuple[int, ...]:
    """Returns the trainer ranks that send weights to engines, stage after stage."""
    return config.mesh.publishers(senders_of(config))


def contributors_of(config: Config) -> tuple[int, ...]:
    """Returns the trainer ranks whose weights together are what engines get."""
    return config.mesh.contributors(senders_of(config))


@dataclass(frozen=True)
class PublishedBytes:
    """Bytes of one publish.

    num_senders: of all pipeline stages.
    sender: sent by the busiest sender. Workers pass on to each other what they get, so that this
        does not grow with their number.
    gathered: that come to the busiest sender from other trainer ranks first.
    worker: that each engine worker gets.
    """

    num_senders: int
    sender: int
    gathered: int
    worker: int

    def line(self) -> str:
        """Returns the line of a plan about it."""
        gathered = ""
        if self.gathered:
            gathered = f", of which {format_bytes(self.gathered)} come from other ranks first"
        senders = counted(self.num_senders, "sender")
        return (
            f"publish               {senders}, the busiest sends {format_bytes(self.sender)}"
            f"{gathered}; each engine worker gets {format_bytes(self.worker)}"
        )


def published_bytes(config: Config, spec: ModelSpec) -> PublishedBytes:
    """Returns the bytes of a publish, as if each tensor could be divided evenly among its holders."""
    mesh = config.mesh
    num_stages = mesh.pipeline
    if config.has_adapters and config.publish.lora == "adapter":
        stages = [FP32 * adapter_parameters(config, spec)]
    else:
        stages = []
        for stage in range(num_stages):
            dense, experts = stage_parameters(config, spec, stage)
            weights = dense * mesh.tensor + experts * mesh.expert
            stages.append(weights * BYTES[config.model.dtype])
    publishers = publishers_of(config)
    per_stage = len(publishers) // num_stages
    busiest = max(stages)
    gathered = 0
    if senders_of(config) == "leader":
        holders = len(mesh.place(0).shard_group)
        gathered = busiest * (holders - 1) // holders
    return PublishedBytes(
        num_senders=len(publishers),
        sender=-(-busiest // per_stage),
        gathered=gathered,
        worker=sum(stages),
    )
