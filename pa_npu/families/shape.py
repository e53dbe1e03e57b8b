"""The shape of a decoder-only transformer: numbers and flags that its family's file and all that counts with them read."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.families.rope import Rope


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
