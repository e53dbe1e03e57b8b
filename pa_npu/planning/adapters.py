"""Bytes of a trainer rank that trains adapters (LoRA): the weights once, and little beside them, all of it sharded."""

from __future__ import annotations

from pa_npu.config.schema import Config
from pa_npu.families.peft_directory import AdapterShape
from pa_npu.families.spec import ModelSpec

_FP32 = 4


def adapter_parameters(config: Config, spec: ModelSpec) -> int:
    """Parameters of one set of adapters: rank x (inputs + outputs) of every layer that gets one."""
    shape, layers = AdapterShape.of(config), spec.definition.linear_layers(spec)
    return shape.rank * sum(sum(size) for name, size in layers.items() if shape.chooses(name))


def without_adapters(config: Config, spec: ModelSpec) -> list[str]:
    """A line where the most of a model gets none, though lora.targets may say all."""
    if not (config.has_adapters and spec.definition.fuses_experts(spec)):
        return []
    return ["lora.targets: the experts of this mixture get no adapters and stay as they are"]


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
