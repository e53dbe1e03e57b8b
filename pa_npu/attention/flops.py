"""FlopsModel: floating-point operations of one transformer training step as a function of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pa_npu.attention.layout import PrefixLayout


@dataclass(frozen=True)
class FlopsModel:
    """Matrix-multiplication work of a decoder with gated MLP and grouped-query attention; forward and backward.

    A multiply-add is two operations. Backward of a linear layer is twice its forward; of attention 2.5 times, because
    flash attention computes the scores again. Norms, rotary and activations are left out, as usual in MFU figures.
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
        """Linear layers of all transformer layers, per packed token."""
        qkv_and_proj = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.ffn_size
        return 3.0 * 2.0 * self.num_layers * (qkv_and_proj + mlp)

    @cached_property
    def per_pair(self) -> float:
        """Attention of all layers, per (query, key) pair that is visible."""
        return (1.0 + 2.5) * 4.0 * self.num_layers * self.num_heads * self.head_dim

    @cached_property
    def per_prediction(self) -> float:
        """LM head, per token whose log-prob is computed."""
        return 3.0 * 2.0 * self.hidden_size * self.vocab_size

    def step(self, layout: PrefixLayout, predictions: int) -> float:
        """Work of one step over the layout with that many predicted tokens."""
        return layout.flops(self.per_token, self.per_pair) + predictions * self.per_prediction

    def group(self, prompt: int, responses: Sequence[int], *, shared: bool) -> float:
        """`step` over a prompt with these responses, all of them predicted, in closed form: no layout is made for it."""
        written = sum(responses)
        own_pairs = sum(length * (length + 1) for length in responses) // 2
        prompts = 1 if shared else len(responses)
        tokens = written + prompts * prompt
        pairs = own_pairs + written * prompt + prompts * (prompt * (prompt + 1) // 2)
        return tokens * self.per_token + pairs * self.per_pair + written * self.per_prediction
