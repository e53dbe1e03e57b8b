"""The map between HF and Megatron parameters, and loading a stage from an HF directory with it.

A stage's parameters carry Megatron's standard names
(`decoder.layers.0.self_attention.linear_qkv.weight`, layers counted from the stage's first). Every
HF tensor is one `HfTensor`: it lies in one Megatron parameter, whole or as a part of it, and tensor
parallelism (TP) keeps it complete on each rank or cuts it along one dimension, in rank order:

    HF tensor                       Megatron parameter (one TP rank)              cut along
    q_proj, k_proj, v_proj          linear_qkv  [groups, q per group | 1 | 1, D]  0 (whole groups)
    gate_proj, up_proj              linear_fc1  cat(gate of rank, up of rank)     0
    o_proj, down_proj               linear_proj, linear_fc2                       1
    embed_tokens, lm_head           word_embeddings, output_layer                 0 (vocabulary)
    experts' gate_proj, up_proj     experts.gate_up  [local experts, gate | up]   not cut: whole experts, EP ranks in order
    experts' down_proj              experts.down     [local experts, ...]         the same
    norms                           *layernorm                                    not cut

Names and shapes are the family's (`families.decoders`), which states them by role; this file knows
where Megatron keeps each role.

So a rank can produce its shard of every HF tensor alone, and the shards of all ranks, put side by
side, are the tensor.

Vocabulary padding: embedding and output rows are padded to a multiple of TP
(`HfTensor.local_size`), so that every rank holds equally many; the padding rows are the last ones,
are loaded as zeros, and are never published or exported. A head must leave their logits out of the
softmax.

Tied embeddings: HF has no lm_head; with pipeline parallelism the last stage's `output_layer.weight`
is a copy of the embedding, which is loaded from embed_tokens and is neither published nor exported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from pa_npu.config.mesh import Place
from pa_npu.errors import DataError
from pa_npu.families.model_directory import located_weights
from pa_npu.families.spec import ModelSpec

Part = Literal["whole", "q", "k", "v", "gate", "up"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"

# Wrappers (DDP, Float16Module, TriModel) put prefixes before the standard name.
_STANDARD_NAME = re.compile(r"(?:^|\.)((?:embedding|decoder|output_layer)\..+)$")
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class HfTensor:
    """One HF tensor: its full shape, how TP cuts it, and the Megatron parameter of its stage that
    holds it.

    expert: whose it is, where one rank of an expert-parallel group holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None
    parameter: str
    part: Part = "whole"
    expert: int | None = None

    def local_size(self, tp_size: int) -> int:
        """Length of every rank's shard along `shard_dim`, vocabulary padding included."""
        assert self.shard_dim is not None
        return -(-self.shape[self.shard_dim] // tp_size)

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's shard, vocabulary padding included."""
        if self.shard_dim is None:
            return self.shape
        return (
            *self.shape[: self.shard_dim],
            self.local_size(tp_size),
            *self.shape[self.shard_dim + 1 :],
        )

    def local_range(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """Returns the rank's [start, stop) along `shard_dim` of the HF tensor, padding left out;
        empty when all is padding.
        """
        assert self.shard_dim is not None
        size, end = self.local_size(tp_size), self.shape[self.shard_dim]
        return min(tp_rank * size, end), min((tp_rank + 1) * size, end)


# Role of an HF tensor of a layer -> (Megatron parameter within the layer, TP dimension, part)
_LAYER_ROLES: dict[str, tuple[str, int | None, Part]] = {
    "attention_norm": ("input_layernorm.weight", None, "whole"),
    "q": ("self_attention.linear_qkv.weight", 0, "q"),
    "k": ("self_attention.linear_qkv.weight", 0, "k"),
    "v": ("self_attention.linear_qkv.weight", 0, "v"),
    "q_bias": ("self_attention.linear_qkv.bias", 0, "q"),
    "k_bias": ("self_attention.linear_qkv.bias", 0, "k"),
    "v_bias": ("self_attention.linear_qkv.bias", 0, "v"),
    "q_norm": ("self_attention.q_layernorm.weight", None, "whole"),
    "k_norm": ("self_attention.k_layernorm.weight", None, "whole"),
    "o": ("self_attention.linear_proj.weight", 1, "whole"),
    "feed_forward_norm": ("pre_mlp_layernorm.weight", None, "whole"),
    "gate": ("mlp.linear_fc1.weight", 0, "gate"),
    "up": ("mlp.linear_fc1.weight", 0, "up"),
    "down": ("mlp.linear_fc2.weight", 1, "whole"),
    "router": ("mlp.router.weight", None, "whole"),
    "expert_gate": ("mlp.experts.gate_up", None, "gate"),
    "expert_up": ("mlp.experts.gate_up", None, "up"),
    "expert_down": ("mlp.experts.down", None, "whole"),
}
_OUTER_ROLES: dict[str, tuple[str, int | None]] = {
    EMBEDDING: ("embedding", 0),
    OUTPUT: ("head", 0),
    FINAL_NORM: ("final_norm", None),
}


def sources(parameter: str, spec: ModelSpec, layer_offset: int) -> tuple[HfTensor, ...]:
    """Returns the HF tensors that make up a Megatron parameter of a stage whose layer 0 is the
    model's layer `layer_offset`.
    """
    family = spec.definition
    if parameter in _OUTER_ROLES:
        role, shard_dim = _OUTER_ROLES[parameter]
        weight = family.outer_weights(spec)[role]
        return (HfTensor(weight.name, weight.shape, shard_dim, parameter),)
    match = _LAYER_NAME.fullmatch(parameter)
    layer = int(match.group(1)) + layer_offset if match else 0
    weights = family.layer_weights(spec, layer)
    parts = []
    for role, weight in weights.items():
        name, dim, part = _place(role, spec)
        if match and name == match.group(2):
            parts.append((weight, dim, part))
    if match is None or not parts:
        raise DataError(
            f"parameter {parameter!r} has no counterpart in HF models of family {spec.family} "
            f"(qkv_bias={spec.qkv_bias}, qk_norm={spec.qk_norm}); build the stage from the same "
            "ModelSpec"
        )
    prefix = family.layer_prefix(layer)
    num_experts = parts[0][0].experts
    experts = range(num_experts) if num_experts else [None]
    tensors = []
    for expert in experts:
        for weight, dim, part in parts:
            name = prefix + weight.name.format(expert=expert)
            tensors.append(HfTensor(name, weight.shape, dim, parameter, part, expert))
    return tuple(tensors)


def _place(role: str, spec: ModelSpec) -> tuple[str, int | None, Part]:
    if role not in _LAYER_ROLES:
        raise DataError(
            f"model.path: {spec.path}: the {role!r} weights of family {spec.family} have no place "
            "in the layers of trainer.backend=megatron; use a model of another family"
        )
    return _LAYER_ROLES[role]


def stage_tensors(
    parameters: Iterable[str], spec: ModelSpec, layer_offset: int
) -> tuple[HfTensor, ...]:
    """Returns the HF tensors a stage owns, in the order of its parameters; the tied copy on the
    last stage is left out.
    """
    names = list(parameters)
    if spec.tied:
        names = [name for name in names if name != OUTPUT]
    return tuple(tensor for name in names for tensor in sources(name, spec, layer_offset))


def part_view(parameter: torch.Tensor, tensor: HfTensor, spec: ModelSpec) -> torch.Tensor:
    """Returns a rank's shard of an HF tensor as a view into its Megatron parameter: rows in order,
    maybe in several dimensions.

    `part_view(...).reshape(tensor.local_shape(tp_size))` is the shard; assigning to the view writes
    the parameter. An expert's is asked for on the rank that holds it.
    """
    part = tensor.part
    if tensor.expert is not None:
        parameter = parameter[tensor.expert % len(parameter)]
    if part == "whole":
        return parameter
    if part in ("gate", "up"):
        return parameter.unflatten(0, (2, -1))[0 if part == "gate" else 1]
    queries = spec.num_heads // spec.num_kv_heads
    grouped = parameter.unflatten(0, (-1, queries + 2, spec.head_dim))
    start, stop = {"q": (0, queries), "k": (queries, queries + 1), "v": (queries + 1, queries + 2)}[
        part
    ]
    return grouped[:, start:stop]


def standard_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns a stage's parameters by Megatron's standard name, whatever wraps the GPT inside
    `module`.
    """
    parameters: dict[str, torch.nn.Parameter] = {}
    for full_name, parameter in module.named_parameters():
        match = _STANDARD_NAME.search(full_name)
        if match is None or match.group(1) in parameters:
            raise DataError(
                f"parameter {full_name!r} is "
                f"{'not a standard GPT parameter' if match is None else 'there twice'}; pass a "
                "module that holds exactly one GPT stage"
            )
        parameters[match.group(1)] = parameter
    return parameters


def first_layer(module: torch.nn.Module) -> int:
    """Returns the model's index of the stage's first layer (0 if it has none), from Megatron's
    1-based layer_number.
    """
    for name, child in module.named_modules():
        if name.endswith("decoder.layers.0"):
            return int(child.layer_number) - 1
    return 0


@torch.no_grad()
def load_hf(module: torch.nn.Module, spec: ModelSpec, place: Place | None = None) -> None:
    """Load a stage's parameters from the HF directory `spec.path`, reading only this rank's slices.

    place: this rank's, Megatron's current one unless given. Values are cast to the parameters'
    type. Raises DataError when the checkpoint lacks a tensor, has one of another shape, or has one
    the model does not know (it would be ignored silently).
    """
    if place is None:
        from pa_npu.backends.megatron import parallel

        place = parallel.place()
    tp_rank, tp_size, here = place.tensor, place.mesh.tensor, place.coordinate("expert")
    offset = first_layer(module)
    places = located_weights(spec)
    opened = cache(partial(safe_open, framework="pt"))
    for name, parameter in standard_parameters(module).items():
        tensors = [
            tensor
            for tensor in sources(name, spec, offset)
            if holder(tensor, spec, place) in (None, here)
        ]
        for tensor in tensors:
            file = places[tensor.name][0]
            _load_shard(
                file, opened(file), tensor, part_view(parameter, tensor, spec), tp_rank, tp_size
            )


def holder(tensor: HfTensor, spec: ModelSpec, place: Place) -> int | None:
    """Returns the number in its expert-parallel group of the rank that alone has an expert's
    tensor; None for others'.
    """
    if tensor.expert is None or spec.experts is None:
        return None
    return tensor.expert // (spec.experts.count // place.mesh.expert)


def _load_shard(
    file: Path, opened: Any, tensor: HfTensor, target: torch.Tensor, tp_rank: int, tp_size: int
) -> None:
    rows, columns = slice(None), slice(None)
    if tensor.shard_dim is not None:
        start, stop = tensor.local_range(tp_rank, tp_size)
        rows, columns = (
            (slice(start, stop), columns) if tensor.shard_dim == 0 else (rows, slice(start, stop))
        )
    try:
        piece = opened.get_slice(tensor.name)
        shard: torch.Tensor = piece[rows] if columns == slice(None) else piece[rows, columns]
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"model.path: {file}: cannot read tensor {tensor.name} ({error}); restore the file "
            "from its source"
        ) from error
    if not torch.isfinite(shard).all():
        raise DataError(
            f"model.path: {file}: tensor {tensor.name} holds values that are no finite numbers; "
            "restore the file from its source"
        )
    if tensor.shard_dim is None or stop - start == tensor.local_size(tp_size):
        target.copy_(shard.view(target.shape))
        return
    target.zero_()
    target[: stop - start].copy_(shard)
