"""HF export of a checkpoint on demand: one process on the host, however many ranks have written it."""

from __future__ import annotations

from pathlib import Path

import torch

from pa_npu.backends.exported import checked_run
from pa_npu.backends.fsdp.checkpoint import MODEL, load_state
from pa_npu.backends.fsdp.lora import ModelWithAdapters, adapted
from pa_npu.backends.fsdp.lora_export import write_adapters
from pa_npu.backends.fsdp.lora_merge import Merged
from pa_npu.backends.fsdp.model import DTYPES, ScoredModel, load_model
from pa_npu.backends.fsdp.weights import ShardedWeights, Weights
from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.mesh import LONE_RANK


def export_checkpoint(checkpoint: Path, output: Path, model: str | None = None, merged: bool = False) -> None:
    """Write the policy of `checkpoint` as the HF directory `output`, in the type it was computed in; see BackendModule.

    Needs the model's size in fp32 in host memory. Raises as checked_run does; ExportError when it cannot be written.
    """
    config, spec = checked_run(checkpoint, output, model)
    place = LONE_RANK.place(0)
    if config.has_adapters:
        adapters = adapted(ModelWithAdapters(config, spec), config)["policy"]
        adapters.check_base(read_meta(checkpoint).base, checkpoint, None)
        weights = adapters.named_weights()
        load_state({MODEL + name: weight.detach() for name, weight in weights.items()}, checkpoint, alone=True)
        if not merged and config.checkpoint.export_hf != "merged":
            write_adapters(adapters, config, spec, output, place, None)
            return
        policy: Weights = Merged(adapters)
    else:
        policy = ScoredModel(
            load_model(config.model.path, torch.float32, trust_remote_code=spec.trust_remote_code),
            config.attention.implementation,
        ).requires_grad_(False)
        load_state({MODEL + name: weight for name, weight in policy.named_weights().items()}, checkpoint, alone=True)
    source = ShardedWeights(policy, spec, place, BUCKET_BYTES, DTYPES[config.model.dtype], None)
    write_hf(source, spec, output, place, torch.device("cpu"))
