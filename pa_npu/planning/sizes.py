"""The sizes of a run that a planner may choose, and sizes in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.search import Sizes

_POWERS = (1, 2, 4, 8)
_RECOMPUTE = ("none", "selective", "full")
_MAX_STAGES = 8
_MAX_EXPERT_RANKS = 16


def size_choices(config: Config, spec: ModelSpec, devices: int, free: Collection[str]) -> Sizes:
    """Returns the values to choose among: all for the keys in `free`, the configured one for the
    rest.
    """

    def values_for(key: str, configured: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values) if key in free else (configured,)

    trainer = config.trainer
    rollout = config.rollout
    tensor: Sequence[int] = _POWERS
    stages: Sequence[int] = [n for n in range(1, _MAX_STAGES + 1) if spec.num_layers % n == 0]
    experts: Sequence[int] = (1,)
    recompute: Sequence[str] = _RECOMPUTE
    if trainer.backend == "fsdp":
        tensor = stages = (1,)
        recompute = ("none", "full")
    elif spec.experts is not None:
        experts = [n for n in (*_POWERS, _MAX_EXPERT_RANKS) if spec.experts.count % n == 0]

    max_sequences = None
    if "max_num_seqs" in rollout.model_fields_set and "rollout.max_num_seqs" not in free:
        max_sequences = rollout.max_num_seqs
    return Sizes(
        devices=devices,
        engines=None if "rollout.engines" in free else rollout.engines,
        trainers=None if "trainer.devices" in free else trainer.devices,
        shards=values_for("rollout.tensor_parallel", rollout.tensor_parallel, _POWERS),
        tensor=values_for("trainer.tensor_parallel", trainer.tensor_parallel, tensor),
        stages=values_for("trainer.pipeline_parallel", trainer.pipeline_parallel, stages),
        experts=values_for("trainer.expert_parallel", trainer.expert_parallel, experts),
        context=values_for("trainer.context_parallel", trainer.context_parallel, _POWERS),
        recompute=values_for("trainer.recompute", trainer.recompute, recompute),
        offload=values_for("optimizer.offload", config.optimizer.offload, (False, True)),
        colocate=values_for("placement.colocate", config.placement.colocate, (False, True)),
        max_sequences=max_sequences,
    )


def size_words(config: Config) -> str:
    """Returns engines and trainers in words, with how the trainers save memory, for a plan's line."""
    rollout = config.rollout
    trainer = config.trainer
    ranks = counted(trainer.devices, "rank")
    if trainer.backend != "fsdp":
        ranks += f" of TP {trainer.tensor_parallel}"
    if trainer.pipeline_parallel > 1:
        ranks += f" PP {trainer.pipeline_parallel}"
    if trainer.expert_parallel > 1:
        ranks += f" EP {trainer.expert_parallel}"
    if trainer.context_parallel > 1:
        ranks += f" C {trainer.context_parallel}"
    if trainer.recompute != "none":
        ranks += f", {trainer.recompute} recomputation"
    if config.optimizer.offload:
        ranks += ", offload"
    relation = "on" if config.placement.colocate else "beside"
    engines = counted(rollout.engines, "engine")
    return f"{engines} x {rollout.tensor_parallel} {relation} {ranks}"
