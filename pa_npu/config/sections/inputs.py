"""Keys of what a run is given: its directory and seed, the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pa_npu.config.sections.base import Section


class RunConfig(Section):
    dir: str = Field("runs/default", min_length=1, description="Run directory; everything the run writes goes there.")
    seed: int = Field(1, ge=0, lt=2**31, description="Seed of data order, sampling and initialisation.")
    device: Literal["auto", "npu", "cuda", "cpu"] = Field(
        "auto", description="Device kind of trainers and engines; auto takes npu, then cuda, then cpu."
    )
    restarts: int = Field(
        3,
        ge=0,
        description="How often coordinator and trainers are started again, from the newest checkpoint, when one of them ends; "
        "counted within an hour, and as long as no newer checkpoint has been written. As often within an hour each engine that "
        "ends or hangs; beyond that the run goes on without it where others serve.",
    )
    startup_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Deadline for engines and trainers to become ready, and of a cluster to give the run its nodes, at the start "
        "and when one was lost.",
    )
    deterministic: bool = Field(True, description="Use deterministic kernels where the platform has a choice.")


class ModelConfig(Section):
    path: str = Field(..., min_length=1, description="HF model directory (config.json, safetensors, tokenizer).")
    adapter: str | None = Field(
        None,
        min_length=1,
        description="Directory of peft with adapters (LoRA) of this model to go on from, which says their rank, alpha and targets.",
    )
    dtype: Literal["fp32", "bf16"] = Field(
        "bf16", description="Type of weights and activations; master weights are fp32."
    )
    trust_remote_code: bool = Field(
        False,
        description="Run the code that a model directory brings along (auto_map), with trainer.backend=fsdp; read it before.",
    )
    head_chunk_tokens: int = Field(
        2048, ge=1, description="Rows per chunk of the LM head's log-prob, so that full logits never exist at once."
    )
