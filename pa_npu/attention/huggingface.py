"""Shared-prompt attention under a plain transformers model.

It works for any decoder that takes an attention function by name:

    layout = PrefixLayout.from_groups([(prompt_length, response_lengths)])
    use_shared_prompt_attention(model)
    logits = model(tokens[None], position_ids=layout.position_ids()[None], layout=layout,
    use_cache=False).logits[0]

tokens are packed, [layout.total]: each prompt once, then its responses.
`pa_npu.attention.trie.pack` makes tokens and layout from whole sequences, and finds what they
share. `layout.predictor_rows()` are the rows whose logits predict the responses' tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pa_npu.attention.context import RankRows
from pa_npu.attention.forms import shared_prompt_attention
from pa_npu.attention.layout import PrefixLayout
from pa_npu.attention.stems import PathRows

NAME = "pa_npu_shared_prompt"


def use_shared_prompt_attention(model: Any, implementation: str = "auto") -> str:
    """Lets all layers of a transformers model attend by the `layout` that its forward is given.

    implementation: `impl` of shared_prompt_attention. Returns the name under which transformers
    knows it.
    """
    from transformers import AttentionInterface

    name = NAME if implementation == "auto" else f"{NAME}_{implementation}"
    AttentionInterface.register(name, partial(_attend, implementation))
    model.set_attn_implementation(name)
    return name


def _attend(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    layout: PrefixLayout | RankRows | PathRows | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as transformers calls its attention functions.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] -> [1, tokens,
    heads, head_dim].
    """
    if layout is None:
        raise ValueError(
            "layout: shared-prompt attention needs the PrefixLayout of these tokens; give it to "
            "the model's forward"
        )
    if query.shape[0] != 1 or dropout:
        raise ValueError(
            f"a batch of {query.shape[0]} rows with dropout {dropout}: give one packed row, and no "
            "dropout"
        )
    unsupported = ""
    if sliding_window is not None and layout.longest > sliding_window:
        unsupported = "windows shorter than these sequences"
    elif softcap:
        unsupported = "capped scores"
    elif s_aux is not None:
        unsupported = "attention sinks"
    if unsupported:
        raise ValueError(
            f"layout: this model's attention has {unsupported}, which shared-prompt attention has "
            "not"
        )
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    layer: int | None = getattr(module, "layer_idx", None)
    output = shared_prompt_attention(
        q, k, v, layout, scale=scaling, impl=implementation, layer=layer
    )
    return output[None], None
