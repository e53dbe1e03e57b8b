"""Rules for adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree


def broken_lora(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    if not c.has_adapters:
        return
    key, value = ("model.adapter", c.model.adapter) if c.model.adapter else ("lora.rank", c.lora.rank)
    if c.trainer.backend != "fsdp":
        yield f"{key}: {value} with trainer.backend={c.trainer.backend}, which trains no adapters; set trainer.backend=fsdp"
    if c.model.adapter and c.lora.rank:
        yield (
            f"lora.rank: {c.lora.rank} beside model.adapter, which has rank, alpha and targets of its own; remove the keys of "
            f"lora, or model.adapter to begin anew"
        )
    if c.frozen_dtype != c.model.dtype:
        yield (
            f"model.frozen_dtype: {c.model.frozen_dtype} with adapters, whose old policy and reference share the base weights with "
            f"the policy; remove the key"
        )
