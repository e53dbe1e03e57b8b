"""Rotary position embedding as a config.json describes it, in each of the forms that transformers reads.

    transformers 5    rope_parameters: {rope_type, rope_theta, ...}
    transformers 4    rope_theta beside rope_scaling: {rope_type or type, factor, ...} or null

As in transformers (RotaryEmbeddingConfigMixin): where both objects are given, rope_scaling counts; rope_theta inside the object
counts before the one beside it; `type` is the old name of `rope_type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from pa_npu.families.config_json import count, mapping, positive

Kind = Literal["default", "linear", "llama3"]
KINDS: tuple[Kind, ...] = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """Inverse frequency i of head_dim / 2 is theta ** (-2i / head_dim), scaled as `kind` says.

    linear divides all by factor. llama3 divides those whose wavelength exceeds original_positions / low_freq_factor, keeps those
    below original_positions / high_freq_factor, and interpolates between.
    """

    theta: float = 10000.0
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def parse_rope(raw: dict[str, Any]) -> Rope:
    """The Rope of a config.json. KeyError names a missing key; ValueError says what is malformed or not supported."""
    rope = mapping(raw, "rope_scaling") or mapping(raw, "rope_parameters")
    theta = positive(rope, "rope_theta", positive(raw, "rope_theta", 10000.0))
    for place in (rope, raw):
        if positive(place, "partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: rotating a part of each head is not supported")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rope_parameters: a rotation of its own for {nested[0]!r:.40} layers is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope scaling {kind!r:.40} is not supported, only {', '.join(KINDS)} are")
    if kind == "default":
        return Rope(theta)
    factor = positive(rope, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(f"rope scaling llama3: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    # the one beside the object counts first, as transformers has it for models that keep it there
    name = "original_max_position_embeddings"
    original = count(raw, name, count(rope, name, count(raw, "max_position_embeddings")))
    return Rope(theta, cast(Kind, kind), factor, low, high, original)
