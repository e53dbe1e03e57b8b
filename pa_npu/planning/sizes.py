"""Which sizes of a run a planner may choose, and sizes as a line names them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.config.words import counted
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.search import Sizes

_POWERS = (1, 2, 4, 8)
_RECOMPUTE = ("none", "selective", "full")
_MOST_STAGES, _MOST_EXPERT_RANKS = 8, 16


def choices_of(config: Config, spec: ModelSpec, devices: int, free: Collection[str]) -> Sizes:
    """All values of the keys that are free, and of the others the one that they have."""

    def of(key: str, now: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values) if key in free else (now,)

    trainer, rollout = config.trainer, config.rollout
    sharded = trainer.backend == "fsdp"
    stages = [n for n in range(1, _MOST_STAGES + 1) if spec.num_layers % n == 0]
    experts = [
        n
        for n in (*_POWERS, _MOST_EXPERT_RANKS)
        if spec.experts is not None and spec.experts.count % n == 0
    ]
    recompute = [kind for kind in _RECOMPUTE if not (sharded and kind == "selective")]
    is_limited = "max_num_seqs" in rollout.model_fields_set and "rollout.max_num_seqs" not in free
    return Sizes(
        devices=devices,
        engines=None if "rollout.engines" in free else rollout.engines,
        trainers=None if "trainer.devices" in free else trainer.devices,
        shards=of("rollout.tensor_parallel", rollout.tensor_parallel, _POWERS),
        tensor=of("trainer.tensor_parallel", trainer.tensor_parallel, (1,) if sharded else _POWERS),
        stages=of(
            "trainer.pipeline_parallel", trainer.pipeline_parallel, (1,) if sharded else stages
        ),
        experts=of(
            "trainer.expert_parallel",
            trainer.expert_parallel,
            (1,) if sharded or not experts else experts,
        ),
        recompute=of("trainer.recompute", trainer.recompute, recompute),
        offload=of("optimizer.offload", config.optimizer.offload, (False, True)),
        colocate=of("placement.colocate", config.placement.colocate, (False, True)),
        sequences=rollout.max_num_seqs if is_limited else None,
    )


def size_words(config: Config) -> str:
    """Engines beside trainers, or on them, and what holds the trainers in memory."""
    rollout, trainer = config.rollout, config.trainer
    ranks = counted(trainer.devices, "rank")
    if trainer.backend != "fsdp":
        ranks += f" of TP {trainer.tensor_parallel}"
    if trainer.pipeline_parallel > 1:
        ranks += f" PP {trainer.pipeline_parallel}"
    if trainer.expert_parallel > 1:
        ranks += f" EP {trainer.expert_parallel}"
    held = [f"{trainer.recompute} recomputation"] if trainer.recompute != "none" else []
    held += ["offload"] if config.optimizer.offload else []
    where = "on" if config.placement.colocate else "beside"
    return (
        f"{counted(rollout.engines, 'engine')} x {rollout.tensor_parallel} {where} "
        f"{ranks}{''.join(f', {way}' for way in held)}"
    )
