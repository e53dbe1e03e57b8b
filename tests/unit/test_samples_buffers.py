"""Every backend of the rollout buffer passes the same checks: the store, and TransferQueue behind the calls that are made of it.

The real TransferQueue passes them in tests/integration/test_transfer_queue.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.errors import ConfigError
from pa_npu.samples.open_buffer import payloads
from pa_npu.samples.rollout_buffer import BufferFailed, StoreRolloutBuffer
from pa_npu.samples.transfer_queue import TransferQueuePayloads
from tests.helpers.buffer_conformance import CHECKS, Open, make_group


class Queue:
    """The key-value interface of TransferQueue 0.1.11, as its documentation and signatures say, in memory."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        self.started = 0

    def init(self, conf: Any) -> None:
        self.started += 1

    def kv_put(self, key: str, partition_id: str, fields: dict[str, torch.Tensor], tag: dict[str, Any]) -> None:
        self.rows[partition_id, key] = {name: tensor.clone() for name, tensor in fields.items()}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        (key,) = keys
        if (partition_id, key) not in self.rows:
            raise ValueError("keys or partition were not found!")
        return {name: self.rows[partition_id, key][name][None] for name in select_fields}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop((partition_id, key), None)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in sys.modules else None)
    monkeypatch.setitem(sys.modules, "transfer_queue", found)  # type: ignore[arg-type]
    ray = SimpleNamespace(is_initialized=lambda: True, get_actor=lambda name, namespace: object())
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return found


@pytest.fixture
def channel() -> StoreChannel:
    return StoreChannel(
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    )


def in_queue(partition: str = "p", *, starts: bool = True, timeout_s: float = 30.0) -> TransferQueuePayloads:
    return TransferQueuePayloads(partition, starts=starts, address="auto", timeout_s=timeout_s)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ["store", "transfer_queue"])
def test_every_backend_conforms(
    backend: str, check: Callable[[Open], None], channel: StoreChannel, queue: Queue
) -> None:
    place = in_queue() if backend == "transfer_queue" else None
    check(lambda readers: StoreRolloutBuffer(channel, "run", readers, payloads=place))
    assert bool(queue.started) == (backend == "transfer_queue" and "deadline" not in check.__name__)


def test_a_column_is_fetched_alone_and_a_removed_group_leaves_nothing_in_the_queue(
    channel: StoreChannel, queue: Queue
) -> None:
    place = in_queue()
    buffer = StoreRolloutBuffer(channel, "run", 1, payloads=place)
    buffer.put(make_group(3), 0, 0)
    columns = place.get_columns("buffer/run/0/0/0", ("tokens", "lengths"))
    assert columns.keys() == {"tokens", "lengths"} and columns["tokens"].dtype == torch.int32
    buffer.done(0, 0, 0)
    assert not queue.rows


def test_a_queue_that_hangs_or_has_lost_a_group_is_one_line(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BufferFailed, match=r"asked for numbers, .*: ValueError: keys or partition were not found"):
        in_queue().get("buffer/run/0/0/0")
    stopped = threading.Event()
    monkeypatch.setattr(queue, "kv_put", lambda **_: stopped.wait(30), raising=False)
    hangs = in_queue(timeout_s=0.05)
    with pytest.raises(BufferFailed, match=r"waited 0\.05 s to take group 3 .* does not answer"):
        hangs.put("key", make_group(3))
    with pytest.raises(BufferFailed, match=r"was not asked to take group 4 .* did not answer before"):
        hangs.put("key", make_group(4))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "transfer queue" and thread.is_alive()][
        -1:
    ]
    assert thread.daemon, "the end of the program would wait for the call"
    stopped.set()


def test_a_reader_waits_for_the_coordinator_to_start_the_queue(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there(name: str, namespace: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(sys.modules["ray"], "get_actor", none_there)
    with pytest.raises(BufferFailed, match=r"has not been started|does not answer"):
        in_queue(starts=False, timeout_s=0.2).get("key")
    assert not queue.started, "a reader starts nothing"


def test_attempts_and_runs_do_not_see_each_other_and_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def configuration(directory: str) -> Config:
        tree = {"run": {"dir": directory}, "model": {"path": "m"}, "data": {"train": "t"}}
        return Config.model_validate(tree | {"buffer": {"backend": "transfer_queue"}, "placement": {"cluster": "ray"}})

    places = []
    for directory, attempt in (("a", "0"), ("b", "0"), ("a", "1")):
        monkeypatch.setenv("PA_NPU_ATTEMPT", attempt)
        found = payloads(configuration(directory), fills=True)
        assert isinstance(found, TransferQueuePayloads)
        places.append(found._partition)
    assert len(set(places)) == 3
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transfer_queue" else name)
    with pytest.raises(
        ConfigError, match=r"transfer_queue is not installed here; pip install -e '\.\[transfer_queue\]'"
    ):
        in_queue().get("key")
