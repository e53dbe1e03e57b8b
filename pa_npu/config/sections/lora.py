"""Keys of adapters: a small trained product beside each chosen weight, which itself stays as it is (LoRA)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pa_npu.config.sections.base import Section


class LoraConfig(Section):
    rank: int = Field(
        0,
        ge=0,
        le=4096,
        description="Rank of the adapters that are trained in place of the weights; 0 trains the weights.",
    )
    alpha: float = Field(32.0, gt=0, description="The adapters' product is added with the factor alpha / rank.")
    rank_stabilized: bool = Field(False, description="Add it with the factor alpha / sqrt(rank) instead.")
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="Layers that get an adapter, by the last parts of their names, such as [q_proj, v_proj]; all-linear: all "
        "projections of attention and MLP, whatever a model calls them.",
    )
    export_merged: bool = Field(
        False, description="Export the whole model with the adapters merged into it, in place of a directory of peft."
    )
