"""Adds deadlines and large values to the c10d key-value store that the launcher hosts.

A wait polls `check` instead of calling the store's own blocking `wait`, which holds the client for
its whole duration, ignores Python signals, and logs two warnings per expiry. The pause between
polls is 2% of the time already waited, at most `_LONGEST_PAUSE_S`. So a wait ends hardly late, and
one of a second costs the server some 200 looks of 50 us. Every operation is short, so threads may share one
channel without blocking each other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from pa_npu.errors import DeadlineExceeded, PaNpuError

T = TypeVar("T")
# TCPStore's server (libuv) drops the connection on values above 8 MiB (measured, torch 2.13: 8 MiB
# passes, 8.1 fails).
CHUNK_BYTES = 4 * 2**20
_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_PAUSE_SHARE = 0.02
# The first byte of a value: the data follows, or it is in chunks under keys of their own.
_INLINE = b"\x00"
_CHUNKED = b"\x01"
_CHUNK_HEADER = struct.Struct("<IQ")
ADDRESS_VARIABLE = "PA_NPU_ADDRESS"
"""Environment variable of a trainer rank: the address at which its node's processes listen."""
_STORE_TIMEOUT_S = 30.0  # timeout of a store that this process hosts


def attempt_prefix(attempt: int | None = None) -> str:
    """Returns the prefix of the keys of one attempt of a run.

    A restarted run must not read the keys of the attempt before.
    attempt: None stands for this process's (PA_NPU_ATTEMPT).
    """
    number = os.environ.get("PA_NPU_ATTEMPT", "0") if attempt is None else attempt
    return f"pa/{number}/"


class StoreError(PaNpuError):
    """The store cannot be reached any more, or a required key is missing."""


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Makes a client of the store at host:port.

    Raises DeadlineExceeded if nothing listens there within timeout_s.
    """
    start = time.monotonic()
    while True:
        remaining = timeout_s - (time.monotonic() - start)
        try:
            # A plain socket connects first, because TCPStore's own retries overrun their timeout
            # and log C++ stack traces.
            socket.create_connection((host, port), timeout=max(remaining, 0.001)).close()
            return dist.TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(remaining, 1.0)),
            )
        except (OSError, dist.DistError) as error:
            if time.monotonic() - start >= timeout_s:
                raise DeadlineExceeded(
                    f"store at {host}:{port}: no connection within {timeout_s:g} s "
                    f"({_first_line(error)}); is the launcher that hosts it running and reachable?"
                ) from error
        time.sleep(min(0.05, timeout_s))


class StoreChannel:
    """Accesses one c10d store under a key prefix, with deadlines and values of any size.

    Threads may share a channel.
    """

    def __init__(self, store: dist.Store, prefix: str = "pa/0/") -> None:
        self._store = store
        self._prefix = prefix
        self._address = "store"
        if isinstance(store, dist.TCPStore):
            self._address = f"store at {store.host}:{store.port}"

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores data under key, replacing an earlier value.

        The key becomes visible only once all data is stored.
        """
        if len(data) < CHUNK_BYTES:
            self._call("set", key, _INLINE + data)
            return
        view = memoryview(data)
        starts = range(0, len(data), CHUNK_BYTES)
        for number, start in enumerate(starts):
            self._call("set", _chunk_key(key, number), bytes(view[start : start + CHUNK_BYTES]))
        self._call("set", key, _CHUNKED + _CHUNK_HEADER.pack(len(starts), len(data)))

    def get_bytes(self, key: str) -> bytes:
        """Returns the value of a key. Raises StoreError at once if the key does not exist."""
        value = self._get(key)
        if value[:1] == _INLINE:
            return value[1:]
        num_chunks, total = _CHUNK_HEADER.unpack(value[1:])
        data = b"".join(self._get(_chunk_key(key, number)) for number in range(num_chunks))
        if len(data) != total:
            raise StoreError(
                f"{self._address}: {key} has {len(data)} bytes in its chunks, expected {total}"
            )
        return data

    def wait_bytes(self, key: str, timeout_s: float, awaited: str) -> bytes:
        """Waits for key and returns its value.

        `awaited` completes "waited 3 s for ...", sender included.
        """
        self.wait(key, timeout_s, awaited)
        return self.get_bytes(key)

    async def wait_bytes_async(self, key: str, timeout_s: float, awaited: str) -> bytes:
        """Does the same as `wait_bytes` in an event loop, and can be cancelled."""
        for pause_s in self._polls(key, timeout_s, awaited):
            await asyncio.sleep(pause_s)
        return self.get_bytes(key)

    def wait(self, key: str, timeout_s: float, awaited: str) -> float:
        """Waits until key exists and returns the seconds it took.

        Raises DeadlineExceeded after timeout_s.
        """
        start = time.monotonic()
        for pause_s in self._polls(key, timeout_s, awaited):
            time.sleep(pause_s)
        return time.monotonic() - start

    def exists(self, key: str) -> bool:
        return bool(self._call("check", key))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter atomically and returns the sum. A new counter begins at 0."""
        return int(self._call("add", key, amount))

    def delete(self, key: str) -> bool:
        """Removes a key with its chunks. Returns whether the key existed."""
        existed = bool(self._call("delete_key", key))
        number = 0
        while self._call("delete_key", _chunk_key(key, number)):
            number += 1
        return existed

    def _polls(self, key: str, timeout_s: float, awaited: str) -> Iterator[float]:
        """Yields the seconds to sleep before the next look, until key exists."""
        start = time.monotonic()
        while not self.exists(key):
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                raise DeadlineExceeded(
                    f"waited {waited_s:.2f} s for {awaited}: deadline of {timeout_s:g} s reached "
                    f"(key {self._prefix}{key}, {self._address})"
                )
            pause_s = min(max(waited_s * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            yield min(pause_s, timeout_s - waited_s)

    def _get(self, key: str) -> bytes:
        # The store's own get would block on a missing key until the client's timeout.
        if not self.exists(key):
            raise StoreError(
                f"{self._address}: key {self._prefix}{key} is not there (removed, or never written)"
            )
        return self._call("get", key)

    def _call(self, operation: str, key: str, *values: Any) -> Any:
        name = self._prefix + key
        method = getattr(self._store, operation)
        try:
            if operation == "check":  # takes a list of keys
                return method([name])
            return method(name, *values)
        except dist.DistError as error:
            raise StoreError(
                f"{self._address}: {operation} of {name} failed ({_first_line(error)}); the "
                "process that hosts the store has probably ended, see the launcher's log"
            ) from error


class NoAnswer(PaNpuError):
    """A bounded call has no result.

    asked: True if the call was made and did not return in time; False if it was not made, because
    an earlier one had not returned.
    """

    def __init__(self, asked: bool) -> None:
        super().__init__("it does not answer" if asked else "it did not answer before")
        self.asked = asked


class BoundedCalls:
    """Gives a deadline to calls without one, such as those of a store whose process is stopped.

    Calls run one after another in a thread called `name`. timeout_s: how long each caller waits.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # One thread, because the callee keeps one connection. No executor, because the program
        # would wait at its end for a call that never returns.
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._gave_up = False
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def __call__(self, call: Callable[[], T]) -> T:
        """Returns what the call returns, or raises what it raises.

        Raises NoAnswer after timeout_s, and from then on at once.
        """
        if self._gave_up:  # later callers need not wait as long again
            raise NoAnswer(asked=False)
        future: Future[T] = Future()
        self._calls.put((call, future))
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            if future.done():  # it ended at the last moment, or the call itself raised a timeout
                return future.result()
            self._gave_up = True
            raise NoAnswer(asked=True) from None

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # the caller gets every error
                future.set_exception(error)


def _chunk_key(key: str, number: int) -> str:
    return f"{key}#{number}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def host_store(host: str, port: int) -> dist.TCPStore:
    """Hosts a c10d store on host:port for as long as the returned object exists.

    port: 0 chooses a free one. Raises OSError if the port is taken.

    The store gets a socket that is bound to `host`. By itself it would listen on all addresses of
    the machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        store = _store_on(listener, host)
        listener.detach()  # the store owns the socket now
    return store


def _store_on(listener: socket.socket, host: str) -> dist.TCPStore:
    arguments: dict[str, Any] = {
        "host_name": host,
        "port": listener.getsockname()[1],
        "is_master": True,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=_STORE_TIMEOUT_S),
        "master_listen_fd": listener.fileno(),
    }
    try:
        return dist.TCPStore(**arguments)
    except NotImplementedError:
        # the libuv server of torch 2.7 accepts no socket; the other server has no size limit
        return dist.TCPStore(**arguments, use_libuv=False)
