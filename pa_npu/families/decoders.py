"""Llama-like decoder families: config.json to sizes, names and shapes of weights, work and memory.

A family is a subclass of DenseDecoder that states its differences, as those at the end of this
file, and an entry in `spec`.

Everything else reads the family through a ModelSpec: a training backend builds layers from the
spec's flags and finds the weights by role (`layer_weights`), the planner counts with
`layer_activations`, dispatch with `flops`.

A family whose layers differ more needs a flag in ModelSpec and the backends' support for it, once
for all families that have it:
    Gemma-like      norms that scale by 1 + w (added on loading, subtracted on publishing),
                    embeddings scaled by sqrt(hidden_size), GELU in the gated layer, two more norms
                    per layer (roles after_attention_norm and after_feed_forward_norm), capped
                    logits
    GLM-like        rotation of a part of each head, in pairs side by side; gate and up as one
                    tensor (role gate_up)

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

# No model has more layers; with a larger number the checks would count tensors for ever.
_MAX_LAYERS = 4096
# transformers 5 writes the second name, everything before it the first.
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")


@dataclass(frozen=True)
class Weight:
    """One tensor of an HF checkpoint, or one tensor for each expert.

    name: of a layer's tensor, without the layer's prefix; {expert} stands for the expert's number.
    shape: full shape.
    experts: number of tensors of this shape; 0: a single tensor.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns shapes by name, expert by expert."""
        if not self.experts:
            return {self.name: self.shape}
        return {self.name.format(expert=expert): self.shape for expert in range(self.experts)}

    @property
    def size(self) -> int:
        return max(1, self.experts) * math.prod(self.shape)


@dataclass(frozen=True)
class LayerActivations:
    """Numbers per token that a layer keeps for its backward pass, before any division over ranks.

    residual: inputs and outputs of the norms.
    attention: queries, keys and values before the rotation, and attention's output.
    rotated: queries and keys after the rotation.
    feed_forward: both halves of the gated layer and their product.
    """

    residual: int
    attention: int
    rotated: int
    feed_forward: int


class DenseDecoder:
    """A family of dense decoders.

    Class attributes state its differences; a family overrides methods where it computes something
    else.
    """

    model_type: str
    architecture: str
    qkv_bias = False
    qk_norm = False
    default_kv_heads: int | None = None
    """Used if config.json has no value; None means as many as heads. A null always means that."""
    default_head_dim: int | None = None
    """Used if config.json has no value; None means hidden_size / heads."""
    heads_divide_hidden = False
    """Whether transformers, and with it the engines, refuses a number of heads that does not divide
    hidden_size, even if head_dim is given.
    """

    # config.json

    def unsupported(self, raw: dict[str, Any]) -> Iterator[str]:
        """Yields features, in words, without which the model would silently be another one."""
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
        """Returns ModelSpec's fields.

        Raises KeyError that names a missing key, ValueError that says what is malformed.
        """
        hidden_size = count(raw, "hidden_size")
        num_heads = count(raw, "num_attention_heads")
        default_kv_heads = num_heads
        if "num_key_value_heads" not in raw and self.default_kv_heads:
            default_kv_heads = self.default_kv_heads
        num_kv_heads = count(raw, "num_key_value_heads", default_kv_heads)
        if hidden_size % num_heads and (
            self.heads_divide_hidden or not (raw.get("head_dim") or self.default_head_dim)
        ):
            raise ValueError(
                f"num_attention_heads: {num_heads} does not divide hidden_size = {hidden_size}"
            )
        head_dim = count(raw, "head_dim", self.default_head_dim or hidden_size // num_heads)
        if count(raw, "num_hidden_layers") > _MAX_LAYERS:
            raise ValueError(
                f"num_hidden_layers: {raw['num_hidden_layers']} is more than {_MAX_LAYERS}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads = "
                f"{num_heads}"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is odd, and rotary positions turn pairs")
        rope = parse_rope(raw)
        max_positions = count(raw, "max_position_embeddings")
        if rope.kind == "yarn":  # the key often says how many there were before they were scaled
            max_positions = max(max_positions, int(rope.original_positions * rope.factor))
        return {
            "num_layers": count(raw, "num_hidden_layers"),
            "hidden_size": hidden_size,
            "ffn_size": count(raw, "intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": count(raw, "vocab_size"),
            "rope": rope,
            "norm_eps": positive(raw, "rms_norm_eps"),
            "qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "tied": flag(raw, "tie_word_embeddings"),
            "max_positions": max_positions,
            "eos_token_ids": token_ids(raw, "eos_token_id"),
        }

    # The weights' names and shapes

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def outer_weights(self, spec: ModelShape) -> dict[str, Weight]:
        """Returns the weights outside of layers, by role; a tied head is the embedding."""
        vocabulary = (spec.vocab_size, spec.hidden_size)
        embedding = Weight("model.embed_tokens.weight", vocabulary)
        return {
            "embedding": embedding,
            "final_norm": Weight("model.norm.weight", (spec.hidden_size,)),
            "head": embedding if spec.tied else Weight("lm_head.weight", vocabulary),
        }

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[str, Weight]:
        """Returns the weights of one of the model's layers, by role."""
        hidden = spec.hidden_size
        ffn = spec.ffn_size
        q_rows = spec.num_heads * spec.head_dim
        kv_rows = spec.num_kv_heads * spec.head_dim
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
        """Returns [outputs, inputs] of every layer that adapters can stand beside, by name.

        Experts and routers are left out.
        """
        layers: dict[str, tuple[int, ...]] = {}
        for number in range(spec.num_layers):
            prefix = self.layer_prefix(number)
            for role, weight in self.layer_weights(spec, number).items():
                if len(weight.shape) == 2 and not weight.experts and role != "router":
                    layers[prefix + weight.name.removesuffix(".weight")] = weight.shape
        return layers

    def fuses_experts(self, spec: ModelShape) -> bool:
        """Returns whether transformers keeps all experts of a layer in one tensor."""
        return spec.experts is not None

    # Work and memory

    def num_parameters(self, spec: ModelShape) -> int:
        """Returns the number of parameters, tied weights counted once."""
        total = sum(weight.size for weight in set(self.outer_weights(spec).values()))
        for layer in range(spec.num_layers):
            total += sum(weight.size for weight in self.layer_weights(spec, layer).values())
        return total

    def flops(self, spec: ModelShape) -> FlopsModel:
        """Returns the matrix multiplications of a training step."""
        return FlopsModel(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            ffn_size=spec.ffn_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
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

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    heads_divide_hidden = True


class Qwen2(DenseDecoder):
    """Qwen2 and Qwen2.5, and models distilled into them: biases on queries, keys and values."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    qkv_bias = True
    default_kv_heads = 32


class Qwen3(DenseDecoder):
    """Qwen3: norms of queries and keys per head, and a head size of its own."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = True
    default_kv_heads = 32
    default_head_dim = 128


class Qwen3Moe(DenseDecoder):
    """Qwen3 with experts and a router in place of the feed-forward layer, in all or some layers."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    qk_norm = True
    default_kv_heads = 4

    def unsupported(self, raw: dict[str, Any]) -> Iterator[str]:
        yield from super().unsupported(raw)
        for key in _SHARED:
            if raw.get(key):
                yield f"shared experts ({key})"

    def sizes(self, raw: dict[str, Any]) -> dict[str, Any]:
        sizes = super().sizes(raw)
        keys = [key for key in _NUM_EXPERTS if raw.get(key) is not None]
        num_experts = count(raw, keys[0]) if keys else 128
        per_token = count(raw, "num_experts_per_tok", 8)
        if per_token > num_experts:
            raise ValueError(f"num_experts_per_tok: {per_token} is more than {num_experts} experts")
        if num_experts > 65535:
            raise ValueError(f"{_NUM_EXPERTS[0]}: {num_experts} is more than 65535")
        step = count(raw, "decoder_sparse_step", 1)
        dense = raw.get("mlp_only_layers") or []
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
            count=num_experts,
            per_token=per_token,
            ffn_size=count(raw, "moe_intermediate_size", 768),
            normalises=flag(raw, "norm_topk_prob"),
            layers=layers,
        )
        return {**sizes, "experts": experts}

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[str, Weight]:
        weights = super().layer_weights(spec, layer)
        experts = spec.experts
        if experts is None or not spec.has_experts(layer):
            return weights
        inner = (experts.ffn_size, spec.hidden_size)
        outer = (spec.hidden_size, experts.ffn_size)
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
        """Counts the experts that a token passes through, without routers (a thousandth of it)."""
        assert spec.experts is not None
        active = len(spec.experts.layers) * spec.experts.per_token * spec.experts.ffn_size
        dense = spec.num_dense_layers * spec.ffn_size
        return replace(super().flops(spec), ffn_size=round((active + dense) / spec.num_layers))

    def layer_activations(self, spec: ModelShape) -> LayerActivations:
        """Counts a layer with experts over which tokens are spread evenly.

        For each of a token's experts a row goes in and comes out.
        """
        assert spec.experts is not None
        experts = spec.experts
        rows = experts.per_token * (3 * experts.ffn_size + 3 * spec.hidden_size)
        return replace(super().layer_activations(spec), feed_forward=rows)
