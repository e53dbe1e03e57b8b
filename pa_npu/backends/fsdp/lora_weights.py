"""Weights of a model with adapters as they leave it: with a set of them merged in, row by row, or the adapters alone.

No merged copy of the model exists anywhere. A row of a merged weight is W + factor * B A, added in
fp32 and rounded once, to the type that is sent. W and B are cut into the same rows over the ranks,
so that a rank needs A alone of the others. An engine that gets A and B alone does the same
(base_of).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pa_npu.backends.fsdp.lora import PREFIX, Adapted
from pa_npu.backends.fsdp.optimizer import local
from pa_npu.backends.fsdp.weights import Rows, ShardedWeights, Weights, rows_of
from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.errors import DataError, ExportError
from pa_npu.families.model_directory import read_header, weight_files
from pa_npu.families.peft_directory import WEIGHTS_FILE, AdapterShape
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import WireWeight
from pa_npu.vision.family import read_vision
from pa_npu.weight_transfer.adapters import Base, StoredWeight, merge, stored_digest
from pa_npu.weight_transfer.contents import Position

# Of a merged weight, made at once where its contents are summed up.
_BLOCK_ROWS = 1024
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Merged(Weights):
    """Weights to send of a model with its adapters; those of an Adapted without any are the base's."""

    def __init__(self, adapted: Adapted) -> None:
        self._adapted = adapted

    def wire_weights(self) -> list[tuple[str, WireWeight, torch.Tensor]]:
        """See Weights."""
        return self._adapted.model.wire_weights()

    def rows(self, weight: WireWeight, whole: torch.Tensor, alone: bool) -> Rows:
        """See Weights."""
        layer, adapters = (
            self._adapted.layers.get(weight.source.removesuffix(".weight")),
            self._adapted.adapters,
        )
        rows = rows_of(whole, weight.start, alone)
        if layer is None or adapters is None:
            return rows
        down, up = layer.lora_A[adapters].weight, layer.lora_B[adapters].weight
        return _MergedRows(rows.shard, rows.start, down, up, layer.scaling[adapters])


def base_of(adapted: Adapted, directory: str, dtype: torch.dtype) -> Base:
    """Returns the model directory's weights, which engines merge adapters into that are sent alone.
    dtype: as ShardedWeights'.

    Raises DataError where the directory has other tensors than would be sent merged.
    """
    files, stored = weight_files(directory), []
    headers = {file: read_header(Path(directory) / file) for file in set(files.values())}
    for name, weight, whole in adapted.model.wire_weights():
        stored_tensor = headers.get(files.get(name, ""), {}).get(name)
        if (
            stored_tensor is None
            or stored_tensor.shape != weight.shape
            or stored_tensor.dtype not in _TORCH_NAMES
        ):
            raise DataError(
                f"publish.lora=adapter: {directory} does not have {name} as it would be sent, "
                f"shape {list(weight.shape)}; set publish.lora=merged"
            )
        layer = weight.source.removesuffix(".weight")
        layer, row = (
            (PREFIX + layer, weight.start // weight.shape[1])
            if layer in adapted.layers
            else ("", 0)
        )
        place = (stored_tensor.begin, stored_tensor.begin + stored_tensor.num_bytes, row)
        loaded = str(dtype if isinstance(whole, torch.nn.Parameter) else whole.dtype).removeprefix(
            "torch."
        )
        stored.append(
            StoredWeight(
                name,
                files[name],
                *place,
                _TORCH_NAMES[stored_tensor.dtype],
                loaded,
                weight.shape,
                layer,
            )
        )
    (factor,) = {layer.scaling[adapted.adapters] for layer in adapted.layers.values()}
    digest = stored_digest(directory, tuple(stored), next(adapted.parameters()).device)
    return Base(factor, digest, tuple(stored))


@dataclass(frozen=True)
class _MergedRows(Rows):
    """down: A, fp32 [rank, inputs]; up: B, fp32 [outputs, rank]; both sharded. factor: of their
    product.
    """

    down: torch.Tensor
    up: torch.Tensor
    factor: float
    _whole: list[torch.Tensor] = field(default_factory=list)  # A, once it is gathered

    def gather(self, group: dist.ProcessGroup | None, memory: torch.device) -> None:
        if not self._whole:
            rows = rows_of(self.down, 0, True)
            whole = torch.zeros(self.down.numel(), dtype=torch.float32, device=memory)
            whole[rows.start : rows.start + rows.shard.numel()].copy_(rows.shard)
            if group is not None:
                dist.all_reduce(whole, group=group)  # a sum with zeros
            self._whole.append(whole.to(rows.shard.device).view(self.down.shape))

    def pieces(self, size: int) -> Iterator[tuple[torch.Tensor, Position]]:
        """See Part.

        Rows are merged block by block, so that no merged copy of all of them is anywhere.
        """
        block = _BLOCK_ROWS * self.down.shape[1]
        first, end = max(0, -self.start), min(self.shard.numel(), size - self.start)
        while first < end:
            last = min(end, first + block)
            yield self.read(first, last), Position(self.start + first)
            first = last

    @torch.no_grad()
    def read(self, first: int, last: int) -> torch.Tensor:
        (down,), inputs = self._whole, self.down.shape[1]
        rows = slice(first // inputs, last // inputs)
        up = local(self.up).detach().view(-1, self.up.shape[1])[rows]
        merged = self.shard[first:last].clone().view(-1, inputs)
        merge(merged, up, down, self.factor, (self.start + first) // inputs)
        return merged.view(-1)


def write_adapters(
    policy: Adapted,
    config: Config,
    spec: ModelSpec,
    directory: Path,
    place: Place,
    group: dist.ProcessGroup | None,
    template: str | None = None,
) -> None:
    """Write the adapters in fp32, with the tokenizer's files, as a directory of peft, which peft,
    transformers and vLLM load.

    Collective over all trainer ranks; raises ExportError on all. template: as write_hf.
    """
    source = (
        ShardedWeights(policy, spec, place, BUCKET_BYTES, torch.float32, group)
        if place.sends
        else None
    )
    device = next(policy.parameters()).device
    # one file, as peft has it: the adapters are small
    write_hf(
        source,
        spec,
        directory,
        place,
        device,
        config=config,
        template=template,
        max_file_bytes=2**62,
        complete=partial(_complete, policy, config),
    )


def _complete(policy: Adapted, config: Config, directory: Path) -> None:
    from peft import LoraConfig

    files = sorted(directory.glob("stage-*.safetensors"))
    if len(files) != 1:
        raise ExportError(f"{len(files)} files of adapters; only rank 0 has any to write")
    files[0].rename(directory / WEIGHTS_FILE)
    shape = AdapterShape.from_config(config)
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    is_pattern = isinstance(shape.targets, str) and shape.targets != "all-linear"
    kinds = sorted({name.rpartition(".")[2] for name in policy.layers})
    targets: str | list[str] = str(shape.targets) if is_pattern else kinds
    if not is_pattern and read_vision(config.model.path) and config.model.vision == "frozen":
        # a tower's layers may have the same names
        targets = rf".*language_model.*\.({'|'.join(kinds)})"
    LoraConfig(
        r=shape.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        use_rslora=shape.rank_stabilized,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
        target_modules=targets,
        base_model_name_or_path=str(Path(config.model.path).resolve()),
    ).save_pretrained(str(directory))
