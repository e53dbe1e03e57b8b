"""Adapters as a directory of peft, which peft, transformers and vLLM load beside the model that it names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pa_npu.backends.fsdp.lora import Adapted
from pa_npu.backends.fsdp.weights import ShardedWeights
from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.errors import ExportError
from pa_npu.families.peft_directory import WEIGHTS_FILE, AdapterShape
from pa_npu.families.spec import ModelSpec


def write_adapters(
    policy: Adapted, config: Config, spec: ModelSpec, directory: Path, place: Place, group: dist.ProcessGroup | None
) -> None:
    """Write the adapters in fp32, with the tokenizer's files. Collective over all trainer ranks; raises ExportError on all."""
    source = ShardedWeights(policy, spec, place, BUCKET_BYTES, torch.float32, group) if place.sends else None
    device = next(policy.parameters()).device
    # one file, as peft has it: the adapters are small
    write_hf(source, spec, directory, place, device, max_file_bytes=2**62, complete=partial(_complete, policy, config))


def _complete(policy: Adapted, config: Config, directory: Path) -> None:
    from peft import LoraConfig

    files = sorted(directory.glob("stage-*.safetensors"))
    if len(files) != 1:
        raise ExportError(f"{len(files)} files of adapters; only rank 0 has any to write")
    files[0].rename(directory / WEIGHTS_FILE)
    shape = AdapterShape.of(config)
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    is_pattern = isinstance(shape.targets, str) and shape.targets != "all-linear"
    LoraConfig(
        r=shape.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        use_rslora=shape.rank_stabilized,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
        target_modules=str(shape.targets)
        if is_pattern
        else sorted({name.rpartition(".")[2] for name in policy.layers}),
        base_model_name_or_path=str(Path(config.model.path).resolve()),
    ).save_pretrained(str(directory))
