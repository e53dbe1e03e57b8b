"""One rank's share of a Megatron dist-checkpoint: planned by all ranks, written by each on its own, completed by all.

Megatron's own save does the three in one go, and a rank that cannot write (a full disk) leaves the others in a collective
until it times out. Here writing is a plain local call, which may run in a forked process, and the caller makes sure that all
ranks have succeeded before any of them goes on. Works on core 0.12.1 to 0.16.1, in the format of their `torch_dist` strategy.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.storage import WriteResult

from pa_npu.backends.shard_index import note_written, take_written

# Files per rank. They are written one after another, so that more would gain nothing.
_FILES_PER_RANK = 1


class PlannedShards:
    """The tensors that this rank is going to write into `directory`, with their data as it is now.

    On an accelerator the data is copied to the host here. On CPU most of it is the trained memory itself: write before that
    changes, or from a forked process, which keeps the memory of the moment of the fork.
    """

    def __init__(self, state: dict[str, Any], directory: Path, description: dict[str, Any]) -> None:
        """Collective. A common part that rank 0 cannot write is no exception here but the first one of `write`."""
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
        """Write and sync this rank's files; returns their names. Raises OSError, or what torch's writer makes of one."""
        if self._common.failure is not None:
            raise self._common.failure
        written: list[WriteResult] = []
        for number, bucket in enumerate(self._buckets):
            # Megatron's function is made for a pool of processes, but asks no more of its queues than this
            results: queue.SimpleQueue[Any] = queue.SimpleQueue()
            count: queue.Queue[int] = queue.Queue()
            count.put(number)
            FileSystemWriterAsync.write_preloaded_data(self._transforms, number, bucket, results, count, True)
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
        self._strategy.writer.finish(self._strategy.metadata, take_written(self._directory))
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self._directory))


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which hands its plan over instead of making an asynchronous request of it."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=_FILES_PER_RANK)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class _CommonPart(TorchCommonSaveStrategy):
    """The part that is equal on all ranks. Rank 0 writes it; its failure must not leave the others alone in a collective."""

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
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's writer, closing a file that lacks its end
            self.failure = error
