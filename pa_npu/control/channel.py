"""StoreChannel: deadlines and large values on top of the c10d key-value store that the launcher hosts.

A wait polls `check` instead of calling the store's own blocking `wait`: that one holds the client
for its whole duration, ignores Python signals, and logs two warnings per expiry. The pause between
polls grows with the time already waited (1% of it), so a wait ends at most 1% or `_LONGEST_PAUSE_S`
late, and a long wait costs the server next to nothing. Every operation is short, hence threads may
share one channel and none blocks another.
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
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_PAUSE_SHARE = 0.01
_INLINE, _CHUNKED = b"\x00", b"\x01"
_CHUNK_HEADER = struct.Struct("<IQ")
ADDRESS_VARIABLE = "PA_NPU_ADDRESS"
"""Variable of a trainer rank: the address at which its node's processes listen."""
_STORE_TIMEOUT_S = 30.0  # of a store that this process hosts


def attempt_prefix(attempt: int | None = None) -> str:
    """Prefix of the keys of one attempt of a run: what is started again must not meet what was
    there before.

    attempt: None is that of this process (PA_NPU_ATTEMPT).
    """
    return f"pa/{os.environ.get('PA_NPU_ATTEMPT', '0') if attempt is None else attempt}/"


class StoreError(PaNpuError):
    """The store cannot be reached any more, or a key that must be there is not."""


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A new client of the store at host:port.

    Raises DeadlineExceeded when nothing listens there within timeout_s.
    """
    start = time.monotonic()
    while True:
        remaining = timeout_s - (time.monotonic() - start)
        try:
            # A plain socket first: TCPStore's own retries overrun their timeout and log C++ stack
            # traces.
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
    """Chunked, deadline-bound access to one c10d store under a key prefix.

    Safe to share between threads.
    """

    def __init__(self, store: dist.Store, prefix: str = "pa/0/") -> None:
        self._store = store
        self._prefix = prefix
        self._address = (
            f"store at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else "store"
        )

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores data under key; the key becomes visible only when all of it is there.

        Replaces an earlier value.
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
        """The value of a key that is there; raises StoreError at once if it is not (use wait_bytes
        to wait).
        """
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

    def wait_bytes(self, key: str, timeout_s: float, what: str) -> bytes:
        """Waits for key and returns its value.

        `what` completes "waited 3 s for ...", sender included.
        """
        self.wait(key, timeout_s, what)
        return self.get_bytes(key)

    async def wait_bytes_async(self, key: str, timeout_s: float, what: str) -> bytes:
        """`wait_bytes` for the event loop: cancellable, and nothing but the short polls runs on the
        loop.
        """
        for pause_s in self._polls(key, timeout_s, what):
            await asyncio.sleep(pause_s)
        return self.get_bytes(key)

    def wait(self, key: str, timeout_s: float, what: str) -> float:
        """Returns the seconds waited until key is there; raises DeadlineExceeded after timeout_s."""
        start = time.monotonic()
        for pause_s in self._polls(key, timeout_s, what):
            time.sleep(pause_s)
        return time.monotonic() - start

    def exists(self, key: str) -> bool:
        return bool(self._call("check", key))

    def add(self, key: str, amount: int) -> int:
        """Atomically adds to a counter (0 at first) and returns the sum.

        Counters are deleted like any key.
        """
        return int(self._call("add", key, amount))

    def delete(self, key: str) -> bool:
        """Removes a key with its chunks; says whether it was there."""
        found = bool(self._call("delete_key", key))
        number = 0
        while self._call("delete_key", _chunk_key(key, number)):
            number += 1
        return found

    def _polls(self, key: str, timeout_s: float, what: str) -> Iterator[float]:
        """Yields pauses in seconds until key is there."""
        start = time.monotonic()
        while not self.exists(key):
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                raise DeadlineExceeded(
                    f"waited {waited_s:.2f} s for {what}: deadline of {timeout_s:g} s reached "
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
        try:
            return getattr(self._store, operation)(
                [name] if operation == "check" else name, *values
            )
        except dist.DistError as error:
            raise StoreError(
                f"{self._address}: {operation} of {name} failed ({_first_line(error)}); the "
                "process that hosts the store has probably ended, see the launcher's log"
            ) from error


class NoAnswer(PaNpuError):
    """asked: the call was made and did not return in time; else it was not made, because one before
    it had not.
    """

    def __init__(self, asked: bool) -> None:
        super().__init__("it does not answer" if asked else "it did not answer before")
        self.asked = asked


class BoundedCalls:
    """Gives a deadline to calls that have none of their own, e.g. of a store whose process has been
    stopped.

    Calls run one after another in a thread of this name. timeout_s: how long a caller waits for its
    own.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # one thread, because what is called keeps one connection, and no executor's, because the
        # end of the program would wait for a call that never returns
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._gave_up = False
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def __call__(self, call: Callable[[], T]) -> T:
        """Call it: return what it returns, raise what it raises.

        Raises NoAnswer after timeout_s, and from then on at once.
        """
        if self._gave_up:  # whoever comes next need not wait as long again
            raise NoAnswer(asked=False)
        future: Future[T] = Future()
        self._calls.put((call, future))
        try:
            return future.result(self._timeout_s)
        except FutureTimeout:
            if future.done():  # at the last moment, or this timeout is the call's own
                return future.result()
            self._gave_up = True
            raise NoAnswer(asked=True) from None

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:  # whatever it is, the caller has to hear of it
                future.set_exception(error)


def _chunk_key(key: str, number: int) -> str:
    return f"{key}#{number}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a c10d store on host:port (0: a free port). Raises OSError when the port is taken. It
    lives as long as what is returned.

    The store gets a socket bound to `host`, because by itself it would listen on all addresses of
    the machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        store = _store_on(listener, host)
        listener.detach()  # the store's now
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
    except (
        NotImplementedError
    ):  # torch 2.7: its libuv server takes no socket, and the other one has no size limit
        return dist.TCPStore(**arguments, use_libuv=False)
