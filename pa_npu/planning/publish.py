"""The bytes of a publish on its busiest links: what each sender sends, and what each engine worker gets."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import Senders
from pa_npu.config.words import counted
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.memory import BYTES, FP32, adapter_parameters, format_bytes, stage_parameters

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


def sends_tower_once(config: Config, spec: ModelSpec) -> bool:
    """Returns whether a vision tower is sent with the first version only: engines have it then, if
    it is frozen and they do not sleep, which loses all weights.
    """
    is_kept = config.model.vision == "frozen" and not config.placement.colocate
    return spec.num_tower_parameters > 0 and is_kept and not _sends_adapters(config)


def _sends_adapters(config: Config) -> bool:
    return config.has_adapters and config.publish.lora == "adapter"


@dataclass(frozen=True)
class PublishedBytes:
    """Bytes of one publish.

    num_senders: of all pipeline stages.
    sender: sent by the busiest sender. Workers pass on to each other what they get, so that this
        does not grow with their number.
    gathered: that come to the busiest sender from other trainer ranks first.
    worker: that each engine worker gets.
    once: that each engine worker gets with the first version in addition, and not again: a frozen
        vision tower, of which each sender sends its share.
    """

    num_senders: int
    sender: int
    gathered: int
    worker: int
    once: int = 0

    def of_run(self, iterations: int) -> int:
        """Returns what each engine worker gets in a run: the first version, and one of each
        iteration.
        """
        return self.once + (iterations + 1) * self.worker

    def line(self) -> str:
        """Returns the line of a plan about it."""
        gathered = ""
        if self.gathered:
            gathered = f", of which {format_bytes(self.gathered)} come from other ranks first"
        once = ""
        if self.once:
            once = f", and {format_bytes(self.once)} of a frozen tower with the first version"
        senders = counted(self.num_senders, "sender")
        return (
            f"publish               {senders}, the busiest sends {format_bytes(self.sender)}"
            f"{gathered}; each engine worker gets {format_bytes(self.worker)}{once}"
        )


def published_bytes(config: Config, spec: ModelSpec) -> PublishedBytes:
    """Returns the bytes of a publish, as if each tensor could be divided evenly among its holders."""
    mesh = config.mesh
    num_stages = mesh.pipeline
    element = BYTES[config.model.dtype]
    if _sends_adapters(config):
        stages = [FP32 * adapter_parameters(config, spec)]
    else:
        stages = []
        for stage in range(num_stages):
            dense, experts = stage_parameters(config, spec, stage)
            if spec.tied and 0 < stage == num_stages - 1:  # its copy of the embedding stays here
                dense -= spec.vocab_size * spec.hidden_size // mesh.tensor
            stages.append(element * (dense * mesh.tensor + experts * mesh.expert))
    once = 0
    if sends_tower_once(config, spec):  # on fsdp alone, which has one stage
        once = element * spec.num_tower_parameters
        stages = [stages[0] - once]
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
        once=once,
    )
