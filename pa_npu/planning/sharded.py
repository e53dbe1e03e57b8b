"""Bytes and seconds of a trainer rank whose models are sharded layer by layer (trainer.backend=fsdp)."""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec

_FP32 = 4


def sharded_parts(config: Config, spec: ModelSpec, element: int, frozen_element: int) -> dict[str, int]:
    """Bytes that a rank holds all the time, by purpose: trained weights, gradients and both moments in fp32, all of it sharded.

    element, frozen_element: bytes of a weight in model.dtype, and in the type of frozen models.
    """
    weights = spec.num_parameters
    held = {
        "weights": weights * _FP32,
        "gradients": weights * _FP32,
        "optimizer": 2 * weights * _FP32,
        "frozen models": weights * frozen_element * len(config.frozen_models),
        "published weights": weights * element * ("published" in config.model_copies),
    }
    return {name: size // config.mesh.shards for name, size in held.items()}


def gathered_bytes(config: Config, spec: ModelSpec, element: int) -> int:
    """Whole layers at the peak of a backward pass: one that computes, one that is gathered for what comes next, embedding and head;
    and a gradient on its way, in fp32."""
    outside = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    layer = (spec.num_parameters - outside) // spec.num_layers
    reduced = 0 if config.has_adapters else max(layer, outside) * _FP32 + layer * element
    return (outside + 2 * layer) * element + reduced


def gather_seconds(config: Config, spec: ModelSpec, element: int, wire_bytes: float) -> float:
    """Seconds per microbatch, as if computing hid none: weights gathered forward and backward, gradients scattered in fp32."""
    shards = config.mesh.shards
    if config.trainer.backend != "fsdp" or shards == 1:
        return 0.0
    scattered = 0 if config.has_adapters else _FP32
    passes = 2 + len(config.frozen_models)
    return spec.num_parameters * (passes * element + scattered) * (shards - 1) / shards / wire_bytes
