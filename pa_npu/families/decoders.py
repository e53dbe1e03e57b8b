"""Llama-like decoder families: from config.json to sizes, names and shapes of the weights, work and memory.

A family is a subclass of DenseDecoder that states what differs, as those at the end of this file,
and an entry in `spec`.

Everything else reads the family through a ModelSpec: a training backend builds layers from the
spec's flags and finds the weights by role (`layer_weights`), the planner counts with
`layer_activations`, dispatch with `flops`.

A family whose layers differ more needs a flag in ModelSpec and the backends' support for it, once
for all families that have it:
    Gemma-like      norms that scale by 1 + w (added on loading, taken off on publishing),
                    embeddings scaled by sqrt(hidden_size), GELU in the gated layer, two more norms
                    per layer (roles after_attention_norm and after_feed_forward_norm), capped
                    logits
    GLM-like        rotation of a part of each head, in pairs that lie side by side; gate and up as
                    one tensor (role gate_up)

The spec of a mixture of experts has `experts`, and its layers with experts have other roles
(Qwen3Moe).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pa_npu.families.config_json import count, flag, mapping, positive, token_ids
from pa_npu.families.shape import Experts, FlopsModel, ModelShape, parse_rope

# No model has more layers; a config.json that says so would have the checks count tensors for ever.
_MOST_LAYERS = 4096
# transformers 5 writes the second name, everything before it the first.
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")


@dataclass(frozen=True)
class Weight:
    """One tensor of an HF checkpoint: its name (of a layer's, without the layer's prefix) and full
    shape.

    experts: where it is above 0, as many tensors of this shape, with the expert's number in the
    place of {expert} in the name.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes; expert by expert."""
        if not self.experts:
            return {self.name: self.shape}
        return {self.name.format(expert=expert): self.shape for expert in range(self.experts)}

    @property
    def size(self) -> int:
        return max(1, self.experts) * math.prod(self.shape)


@dataclass(frozen=True)
class LayerActivations:
    """Numbers per token that a layer keeps for its backward pass, before any division over ranks.

    residual: inputs and outputs of the norms. attention: queries, keys and values before the
    rotation and attention's output.
    rotated: queries and keys after the rotation. feed_forward: both halves of the gated layer and
    their product.
    """

    residual: int
    attention: int
    rotated: int
    feed_forward: int


class DenseDecoder:
    """A family.

    Class attributes are what it states; methods are overridden where a family computes something
    else.
    """

    model_type: str
    architecture: str
    qkv_bias = False
    qk_norm = False
    default_kv_heads: int | None = None
    """Used where config.json does not say; None means as many as heads.

    An explicit null always means that.
    """
    default_head_dim: int | None = None
    """Used where config.json does not say; None means hidden_size / heads."""
    heads_divide_hidden = False
    """Whether transformers, and with it the engines, refuses other numbers of heads even where
    head_dim is given.
    """

    # config.json

    def unsupported(self, raw: dict[str, Any]) -> Iterator[str]:
        """Features in words, without which the model would silently be another one."""
        architectures = raw.get("architectures")
        if architectures is not None and architectures != [self.architecture]:
            yield f"architectures {architectures!r:.60} (only {self.architecture})"
        if mapping(raw, "auto_map"):
            yield "code of its own (auto_map)"
        if mapping(raw, "quantization_config"):
            yield "quantised weights (quantization_config)"
        if flag(raw, "use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
            yield "sliding-window attention (use_sliding_window, layer_types)"
        if raw.get("hidden_act", "silu") != "silu":
            yield f"activation {raw['hidden_act']!r:.40} (only silu)"
        if flag(raw, "mlp_bias"):
            yield "biases in the feed-forward layers (mlp_bias)"
        if flag(raw, "attention_bias") and not self.qkv_bias:
            yield "attention_bias, which also biases the output projection"

    def sizes(self, raw: dict[str, Any]) -> dict[str, Any]:
        """ModelSpec's fields. KeyError names a missing key, ValueError says what is malformed."""
        hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
        kv_default = (
            num_heads if "num_key_value_heads" in raw else self.default_kv_heads or num_heads
        )
        num_kv_heads = count(raw, "num_key_value_heads", kv_default)
        if hidden_size % num_heads and (
            self.heads_divide_hidden or not (raw.get("head_dim") or self.default_head_dim)
        ):
            raise ValueError(
                f"num_attention_heads: {num_heads} does not divide hidden_size = {hidden_size}"
            )
        head_dim = count(raw, "head_dim", self.default_head_dim or hidden_size // num_heads)
        if count(raw, "num_hidden_layers") > _MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers: {raw['num_hidden_layers']} is more than {_MOST_LAYERS}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads = "
                f"{num_heads}"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is odd, and rotary positions turn pairs")
        return {
            "num_layers": count(raw, "num_hidden_layers"),
            "hidden_size": hidden_size,
            "ffn_size": count(raw, "intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": count(raw, "vocab_size"),
            "rope": parse_rope(raw),
            "norm_eps": positive(raw, "rms_norm_eps"),
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "tied": flag(raw, "tie_word_embeddings"),
            "max_positions": count(raw, "max_position_embeddings"),
            "eos_token_ids": token_ids(raw, "eos_token_id"),
        }

    # The weights' names and shapes

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def outer_weights(self, spec: ModelShape) -> dict[str, Weight]:
        """Name the weights outside of layers; a tied head is the embedding."""
        vocabulary = (spec.vocab_size, spec.hidden_size)
        embedding = Weight("model.embed_tokens.weight", vocabulary)
        return {
            "embedding": embedding,
            "final_norm": Weight("model.norm.weight", (spec.hidden_size,)),
            "head": embedding if spec.tied else Weight("lm_head.weight", vocabulary),
        }

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[str, Weight]:
        """Name the weights of one of the model's layers, by role."""
        hidden, ffn = spec.hidden_size, spec.ffn_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        weights: dict[str, Weight] = {
            "attention_norm": Weight("input_layernorm.weight", (hidden,)),
            "q": Weight("self_attn.q_proj.weight", (q_rows, hidden)),
            "k": Weight("self_attn.k_proj.weight", (kv_rows, hidden)),
            "v": Weight("self_attn.v_proj.weight", (kv_rows, hidden)),
            "o": Weight("self_attn.o_proj.weight", (hidden, q_rows)),
            "feed_forward_norm": Weight("post_attention_layernorm.weight", (hidden,)),
            "gate": Weight("mlp.gate_proj.weight", (ffn, hidden)),
            "up": Weight("mlp.up_proj.weight", (ffn, hidden)),
            "down": Weight("mlp.down_proj.weight", (hidden, ffn)),
        }
        if spec.qkv_bias:
            weights |= {
                "q_bias": Weight("self_attn.q_proj.bias", (q_rows,)),
                "k_bias": Weight("self_attn.k_proj.bias", (kv_rows,)),
                "v_bias": Weight("self_attn.v_proj.bias", (kv_rows,)),
            }
        if spec.qk_norm:
            weights |= {
                "q_norm": Weight("self_attn.q_norm.weight", (spec.head_dim,)),
                "k_norm": Weight("self_attn.k_norm.weight", (spec.head_dim,)),
            }
        return weights

    def linear_layers(self, spec: ModelShape) -> dict[str, tuple[int, ...]]:
        """Name and [outputs, inputs] of every layer that adapters can stand beside.

        No experts or routers.
        """
        return {
            self.layer_prefix(number) + weight.name.removesuffix(".weight"): weight.shape
            for number in range(spec.num_layers)
            for role, weight in self.layer_weights(spec, number).items()
            if len(weight.shape) == 2 and not weight.experts and role != "router"
        }

    def fuses_experts(self, spec: ModelShape) -> bool:
        """Whether transformers keeps all experts of a layer in one tensor."""
        return spec.experts is not None

    # Work and memory

    def num_parameters(self, spec: ModelShape) -> int:
        """Tied weights counted once."""
        layers = sum(
            weight.size
            for n in range(spec.num_layers)
            for weight in self.layer_weights(spec, n).values()
        )
        return layers + sum(weight.size for weight in set(self.outer_weights(spec).values()))

    def flops(self, spec: ModelShape) -> FlopsModel:
        """Matrix multiplications of a training step."""
        return FlopsModel(
            spec.num_layers,
            spec.hidden_size,
            spec.ffn_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
        )

    def layer_activations(self, spec: ModelShape) -> LayerActivations:
        heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        return LayerActivations(
            residual=4 * spec.hidden_size,
            attention=2 * heads,
            rotated=heads,
            feed_forward=3 * spec.ffn_size,
        )


class Llama(DenseDecoder):
    """Llama 2 and 3, and other models that have their config.json."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    heads_divide_hidden = True


class Qwen2(DenseDecoder):
    """Qwen2 and Qwen2.5, and what was distilled into them: biases on queries, keys and values."""

    model_type, architecture = "qwen2", "Qwen2ForCausalLM"
    qkv_bias = True
    default_kv_heads = 32


class Qwen3(DenseDecoder):
    """Norms of queries and keys per head, and a head size of its own."""

    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    qk_norm = True
    default_kv_heads = 32
    default_head_dim = 128


class Qwen3Moe(DenseDecoder):
    """Qwen3 whose layers, all or some of them, have experts and a router in place of the dense
    feed-forward layer.
    """

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
        num_experts = next(
            (count(raw, key) for key in _NUM_EXPERTS if raw.get(key) is not None), 128
        )
        per_token = count(raw, "num_experts_per_tok", 8)
        if per_token > num_experts:
            raise ValueError(f"num_experts_per_tok: {per_token} is more than {num_experts} experts")
        if num_experts > 65535:
            raise ValueError(f"{_NUM_EXPERTS[0]}: {num_experts} is more than 65535")
        step, dense = count(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise ValueError(f"mlp_only_layers: {dense!r:.40} is not a list of layers")
        layers = tuple(
            n for n in range(sizes["num_layers"]) if n not in dense and (n + 1) % step == 0
        )
        if not layers:
            raise ValueError(
                f"decoder_sparse_step, mlp_only_layers: {step}, {dense!r:.40} leave no layer with "
                "experts"
            )
        experts = Experts(
            num_experts,
            per_token,
            count(raw, "moe_intermediate_size", 768),
            flag(raw, "norm_topk_prob"),
            layers,
        )
        return {**sizes, "experts": experts}

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[str, Weight]:
        weights = super().layer_weights(spec, layer)
        experts = spec.experts
        if experts is None or not spec.has_experts(layer):
            return weights
        inner, outer = (experts.ffn_size, spec.hidden_size), (spec.hidden_size, experts.ffn_size)
        attention: dict[str, Weight] = {
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
        """Count a layer with experts, where tokens are spread evenly: a row for each of a token's
        experts goes in and comes out.
        """
        assert spec.experts is not None
        experts = spec.experts
        rows = experts.per_token * (3 * experts.ffn_size + 3 * spec.hidden_size)
        return replace(super().layer_activations(spec), feed_forward=rows)
