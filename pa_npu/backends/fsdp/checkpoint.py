"""Checkpoints of sharded models by torch's distributed checkpoint: planned by all ranks, written by each on its own.

Weights are saved in fp32 as they are trained, with AdamW's moments beside them under `model.`,
`exp_avg.` and `exp_avg_sq.`, and a reference that is no longer the HF model under `reference.`;
beside its shards every rank writes how many updates they have seen. Any number of ranks reads what
any other has written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.utils import _DistWrapper

from pa_npu.backends.fsdp.lora import Adapted
from pa_npu.backends.fsdp.model import ScoredModel
from pa_npu.backends.fsdp.optimizer import ShardedAdamW
from pa_npu.backends.shard_index import IndexReader, collect_written, note_written, refusing
from pa_npu.checkpoints.directories import damaged, read_meta

MODEL = "model."
_STAMP = "updates."  # and the rank that wrote it


Model = ScoredModel | Adapted


def state_of(
    policy: Model, optimizer: ShardedAdamW, reference: Model | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors that are saved and loaded, by name; they are this rank's own memory,
    sharded.
    """
    state: dict[str, torch.Tensor] = {}
    for name, weight in policy.named_weights().items():
        state[MODEL + name] = weight.detach()
        if not weight.requires_grad:  # of a frozen tower
            continue
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}.{name}"] = optimizer.adamw.state[weight][moment]
    if reference is not None:
        state |= {
            f"reference.{name}": weight.detach()
            for name, weight in reference.named_weights().items()
        }
    return state


class PlannedShards:
    """The tensors that this rank is going to write; a PlannedSave.

    On an accelerator the data is copied to the host here. On CPU it is the trained memory itself:
    write before that changes, or from a forked process, which keeps the memory of the moment of the
    fork.
    """

    def __init__(
        self, state: dict[str, torch.Tensor], directory: Path, description: dict[str, Any]
    ) -> None:
        """Collective."""
        self._directory = directory
        self.description = description
        state = {**state, f"{_STAMP}{dist.get_rank()}": torch.tensor(description["updates"])}
        self._writer = FileSystemWriter(
            directory, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        planner, leads = DefaultSavePlanner(), dist.get_rank() == 0
        planner.set_up_planner(state, self._writer.storage_meta(), leads)
        self._writer.set_up_storage_writer(leads)
        self._metadata: Any = None

        def plan_locally() -> Any:
            return self._writer.prepare_local_plan(planner.create_local_plan())

        def plan_globally(plans: list[Any]) -> list[Any]:
            plans, self._metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        # as torch's own save does, which writes in the same go: a rank that cannot would leave the
        # others in a collective
        plan = _DistWrapper(None, True, 0).reduce_scatter("plan", plan_locally, plan_globally)
        self._plan = planner.finish_plan(plan)
        self._planner: Any = planner
        if next(iter(state.values())).device.type != "cpu":
            self._planner = _OnHost(
                {item.index: _on_host(planner.resolve_data(item)) for item in self._plan.items}
            )

    def write(self) -> list[str]:
        """Write and sync this rank's file; returns its name.

        Raises OSError, or what torch's writer makes of one.
        """
        return note_written(
            self._directory, self._writer.write_data(self._plan, self._planner).wait()
        )

    def release(self) -> None:
        """Drop the data: a forked process has it."""
        self._planner = None

    def complete(self) -> None:
        """Write the index from what all ranks have written. Raises OSError."""
        if dist.get_rank() == 0:
            self._writer.finish(self._metadata, collect_written(self._directory))


def _on_host(data: Any) -> torch.Tensor:
    tensor: torch.Tensor = data
    return tensor.cpu()


class _OnHost:
    """The part of a planner that writing asks, for data that was copied before."""

    def __init__(self, data: dict[MetadataIndex, torch.Tensor]) -> None:
        self._data = data

    def resolve_data(self, item: Any) -> torch.Tensor:
        return self._data[item.index]


def load_state(state: dict[str, torch.Tensor], directory: Path, *, alone: bool = False) -> None:
    """Fill `state` in place from a checkpoint. alone: by this process only, not by all ranks
    together.

    Raises DataError where its index is none, and on some rank where its files are not all of the
    checkpoint's update.
    """
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    names = sorted(_Reader(directory).read_metadata().state_dict_metadata)
    # those of a release before them have none
    stamps = {name: torch.zeros((), dtype=torch.int64) for name in names if name.startswith(_STAMP)}
    mine = dict(list(stamps.items())[rank::ranks])
    dcp.load({**state, **mine}, storage_reader=_Reader(directory), no_dist=alone)
    expected = read_meta(directory).updates
    for updates in map(int, mine.values()):
        if updates != expected:
            raise damaged(
                directory,
                f"a file is of a checkpoint after {updates} updates instead of {expected}",
            )


class _Reader(FileSystemReader):
    """Torch's reader, which would unpickle an index of anybody's making."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        index = Path(self.path) / ".metadata"

        def read() -> Metadata:
            with index.open("rb") as stream:
                metadata: Metadata = IndexReader(stream).load()
            return metadata

        metadata = refusing(str(self.path), read)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
