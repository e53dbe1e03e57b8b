"""The shape of a decoder-only transformer: the numbers and flags of its family's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from pa_npu.families.config_json import count, mapping, positive

Kind = Literal["default", "linear", "llama3"]
KINDS: tuple[Kind, ...] = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Inverse frequency i of head_dim / 2 is theta ** (-2i / head_dim), scaled by `kind`: linear
    divides all of them by factor. llama3 divides those with a wavelength beyond original_positions
    / low_freq_factor, keeps those below original_positions / high_freq_factor, and interpolates
    between.
    """

    theta: float = 10000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def parse_rope(raw: dict[str, Any]) -> Rope:
    """Returns the Rope of a config.json, in each of the forms that transformers reads.

        transformers 5    rope_parameters: {rope_type, rope_theta, ...}
        transformers 4    rope_theta beside rope_scaling: {rope_type or type, factor, ...} or null

    Precedence is that of transformers (RotaryEmbeddingConfigMixin): rope_scaling before
    rope_parameters, rope_theta inside the object before the one beside it; `type` is the old name
    of `rope_type`. Raises KeyError that names a missing key, ValueError that says what is malformed
    or not supported.
    """
    rope = mapping(raw, "rope_scaling") or mapping(raw, "rope_parameters")
    theta = positive(rope, "rope_theta", positive(raw, "rope_theta", 10000.0))
    for place in (rope, raw):
        if positive(place, "partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: rotating a part of each head is not supported")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"rope_parameters: a rotation of its own for {nested[0]!r:.40} layers is not supported"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope scaling {kind!r:.40} is not supported, only {', '.join(KINDS)} are")
    if kind == "default":
        return Rope(theta)
    factor = positive(rope, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low = positive(rope, "low_freq_factor")
    high = positive(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(
            f"rope scaling llama3: low_freq_factor {low:g} is not below high_freq_factor {high:g}"
        )
    # The value beside the object counts first, as in transformers for models that keep it there.
    name = "original_max_position_embeddings"
    original = count(raw, name, count(rope, name, count(raw, "max_position_embeddings")))
    return Rope(
        theta=theta,
        kind=cast(Kind, kind),
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original,
    )


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture: gated feed-forward layers, of which a router chooses some.

    count: experts of a layer.
    per_token: experts that a router chooses for a token.
    ffn_size: of an expert.
    normalises: whether the gate weights of the chosen experts are divided by their sum.
    layers: of the model that have experts; the others have a dense feed-forward layer.
    """

    count: int
    per_token: int
    ffn_size: int
    normalises: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder-only transformer. Sizes are counts, not bytes."""

    path: str
    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: Rope
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    trust_remote_code: bool = False
    experts: Experts | None = None

    @cached_property
    def num_dense_layers(self) -> int:
        """Layers with a dense feed-forward layer."""
        return self.num_layers - (len(self.experts.layers) if self.experts else 0)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


@dataclass(frozen=True)
class FlopsModel:
    """Matrix-multiplication work of a decoder, forward and backward.

    The decoder has a gated MLP and grouped-query attention. A multiply-add is two operations. The
    backward of a linear layer is twice its forward; that of attention is 2.5 times, because flash
    attention computes the scores again. Norms, rotary positions and activations are left out, as
    usual in MFU figures.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 0

    @cached_property
    def per_token(self) -> float:
        """Work of the linear layers of all transformer layers, per packed token."""
        qkv_and_proj = (
            self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        )
        mlp = 3 * self.hidden_size * self.ffn_size
        return 3.0 * 2.0 * self.num_layers * (qkv_and_proj + mlp)

    @cached_property
    def per_pair(self) -> float:
        """Work of the attention of all layers, per visible (query, key) pair."""
        return (1.0 + 2.5) * 4.0 * self.num_layers * self.num_heads * self.head_dim

    @cached_property
    def per_prediction(self) -> float:
        """Work of the LM head, per token whose log-prob is computed."""
        return 3.0 * 2.0 * self.hidden_size * self.vocab_size

    def group(self, prompt: int, responses: Sequence[int], *, shared: bool) -> float:
        """Returns the work of one step over a prompt with responses of these lengths."""
        num_written = sum(responses)
        num_prompts = 1 if shared else len(responses)
        tokens = num_written + num_prompts * prompt
        pairs = sum([length * (length + 1) for length in responses]) // 2
        pairs += num_written * prompt
        pairs += num_prompts * (prompt * (prompt + 1) // 2)
        return tokens * self.per_token + pairs * self.per_pair + num_written * self.per_prediction
