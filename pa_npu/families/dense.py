"""The base of Llama-like decoder families: from config.json to sizes, names and shapes of the weights, work and memory.

A family is a subclass of DenseDecoder in a file of its own that states what differs, and an entry in `registry`:

    class Qwen3(DenseDecoder):
        model_type, architecture = "qwen3", "Qwen3ForCausalLM"
        qk_norm = True                       norms of queries and keys per head
        default_head_dim = 128               what transformers takes where config.json is silent

Everything else reads the family through a ModelSpec: a training backend builds layers from the spec's flags and finds the weights
by role (`layer_weights`), the planner counts with `layer_activations`, dispatch with `flops`.

A family whose layers differ more needs a flag in ModelSpec and the backends' support for it, once for all families that have it:
    Gemma-like      norms that scale by 1 + w (added on loading, taken off on publishing), embeddings scaled by
                    sqrt(hidden_size), GELU in the gated layer, two more norms per layer (roles after_attention_norm and
                    after_feed_forward_norm), capped logits
    GLM-like        rotation of a part of each head, in pairs that lie side by side; gate and up as one tensor (role gate_up)

A mixture of experts is `qwen3_moe`'s: its spec has `experts`, and its layers with experts other roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pa_npu.families.config_json import count, flag, mapping, positive, token_ids
from pa_npu.families.shape import FlopsModel, ModelShape, parse_rope

OuterRole = Literal["embedding", "final_norm", "head"]
LayerRole = Literal[
    "attention_norm",
    "q",
    "k",
    "v",
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm",
    "k_norm",
    "o",
    "feed_forward_norm",
    "gate",
    "up",
    "down",
    "router",
    "expert_gate",
    "expert_up",
    "expert_down",
]
# No model has more layers; a config.json that says so would have the checks count tensors for ever.
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class Weight:
    """One tensor of an HF checkpoint: its name (of a layer's, without the layer's prefix) and full shape.

    experts: where it is above 0, as many tensors of this shape, with the expert's number in the place of {expert} in the name.
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

    residual: inputs and outputs of the norms. attention: queries, keys and values before the rotation and attention's output.
    rotated: queries and keys after the rotation. feed_forward: both halves of the gated layer and their product.
    """

    residual: int
    attention: int
    rotated: int
    feed_forward: int


class DenseDecoder:
    """A family. Class attributes are what it states; methods are overridden where a family computes something else."""

    model_type: str
    architecture: str
    qkv_bias = False
    qk_norm = False
    default_kv_heads: int | None = None
    """Used where config.json does not say; None means as many as heads. An explicit null always means that."""
    default_head_dim: int | None = None
    """Used where config.json does not say; None means hidden_size / heads."""
    heads_divide_hidden = False
    """Whether transformers, and with it the engines, refuses other numbers of heads even where head_dim is given."""

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
        kv_default = num_heads if "num_key_value_heads" in raw else self.default_kv_heads or num_heads
        num_kv_heads = count(raw, "num_key_value_heads", kv_default)
        if hidden_size % num_heads and (self.heads_divide_hidden or not (raw.get("head_dim") or self.default_head_dim)):
            raise ValueError(f"num_attention_heads: {num_heads} does not divide hidden_size = {hidden_size}")
        head_dim = count(raw, "head_dim", self.default_head_dim or hidden_size // num_heads)
        if count(raw, "num_hidden_layers") > _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers: {raw['num_hidden_layers']} is more than {_MOST_LAYERS}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads = {num_heads}")
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

    def outer_weights(self, spec: ModelShape) -> dict[OuterRole, Weight]:
        """Name the weights outside of layers; a tied head is the embedding."""
        vocabulary = (spec.vocab_size, spec.hidden_size)
        embedding = Weight("model.embed_tokens.weight", vocabulary)
        return {
            "embedding": embedding,
            "final_norm": Weight("model.norm.weight", (spec.hidden_size,)),
            "head": embedding if spec.tied else Weight("lm_head.weight", vocabulary),
        }

    def layer_weights(self, spec: ModelShape, layer: int) -> dict[LayerRole, Weight]:
        """Name the weights of one of the model's layers, by role."""
        hidden, ffn = spec.hidden_size, spec.ffn_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        weights: dict[LayerRole, Weight] = {
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
        """Name and [outputs, inputs] of every layer that adapters can stand beside. No experts or routers."""
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
        layers = sum(weight.size for n in range(spec.num_layers) for weight in self.layer_weights(spec, n).values())
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
            residual=4 * spec.hidden_size, attention=2 * heads, rotated=heads, feed_forward=3 * spec.ffn_size
        )
