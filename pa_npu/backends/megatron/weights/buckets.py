"""One stage's HF tensors from the shards of tensor and expert parallelism, for a publish and an export as an HF directory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.backends.buckets import GatheredWeights, Outgoing, Part, Region
from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.backends.megatron.weights.hf_map import (
    HfTensor,
    first_layer,
    holder,
    part_view,
    stage_tensors,
    standard_parameters,
)
from pa_npu.config.mesh import Place
from pa_npu.config.sections.operation import Senders
from pa_npu.families.spec import ModelSpec
from pa_npu.weight_transfer.contents import Position


class StageTensors(GatheredWeights):
    """All ranks of place.shard_group build the same plan from the same parameters. shard_group:
    theirs, None where that is one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        spec: ModelSpec,
        place: Place,
        bucket_bytes: int,
        shard_group: dist.ProcessGroup | None = None,
        on_host: bool = False,
        senders: Senders = "leader",
    ) -> None:
        self._module = module
        self._spec = spec
        self._rank = place.shard_group.index(place.rank)
        self._parameters = standard_parameters(module)
        self._tensors = stage_tensors(self._parameters, spec, first_layer(module))
        sent = {
            tensor.name: Outgoing(tensor.shape, self._parameters[tensor.parameter].dtype)
            for tensor in self._tensors
        }
        device = next(iter(self._parameters.values())).device
        super().__init__(
            sent,
            spec,
            place,
            bucket_bytes,
            shard_group,
            device,
            on_host=on_host,
            senders=senders,
        )

    def parts(self, leads: bool) -> Mapping[str, _Shard]:
        return {
            tensor.name: self._part(tensor, self._parameters, leads) for tensor in self._tensors
        }

    def live_parts(self, leads: bool) -> Mapping[str, _Shard]:
        parameters = standard_parameters(self._module)
        return {tensor.name: self._part(tensor, parameters, leads) for tensor in self._tensors}

    def regions(self) -> Mapping[str, Sequence[Region]]:
        """See GatheredWeights. Experts are held by the ranks of their expert coordinate, what TP
        cuts by those of the tensor coordinate, and the rest by all.
        """
        mesh = self._place.mesh
        stage = [mesh.place(rank) for rank in range(mesh.size)]
        stage = [place for place in stage if place.stage == self._place.stage]
        everyone = tuple(place.rank for place in stage)
        by_tensor: dict[int, tuple[int, ...]] = {}
        for number in range(mesh.tensor):
            by_tensor[number] = tuple(place.rank for place in stage if place.tensor == number)
        by_expert: dict[int, tuple[int, ...]] = {}
        for number in range(mesh.expert):
            by_expert[number] = tuple(
                place.rank for place in stage if place.coordinate("expert") == number
            )
        regions: dict[str, list[Region]] = {}
        for tensor in self._tensors:
            owner = holder(tensor, self._spec, self._place)
            if owner is not None:
                regions[tensor.name] = [Region.whole(tensor.shape, by_expert[owner])]
            elif tensor.shard_dim is None:
                regions[tensor.name] = [Region.whole(tensor.shape, everyone)]
            else:
                regions[tensor.name] = [
                    _region(tensor, number, mesh.tensor, by_tensor[number])
                    for number in range(mesh.tensor)
                ]
        return regions

    def _part(
        self, tensor: HfTensor, parameters: Mapping[str, torch.Tensor], leads: bool
    ) -> _Shard:
        """Experts are the part of the rank that holds them, what TP cuts that of the first
        replica's ranks, or of every rank where each sends its own share.
        """
        size, owner = self._place.mesh.tensor, holder(tensor, self._spec, self._place)
        is_cut = tensor.shard_dim is not None
        has_part = leads if not is_cut else self._divides or self._rank < size
        if owner is not None:
            number = self._place.coordinate("expert") if self._divides else self._rank
            has_part = number == owner
        if not has_part:
            return _Shard(None, tensor, 0, 0)
        view = part_view(parameters[tensor.parameter].detach(), tensor, self._spec)
        first, last = (0, tensor.shape[0])
        if is_cut:
            first, last = tensor.local_range(self._place.tensor, size)
        return _Shard(view, tensor, first, last)


@dataclass(frozen=True)
class _Shard(Part):
    """[first, last) of an HF tensor along the dimension that TP cuts, or of its rows; view: its
    rows in order, with those that pad the vocabulary behind; None of a rank that has no part."""

    view: torch.Tensor | None
    tensor: HfTensor
    first: int
    last: int

    def pieces(self, size: int) -> Iterator[tuple[torch.Tensor, Position]]:
        """See Part."""
        if self.view is None:
            return
        columns = math.prod(self.tensor.shape[1:])
        if self.tensor.shard_dim == 1:
            width = self.last - self.first
            yield self.view, Position(self.first, width=width, stride=columns)
            return
        # of a part that is cut along rows, those that pad the vocabulary come last
        elements = (self.last - self.first) * columns
        whole = elements == self.view.numel()
        piece = self.view if whole else self.view.reshape(-1)[:elements]
        yield piece, Position(self.first * columns)

    def lay(self, out: torch.Tensor, first: int) -> None:
        """See Part."""
        if self.view is None:
            return
        columns = math.prod(self.tensor.shape[1:])
        if self.tensor.shard_dim == 1:
            rows = self.view[first // columns : (first + len(out)) // columns]
            out.view(-1, columns)[:, self.first : self.last].copy_(rows)
            return
        start = self.first * columns
        begin, end = max(first, start), min(first + len(out), self.last * columns)
        if begin >= end:
            return
        target = out[begin - first : end - first]
        if len(target) == self.view.numel():
            target.view(self.view.shape).copy_(self.view)
        else:
            target.copy_(self.view.reshape(-1)[begin - start : end - start])

    def lay_columns(self, out: torch.Tensor, first_row: int) -> None:
        """See Part."""
        assert self.view is not None
        out.copy_(self.view[first_row : first_row + len(out)])


def _region(tensor: HfTensor, number: int, size: int, holders: tuple[int, ...]) -> Region:
    """Returns shard `number` of `size` of a tensor that TP cuts."""
    first, last = tensor.local_range(number, size)
    columns = math.prod(tensor.shape[1:])
    if tensor.shard_dim == 1:
        return Region(first, tensor.shape[0], last - first, holders)
    return Region(first * columns, last - first, columns, holders)


def export_hf(
    module: torch.nn.Module,
    spec: ModelSpec,
    directory: str | Path,
    place: Place,
    shard_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Write the stage in `module` (one GPT stage, wrappers are fine) as its share of `directory`;
    collective, see write_hf.
    """
    source = StageTensors(module, spec, place, BUCKET_BYTES, shard_group) if place.sends else None
    write_hf(source, spec, directory, place, next(module.parameters()).device, **options)
