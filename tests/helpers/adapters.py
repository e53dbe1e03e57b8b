"""Adapters (LoRA) made and merged by peft and by plain tensors, to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu.backends.registry import backend_module
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.publisher import WeightSource
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.manifest import Assembler
from pa_npu.weight_transfer.transport import Deadline


def plain(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")


def make_adapter(model: Path, directory: Path, /, seed: int = 3, **options: Any) -> Path:
    """Let peft write an adapter whose A and B are random, and return its directory."""
    torch.manual_seed(seed)
    inputs = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        **options,
    }
    policy = get_peft_model(plain(model), LoraConfig(**inputs))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    policy.save_pretrained(directory)
    return directory


def peft_model(model: Path, directory: Path) -> Any:
    """peft's model to train, with the weights of a directory; peft 0.19's own loading wants no
    process group to be there.
    """
    policy = get_peft_model(plain(model), PeftConfig.from_pretrained(directory))
    stored = load_file(directory / "adapter_model.safetensors")
    own = {
        name.replace(".default.", "."): weight
        for name, weight in policy.named_parameters()
        if ".lora_" in name
    }
    assert own.keys() == stored.keys()
    for name, weight in own.items():
        weight.data.copy_(stored[name])
        weight.requires_grad_(True)
    return policy


def export_merged(model: Path, adapter: Path, directory: Path) -> Path:
    """Let the fsdp backend merge an adapter of `model` into an HF directory."""
    from tests.helpers.megatron import PLATFORM, model_config, single_process

    sections = {
        "model": {"adapter": str(adapter)},
        "checkpoint": {"export_hf": "merged"},
        "trainer": {"backend": "fsdp"},
    }
    config = model_config(model, **sections)
    with single_process(config):
        backend = backend_module("fsdp").create(
            config,
            ModelSpec.from_config(config),
            PLATFORM,
            dist.HashStore(),
            0,
            0,
            Timeline(None, ""),
        )
        backend.export(directory)
    return directory


def received(source: WeightSource) -> dict[str, torch.Tensor]:
    """Returns what engines get of a source."""
    assembler, actual = Assembler(source.manifest), {}
    for bucket, buffer in zip(source.manifest.buckets, source.buckets(Deadline(60.0)), strict=True):
        assert buffer is not None
        actual |= {
            name: tensor.clone() for name, tensor in assembler.completed(bucket, buffer.clone())
        }
    return actual


def merged_by_hand(
    state: Mapping[str, torch.Tensor], factor: float, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A peft model's state as the plain model's: W + factor B A in fp64, rounded once to `dtype`."""
    actual = {}
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        short, module = (
            name.removeprefix("base_model.model."),
            name.removesuffix(".base_layer.weight"),
        )
        down, up = (state.get(f"{module}.lora_{part}.default.weight") for part in "AB")
        wide = weight.double()
        if down is not None and up is not None:
            wide = wide + factor * (up.double() @ down.double())
        actual[short.replace(".base_layer.", ".")] = wide.to(dtype)
    return actual
