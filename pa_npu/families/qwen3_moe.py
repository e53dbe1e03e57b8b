"""Qwen3-MoE: Qwen3 whose layers, all or some of them, have experts and a router in place of the dense feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pa_npu.families.config_json import count, flag
from pa_npu.families.dense import DenseDecoder, LayerActivations, LayerRole, Weight
from pa_npu.families.shape import Experts, FlopsModel, ModelShape

# transformers 5 writes the second name, everything before it the first.
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")


class Qwen3Moe(DenseDecoder):
    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    qk_norm = True
    default_kv_heads = 4

    def unsupported(self, raw: dict[str, Any]) -> Iterator[str]:
        yield from super().unsupported(raw)
        for key in _SHARED:
            if raw.get(key):
                yield f"shared experts ({key})"

    def sizes(self, raw: dict[str, Any]) -> dict[str, Any]:
        sizes = super().sizes(raw)
        num_experts = next((count(raw, key) for key in _NUM_EXPERTS if raw.get(key) is not None), 128)
        per_token = count(raw, "num_experts_per_tok", 8)
        if per_token > num_experts:
            raise ValueError(f"num_experts_per_tok: {per_token} is more than {num_experts} experts")
        if num_experts > 65535:
            raise ValueError(f"{_NUM_EXPERTS[0]}: {num_experts} is more than 65535")
        step, dense = count(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise ValueError(f"mlp_only_layers: {dense!r:.40} is not a list of layers")
        layers = tuple(n for n in range(sizes["num_layers"]) if n not in dense and (n + 1) % step == 0)
        if not layers:
            raise ValueError(f"decoder_sparse_step, mlp_only_layers: {step}, {dense!r:.40} leave no layer with experts")
        experts = Experts(
            num_experts, per_token, count(raw, "moe_intermediate_size", 768), flag(raw, "norm_topk_prob"), layers
        )
        return {**sizes, "experts": experts}

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[LayerRole, Weight]:
        weights = super().layer_weights(spec, layer)
        experts = spec.experts
        if experts is None or not spec.has_experts(layer):
            return weights
        inner, outer = (experts.ffn_size, spec.hidden_size), (spec.hidden_size, experts.ffn_size)
        attention: dict[LayerRole, Weight] = {
            role: weight for role, weight in weights.items() if role not in ("gate", "up", "down")
        }
        return attention | {
            "router": Weight("mlp.gate.weight", (experts.count, spec.hidden_size)),
            "expert_gate": Weight("mlp.experts.{expert}.gate_proj.weight", inner, experts.count),
            "expert_up": Weight("mlp.experts.{expert}.up_proj.weight", inner, experts.count),
            "expert_down": Weight("mlp.experts.{expert}.down_proj.weight", outer, experts.count),
        }

    def flops(self, spec: ModelShape) -> FlopsModel:
        """With as many experts as a token goes through; routers, a thousandth of it, are left out."""
        assert spec.experts is not None
        active = len(spec.experts.layers) * spec.experts.per_token * spec.experts.ffn_size
        dense = spec.num_dense_layers * spec.ffn_size
        return replace(super().flops(spec), ffn_size=round((active + dense) / spec.num_layers))

    def layer_activations(self, spec: ModelShape) -> LayerActivations:
        """Count a layer with experts, where tokens are spread evenly: a row for each of a token's experts goes in and comes out."""
        assert spec.experts is not None
        experts = spec.experts
        rows = experts.per_token * (3 * experts.ffn_size + 3 * spec.hidden_size)
        return replace(super().layer_activations(spec), feed_forward=rows)
