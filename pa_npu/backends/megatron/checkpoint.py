"""Checkpoints of Megatron's models: what a rank saves and restores, and its share of the files.

A checkpoint is planned by all ranks, written by each on its own, completed by all. Megatron's own
save does the three in one go, and a rank that cannot write (a full disk) leaves the others in a
collective until it times out. Here writing is a plain local call, which may run in a forked
process, and the caller makes sure that all ranks have succeeded before any of them goes on. Works
on core 0.12.1 to 0.16.1, in the format of their `torch_dist` strategy.
"""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from pa_npu.backends.megatron.patches.known_classes import known_classes_only
from pa_npu.backends.megatron.stage import TriModel
from pa_npu.backends.shard_index import collect_written, note_written
from pa_npu.checkpoints.directories import CheckpointMeta, damaged, read_meta
from pa_npu.checkpoints.provenance import layout_of
from pa_npu.config.schema import Config
from pa_npu.errors import UserError
from pa_npu.platform.base import Platform

logger = logging.getLogger(__name__)

_REFERENCE = "reference."
_STAMP = "updates"
# What of a parameter group is state; everything else is the configuration's. Megatron saves rank
# 0's groups for all ranks, although their order follows a stage's parameters: norms would be
# decayed on a stage that begins with one.
_GROUP_STATE = ("params", "step")
# Files per rank. They are written one after another, so that more would gain nothing.
_FILES_PER_RANK = 1


class CheckpointContents:
    """One rank's model, optimizer and generators. Every method is collective."""

    def __init__(self, stage: TriModel, optimizer: Any, config: Config, platform: Platform) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._config = config
        self._platform = platform

    def plan(self, directory: Path, updates: int, with_reference: bool) -> PlannedShards:
        """updates: optimizer steps so far."""
        state = self._sharded(is_loading=False, with_rng=True, with_reference=with_reference)
        state[_STAMP] = [_stamp(dist.get_rank(), dist.get_world_size(), updates)]
        return PlannedShards(state, directory, {"updates": updates})

    def load(self, directory: Path) -> CheckpointMeta:
        """Restore everything from `directory`, whatever the parallel sizes it was written at.

        RNG states are those of ranks, so they are restored only at the same sizes. Raises UserError
        when it is not complete or holds other tensors, DataError when its files are of different
        versions or name what no checkpoint contains.
        """
        meta = read_meta(directory)
        same_layout = meta.layout == layout_of(self._config)
        # where it differs from the HF model that the stage already has
        with_reference = "reference" in self._stage.frozen and bool(
            meta.reference and meta.reference["saved"]
        )
        settings = [
            {key: group[key] for key in group if key not in _GROUP_STATE}
            for group in self._optimizer.param_groups
        ]
        state = self._sharded(is_loading=True, with_rng=same_layout, with_reference=with_reference)
        loaded = _read(state, directory, meta)
        self._stage.policy.load_state_dict(loaded["model"])
        if with_reference:
            reference = {
                name.removeprefix(_REFERENCE): value for name, value in loaded["reference"].items()
            }
            self._stage.frozen["reference"].load_state_dict(reference)
        with torch.no_grad():
            model = {
                name: parameter.clone() for name, parameter in self._stage.policy.named_parameters()
            }
            self._optimizer.load_state_dict(loaded["optimizer"])
            self._check_masters(model, directory)
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)
        if same_layout:
            _set_rng_state(loaded["rng"], self._platform)
        else:
            logger.info(
                "checkpoint %s was written with %s: RNG states are not restored",
                directory,
                meta.layout,
            )
        return meta

    def _check_masters(self, model: dict[str, torch.Tensor], directory: Path) -> None:
        """Raises DataError where the weights that the optimizer steps, in the model's type, are not
        the model's.
        """
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            # in fp32 both are one memory, which the optimizer loaded last
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        for name, parameter in self._stage.policy.named_parameters():
            if not torch.equal(parameter, model[name]):
                raise damaged(
                    directory, f"the optimizer's weights of {name} are not those of the model"
                )

    def _sharded(self, *, is_loading: bool, with_rng: bool, with_reference: bool) -> dict[str, Any]:
        model = self._stage.sharded_state_dict()
        form = _sharding_arguments() if self._config.trainer.distributed_optimizer else {}
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, **form)
        state = {"model": model, "optimizer": optimizer}
        if with_reference:
            state["reference"] = self._stage.frozen["reference"].sharded_state_dict(_REFERENCE)
        if with_rng:
            shape, place = (dist.get_world_size(),), (dist.get_rank(),)
            state["rng"] = ShardedObject("rng", _rng_state(self._platform), shape, place)
        return state


def load_policy_only(stage: TriModel, directory: Path) -> None:
    """The policy's weights alone, as an export needs them.

    Raises as CheckpointContents.load does.
    """
    loaded = _read({"model": stage.sharded_state_dict()}, directory, read_meta(directory))
    stage.policy.load_state_dict(loaded["model"])


def _read(state: dict[str, Any], directory: Path, meta: CheckpointMeta) -> dict[str, Any]:
    """Reads `state` through Megatron, and checks that all ranks that wrote a part of it were at the
    same update. Collective.
    """
    writers = meta.layout["devices"] if meta.digests else 0  # both came with one release
    stamps = [
        _stamp(rank, writers) for rank in range(dist.get_rank(), writers, dist.get_world_size())
    ]
    try:
        with known_classes_only(str(directory)):
            loaded: dict[str, Any] = dist_checkpointing.load(
                {**state, _STAMP: stamps}, str(directory)
            )
    except CheckpointException as error:
        if not any(isinstance(failure, KeyError) for failure, _ in error.failures.values()):
            raise
        raise UserError(
            f"checkpoint {directory}: it holds other tensors than are asked for, as where another "
            "release of megatron-core saved a distributed optimizer; go on with the release that "
            "saved it, or take its weights with pa-npu export"
        ) from None
    for updates in loaded.get(_STAMP, []):  # Megatron drops an empty list
        if updates != meta.updates:
            raise damaged(
                directory,
                f"a file is of a checkpoint after {updates} updates instead of {meta.updates}",
            )
    return loaded


def _stamp(rank: int, ranks: int, updates: int | None = None) -> ShardedObject:
    """Returns the number of updates that a writing rank's part of the state has seen; it stands
    among its tensors.
    """
    return ShardedObject(_STAMP, updates, (ranks,), (rank,))


def _sharding_arguments() -> dict[str, Any]:
    """Returns the form of the distributed optimizer's state that can be loaded at other sizes; its
    name and argument vary by release.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    forms = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", None)
    if forms is None:  # core 0.12
        return {"sharding_type": "fully_sharded_model_space"}
    name = "fully_reshardable" if "fully_reshardable" in forms else "fully_sharded_model_space"
    # each replica's state is gathered on the host of its first rank alone
    return {
        "metadata": {
            "distrib_optim_sharding_type": name,
            "distrib_optim_fully_reshardable_mem_efficient": True,
        }
    }


def _rng_state(platform: Platform) -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": platform.rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any], platform: Platform) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    platform.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])


class PlannedShards:
    """The tensors that this rank is going to write into `directory`, with their data as it is now.

    On an accelerator the data is copied to the host here. On CPU most of it is the trained memory
    itself: write before that changes, or from a forked process, which keeps the memory of the
    moment of the fork.
    """

    def __init__(self, state: dict[str, Any], directory: Path, description: dict[str, Any]) -> None:
        """Collective.

        A common part that rank 0 cannot write is no exception here but the first one of `write`.
        """
        self._directory = directory
        self.description = description
        self._strategy, self._common = _PlanOnly(), _CommonPart()
        with self._common.in_place_of_megatrons():
            dist_checkpointing.save(state, str(directory), self._strategy, async_sharded_save=True)
        writer = self._strategy.writer
        self._transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        self._buckets = FileSystemWriterAsync.preload_tensors(writer.write_buckets or [], True)
        writer.write_buckets = None

    def write(self) -> list[str]:
        """Write and sync this rank's files; returns their names.

        Raises OSError, or what torch's writer makes of one.
        """
        if self._common.failure is not None:
            raise self._common.failure
        written: list[WriteResult] = []
        for number, bucket in enumerate(self._buckets):
            # Megatron's function is made for a pool of processes, but asks no more of its queues
            # than this
            results: queue.SimpleQueue[Any] = queue.SimpleQueue()
            count: queue.Queue[int] = queue.Queue()
            count.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                self._transforms, number, bucket, results, count, True
            )
            _, result = results.get()
            if isinstance(result, Exception):
                raise result
            written += result
        return note_written(self._directory, written)

    def release(self) -> None:
        """Drop the data: a forked process has it."""
        self._buckets = []

    def complete(self) -> None:
        """Write the index from what all ranks have written. Raises OSError."""
        if dist.get_rank() != 0:
            return
        self._strategy.writer.finish(self._strategy.metadata, collect_written(self._directory))
        save_config(
            CheckpointingConfig(self._strategy.backend, self._strategy.version),
            str(self._directory),
        )


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which hands its plan over instead of making an asynchronous request of
    it.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=_FILES_PER_RANK)

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any
    ) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class _CommonPart(TorchCommonSaveStrategy):
    """The part that is equal on all ranks.

    Rank 0 writes it; its failure must not leave the others alone in a collective.
    """

    def __init__(self) -> None:
        super().__init__("torch", 1)
        self.failure: Exception | None = None

    @contextmanager
    def in_place_of_megatrons(self) -> Iterator[None]:
        """Megatron takes this strategy from its registry alone."""
        megatrons = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, self)
        try:
            yield
        finally:
            register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, megatrons)

    def save_common(self, common_state_dict: Any, checkpoint_dir: Path) -> None:
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except (
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: torch's writer, closing a file that lacks its end
            self.failure = error
