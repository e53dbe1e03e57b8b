"""Bytes of a trainer rank that trains adapters (LoRA): the weights once, and little beside them, all of it sharded."""

from __future__ import annotations

import re

from pa_npu.config.schema import Config
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.families.spec import ModelSpec

_FP32 = 4


def adapter_parameters(config: Config, spec: ModelSpec) -> int:
    """Parameters of one set of adapters: rank x (inputs + outputs) of every layer that gets one.

    Experts are no layers of their own in transformers, and get none.
    """
    shape, total = AdapterShape.of(config), 0
    for name, size in spec.hf_tensors().items():
        layer = name.removesuffix(".weight")
        if len(size) == 2 and ".layers." in name and ".experts." not in name and _is_target(layer, shape.targets):
            total += shape.rank * sum(size)
    return total


def adapter_parts(config: Config, spec: ModelSpec, element: int) -> dict[str, int]:
    """Bytes that a rank holds all the time, by purpose. element: bytes of a weight in model.dtype."""
    own = _FP32 * adapter_parameters(config, spec)
    copies = [name for name in config.model_copies if name != "reference" or config.keeps_reference]
    published = copies.count("published")
    held = {
        "weights": spec.num_parameters * element + own,
        "gradients": own,
        "optimizer": 2 * own,
        "frozen models": (len(copies) - published) * own,
        "published weights": published * own,
    }
    return {name: size // config.mesh.shards for name, size in held.items()}


def _is_target(layer: str, targets: str | tuple[str, ...]) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):  # peft's pattern of whole names
        return re.fullmatch(targets, layer) is not None
    return any(layer == target or layer.endswith(f".{target}") for target in targets)
