"""The shape of a decoder-only transformer: numbers and flags that its family's file and all that counts with them read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pa_npu.families.rope import Rope


@dataclass(frozen=True)
class Experts:
    """Experts of a mixture: gated feed-forward layers of `ffn_size`, of which a router gives each token `per_token`.

    normalises: whether the chosen ones' gate weights are divided by their sum. layers: the model's layers that have them; the
    others have a dense feed-forward layer.
    """

    count: int
    per_token: int
    ffn_size: int
    normalises: bool
    layers: tuple[int, ...]

    def wire_sizes(self) -> dict[str, int]:
        """ModelSpec.wire_sizes of them."""
        return {"num_experts_per_tok": self.per_token, "moe_intermediate_size": self.ffn_size}


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
