"""Payloads in TransferQueue, Ascend's data module for post-training on Ray (arXiv 2507.01663).

A group is a row, its arrays and declared columns are columns. The package keeps payloads in storage units on the cluster's nodes
and their metadata in a controller, both Ray actors. Columns have the names and types of `Group`'s arrays, so that whatever else
uses the queue can fetch those that it needs:

    transfer_queue.kv_batch_get(keys=["buffer/run/ITERATION/REPLICA/SLOT"], partition_id=PARTITION, select_fields="tokens")

The coordinator, which fills the buffer, starts the actors; trainers attach to them when they first read. Every call has a deadline.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pa_npu.control.bounded_calls import BoundedCalls, NoAnswer
from pa_npu.errors import ConfigError
from pa_npu.samples.columns import LOGPROBS, NONE, RunColumns
from pa_npu.samples.group import IDENTITY, PER_SAMPLE, PER_TOKEN, Group
from pa_npu.samples.rollout_buffer import BufferFailed
from pa_npu.samples.wire import to_bytes

T = TypeVar("T")

_NUMBERS = "numbers"  # the column of IDENTITY
_COLUMNS = (_NUMBERS, *PER_TOKEN, *PER_SAMPLE)
# One per core that storage may take; the package spreads them over the nodes.
_STORAGE_UNITS = 2


class TransferQueuePayloads:
    """Payloads of one attempt of a run.

    partition: its name in the queue, which runs of one cluster share. starts: whether this process starts the queue where there is
    none; others wait for it. address: of the Ray cluster. timeout_s: of one call; the first one connects.
    """

    def __init__(self, partition: str, *, starts: bool, address: str, timeout_s: float) -> None:
        self._partition = partition
        self._starts = starts
        self._address = address
        self._timeout_s = timeout_s
        self._calls = BoundedCalls("transfer queue", timeout_s)  # the package's have no deadline
        self._queue: Any = None

    def put(self, key: str, replica: int, group: Group, columns: RunColumns = NONE) -> bytes:
        columns.check((LOGPROBS, *group.columns), str(group))
        fields = {name: torch.from_numpy(getattr(group, name)) for name in (*PER_TOKEN, *PER_SAMPLE)}
        fields |= {column.name: torch.from_numpy(values) for column, values in group.columns.items()}
        fields[_NUMBERS] = torch.tensor([getattr(group, name) for name in IDENTITY], dtype=torch.int64)
        self._call(
            f"to take {group}",
            lambda queue: queue.kv_put(
                key=key, partition_id=self._partition, fields=fields, tag={"index": group.index}
            ),
        )
        return b""

    def get(self, key: str, replica: int, said: bytes, columns: RunColumns = NONE) -> bytes:
        declared = [column for column in columns.carried if columns.wants(column)]
        found = self.get_columns(key, (*_COLUMNS, *(column.name for column in declared)))
        identity = dict(zip(IDENTITY, found.pop(_NUMBERS).tolist(), strict=True))
        arrays: dict[str, Any] = {name: tensor.numpy().copy() for name, tensor in found.items()}
        values = {column: arrays.pop(column.name) for column in declared}
        return to_bytes(Group(**identity, **arrays, columns=values), columns)

    def get_columns(self, key: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Some columns of a row, and no others travel."""
        found = self._call(
            f"for {', '.join(names)} of {key}",
            lambda queue: queue.kv_batch_get(keys=[key], partition_id=self._partition, select_fields=list(names)),
        )
        return {name: found[name][0] for name in names}

    def drop(self, key: str, replica: int, columns: RunColumns = NONE) -> None:
        self._call(f"to drop {key}", lambda queue: queue.kv_clear(keys=[key], partition_id=self._partition))

    def _call(self, what: str, call: Callable[[Any], T]) -> T:
        try:
            return self._calls(lambda: call(self._connected()))
        except NoAnswer as error:
            if not error.asked:
                raise BufferFailed(f"TransferQueue was not asked {what}: {error}") from None
            raise BufferFailed(
                f"waited {self._timeout_s:g} s {what}: TransferQueue does not answer; are all nodes of the Ray cluster alive, and "
                f"are three of its CPUs free for the queue (ray status)?"
            ) from None
        except (ConfigError, BufferFailed):
            raise
        except Exception as error:  # what Ray, ZeroMQ and the package raise has no common class
            reason = " ".join(str(error).split())[:300]
            raise BufferFailed(f"TransferQueue was asked {what}: {type(error).__name__}: {reason}") from error

    def _connected(self) -> Any:
        if self._queue is None:
            self._queue = _connect(self._address, self._starts, time.monotonic() + self._timeout_s)
        return self._queue


def check_installed() -> None:
    """Raises ConfigError where TransferQueue is not."""
    for module in ("ray", "transfer_queue"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"buffer.backend: transfer_queue, but {module} is not installed here; pip install -e '.[transfer_queue]', or set "
                f"buffer.backend=store"
            )


def _connect(address: str, starts: bool, end_s: float) -> Any:
    """The package, with this process attached to the cluster's queue."""
    # it sets torch's threads in every call, which would be training's too
    os.environ.setdefault("TQ_NUM_THREADS", str(torch.get_num_threads()))
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    check_installed()
    import ray
    import transfer_queue

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    while not starts:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
            break
        except ValueError:
            if time.monotonic() > end_s:
                raise BufferFailed("TransferQueue has not been started; look at the coordinator's log") from None
            time.sleep(0.1)
    transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": _STORAGE_UNITS}}})
    return transfer_queue
