"""A model family from outside the package: Llama under other names, as a user would add one."""

from __future__ import annotations

from dataclasses import replace

from pa_npu.families.decoders import Llama, Weight
from pa_npu.families.shape import ModelShape


class RenamedLlama(Llama):
    model_type, architecture = "renamed_llama", "RenamedLlamaForCausalLM"

    def layer_prefix(self, layer: int) -> str:
        return f"blocks.{layer}."

    def outer_weights(self, spec: ModelShape) -> dict[str, Weight]:
        return {
            role: replace(weight, name=f"outer.{role}")
            for role, weight in super().outer_weights(spec).items()
        }

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[str, Weight]:
        weights = super().layer_weights(spec, layer)
        return {role: replace(weight, name=f"{role}.weight") for role, weight in weights.items()}
