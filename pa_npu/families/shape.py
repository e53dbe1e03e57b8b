"""The shape of a decoder-only transformer: the numbers and flags of its family's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from pa_npu.families.config_json import count, mapping, positive

Kind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[Kind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Inverse frequency i of head_dim / 2 is theta ** (-2i / head_dim), scaled by `kind`: linear
    divides all of them by factor. llama3 divides those with a wavelength beyond original_positions
    / low_freq_factor, keeps those below original_positions / high_freq_factor, and interpolates
    between. yarn divides those that turn less than beta_slow times in original_positions, keeps
    those that turn more than beta_fast times, and interpolates between by their number
    (arXiv 2309.00071, section 3.2).

    truncate: of yarn, whether the numbers between which it interpolates are made whole.
    attention_factor: of cosines and sines.
    """

    theta: float = 10000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


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
    if kind == "yarn":
        return _yarn(raw, rope, theta, factor)
    low = positive(rope, "low_freq_factor")
    high = positive(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(
            f"rope scaling llama3: low_freq_factor {low:g} is not below high_freq_factor {high:g}"
        )
    return Rope(
        theta=theta,
        kind=cast(Kind, kind),
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=_original_positions(raw, rope),
    )


def _original_positions(raw: dict[str, Any], rope: dict[str, Any]) -> int:
    """Returns the positions that the model was trained with before they were scaled."""
    # The value beside the object counts first, as in transformers for models that keep it there.
    name = "original_max_position_embeddings"
    return count(raw, name, count(rope, name, count(raw, "max_position_embeddings")))


def _yarn(raw: dict[str, Any], rope: dict[str, Any], theta: float, factor: float) -> Rope:
    """Reads YaRN's settings with the defaults that transformers and vLLM give them."""
    fast = positive(rope, "beta_fast", 32.0)
    slow = positive(rope, "beta_slow", 1.0)
    if not slow < fast:
        raise ValueError(f"rope scaling yarn: beta_slow {slow:g} is not below beta_fast {fast:g}")
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"rope scaling yarn: truncate: {truncate!r:.40} is not true or false")
    attention_factor = _attention_scale(factor, 1.0)
    if rope.get("attention_factor") is not None:
        attention_factor = positive(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = [positive(rope, name) for name in ("mscale", "mscale_all_dim")]
        attention_factor = _attention_scale(factor, scales[0]) / _attention_scale(factor, scales[1])
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=_original_positions(raw, rope),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=attention_factor,
    )


def _attention_scale(factor: float, scale: float) -> float:
    """Returns the factor of cosines and sines for positions `factor` times as far (arXiv 2309.00071,
    equation 22).
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


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
