"""The channel carries values of any size, no wait blocks another user, and deadlines are kept and explained."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pa_npu.control.channel import CHUNK_BYTES, StoreChannel, StoreError, connect, host_store
from pa_npu.errors import DeadlineExceeded


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield host_store("127.0.0.1", 0)


@pytest.fixture
def channel(server: dist.TCPStore) -> StoreChannel:
    return StoreChannel(connect("127.0.0.1", server.port, 10.0))


@pytest.mark.parametrize(
    "size",
    [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 20 * 2**20],
    ids=lambda n: f"{n} bytes",
)
def test_values_of_any_size_come_back_and_leave_nothing_behind(
    server: dist.TCPStore, channel: StoreChannel, size: int
) -> None:
    keys_before = server.num_keys()
    value = np.random.default_rng(size).bytes(size)
    channel.put_bytes("value", value)
    assert channel.wait_bytes("value", 1.0, "a value") == value
    assert channel.delete("value") and not channel.delete("value")
    assert server.num_keys() == keys_before


def test_the_store_itself_refuses_what_the_channel_cuts_up(server: Any) -> None:
    if not server.libuvBackend:
        pytest.skip("this torch's store on a socket of ours has no limit")
    client = connect("127.0.0.1", server.port, 10.0)
    client.set("at the limit", b"x" * 2**23)
    with pytest.raises(RuntimeError):
        client.set("beyond", b"x" * (2**23 + 2**17))
        client.get("beyond")


def test_a_key_becomes_visible_only_with_all_its_chunks(
    server: dist.TCPStore, channel: StoreChannel
) -> None:
    seen: list[int] = []
    stop = threading.Event()
    another = StoreChannel(connect("127.0.0.1", server.port, 10.0))

    def watch() -> None:
        while not stop.is_set():
            if another.exists("big"):
                seen.append(len(another.get_bytes("big")))
                return

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    channel.put_bytes("big", bytes(12 * 2**20))
    thread.join(120.0)
    stop.set()
    assert seen == [12 * 2**20]


@pytest.mark.parametrize("timeout_s", [0.0, 0.05, 0.4])
def test_a_deadline_is_kept_and_says_what_where_and_how_long(
    channel: StoreChannel, timeout_s: float
) -> None:
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded) as caught:
        channel.wait(
            "publish/3/done", timeout_s, "weights of version 3 loaded, from the coordinator"
        )
    waited_s = time.monotonic() - start
    assert timeout_s <= waited_s < timeout_s + 0.25
    message = str(caught.value)
    assert (
        f"s for weights of version 3 loaded, from the coordinator: deadline of {timeout_s:g} s "
        "reached" in message
    )
    assert "key pa/0/publish/3/done" in message and "127.0.0.1" in message
    channel.put_bytes("publish/3/done", b"{}")
    assert channel.wait("publish/3/done", 0.0, "the same, now there") < 60


def test_a_wait_ends_soon_after_the_value_arrives_and_measures_itself(
    server: dist.TCPStore, channel: StoreChannel
) -> None:
    producer = StoreChannel(connect("127.0.0.1", server.port, 10.0))
    arrived: list[float] = []

    def produce() -> None:
        arrived.append(time.monotonic())
        producer.put_bytes("late", b"1")

    timer = threading.Timer(0.3, produce)
    start = time.monotonic()
    timer.start()
    waited_s = channel.wait("late", 120.0, "a late value")
    assert arrived and 0 < waited_s <= time.monotonic() - start
    assert time.monotonic() - arrived[0] < 60
    timer.join()


@pytest.mark.parametrize("own_client", [True, False], ids=["own client", "shared client"])
def test_a_wait_in_one_thread_blocks_no_other_user(
    server: dist.TCPStore, channel: StoreChannel, own_client: bool
) -> None:
    waiting = StoreChannel(connect("127.0.0.1", server.port, 10.0)) if own_client else channel
    started = threading.Event()

    def wait() -> None:
        started.set()
        waiting.wait("go", 120.0, "the end of the test")

    thread = threading.Thread(target=wait, name="waiting")
    thread.start()
    started.wait()
    slowest_s = 0.0
    for number in range(200):
        start = time.monotonic()
        channel.put_bytes(f"key {number}", b"%d" % number)
        assert channel.get_bytes(f"key {number}") == b"%d" % number
        slowest_s = max(slowest_s, time.monotonic() - start)
    channel.put_bytes("go", b"1")
    thread.join(120.0)
    assert not thread.is_alive()
    assert slowest_s < 60.0, f"an operation beside a waiting thread took {slowest_s:.3f} s"


async def test_an_async_wait_leaves_the_loop_free_and_can_be_cancelled(
    channel: StoreChannel,
) -> None:
    waiting = asyncio.create_task(channel.wait_bytes_async("later", 20.0, "a later value"))
    forever = asyncio.create_task(channel.wait_bytes_async("never", 20.0, "nothing"))
    await asyncio.sleep(0.02)
    channel.put_bytes("later", b"[1, 2]")
    assert await waiting == b"[1, 2]"
    forever.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forever
    with pytest.raises(DeadlineExceeded, match=r"for nothing: deadline of 0\.05 s"):
        await channel.wait_bytes_async("never", 0.05, "nothing")


def test_reading_a_key_that_is_not_there_fails_at_once(channel: StoreChannel) -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match="key pa/0/gone is not there"):
        channel.get_bytes("gone")
    assert time.monotonic() - start < 5.0


def test_connecting_to_nothing_ends_at_its_deadline_with_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=f"store at 127.0.0.1:{port}: no connection within 0.3 s"
    ):
        connect("127.0.0.1", port, 0.3)
    assert time.monotonic() - start < 60.0


def test_a_store_that_ends_is_named_and_not_waited_for(channel: StoreChannel) -> None:
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    orphan = StoreChannel(connect("127.0.0.1", server.port, 10.0))
    orphan.put_bytes("a", b"1")
    port = server.port
    del server
    start = time.monotonic()
    with pytest.raises(StoreError, match=f"store at 127.0.0.1:{port}: .* has probably ended"):
        orphan.wait("b", 120.0, "anything")
    assert time.monotonic() - start < 60.0


def test_counters_count_across_clients_and_can_be_deleted(
    server: dist.TCPStore, channel: StoreChannel
) -> None:
    another = StoreChannel(connect("127.0.0.1", server.port, 10.0))
    assert [channel.add("n", 1), another.add("n", 2), channel.add("n", 1)] == [1, 3, 4]
    assert channel.delete("n")
    assert another.add("n", 1) == 1
