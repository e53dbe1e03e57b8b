"""Finds the memory that vLLM's modules compute with, and the HF tensors that it is made of.

Imports torch only. vLLM fuses projections (`packed_modules_mapping` of its model classes) and
stacks experts. On CPU it packs matrices for their kernels and keeps them where no parameter shows
them. Such a matrix is read back through the kernel, as its product with the unit matrix: every sum
has one term and is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pa_npu.engines.live_weights import LiveTensor
from pa_npu.weight_transfer.receiver import HEAD, is_embedding, is_head

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_STACKED = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}
# Rows of the unit matrix in one product.
_ROWS = 512


def live_tensors(model: torch.nn.Module, names: Sequence[str]) -> Iterator[LiveTensor]:
    """Yields the memory that is made of the HF tensors `names`, where its place is known."""
    parameters = dict(model.named_parameters())
    sources = _sources(model, parameters, names)
    embedding = next(filter(is_embedding, names), None)
    for parameter_name, tensors in sources.items():
        parameter = parameters[parameter_name]
        module: Any = model.get_submodule(parameter_name.rpartition(".")[0])
        if parameter.numel():
            yield LiveTensor(parameter_name, tensors, parameter)
        is_matrix = parameter_name.endswith(".weight")
        if is_matrix and (packed := _packed(module, parameter)) is not None:
            yield LiveTensor(f"{parameter_name} in its kernel's form", tensors, packed)
    decoder = getattr(model, "language_model", model)
    head: Any = getattr(decoder, "lm_head", None)
    has_own = any(map(is_head, parameters))
    if getattr(head, "weight", None) is not None and not has_own and embedding is not None:
        packed = _packed(head, head.weight)
        if packed is not None:
            yield LiveTensor(f"{HEAD} in its kernel's form", (embedding,), packed)


def _sources(
    model: Any, parameters: Iterable[str], names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Returns by parameter the HF names that it is made of, in their order."""
    fused: dict[str, str] = {}
    for whole, parts in getattr(model, "packed_modules_mapping", {}).items():
        fused |= dict.fromkeys(parts, whole)
    known = set(parameters)
    sources: dict[str, tuple[str, ...]] = {}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name in names:
        inside = name if mapper is None else (mapper.apply_list([name]) or [name])[0]
        place = _place(inside, known, fused)
        if place is not None:
            sources[place] = (*sources.get(place, ()), name)
    head = next(filter(is_head, known), None)
    embedding = next(filter(is_embedding, names), None)
    if head is not None and head not in sources and embedding is not None:
        sources[head] = (embedding,)
    return sources


def _place(name: str, parameters: set[str], fused: dict[str, str]) -> str | None:
    """Returns the parameter that the HF tensor `name` becomes a part of."""
    if name in parameters:
        return name
    path, _, kind = name.rpartition(".")
    owner, _, module = path.rpartition(".")
    candidate = f"{owner}.{fused.get(module, module)}.{kind}"
    if candidate in parameters:
        return candidate
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return None
    experts, projection = expert.groups()
    # Releases differ in whether the stacked experts are a module of their own inside `experts`.
    suffix = _STACKED[projection]
    stacked = [
        parameter
        for parameter in parameters
        if parameter.startswith(experts) and parameter.endswith(suffix)
    ]
    return stacked[0] if len(stacked) == 1 else None


@torch.no_grad()
def _packed(module: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the matrix that a packed kernel of a CPU has, [outputs, inputs].

    Returns None if the module computes with the parameter itself.
    """
    multiply = getattr(module, "cpu_linear", None)
    if multiply is None or multiply is torch.nn.functional.linear:
        return None
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    inputs = next((size for name in sizes if (size := getattr(module, name, None))), None)
    if inputs is None:
        return None
    unit = torch.eye(inputs, dtype=weight.dtype, device=weight.device)
    columns = [multiply(rows, weight, None) for rows in unit.split(_ROWS)]
    return torch.cat(columns).t().contiguous()
