"""Ranks that are processes of a test's own file, forked with all imports, with the store between them and the test."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pa_npu.control.channel import StoreChannel, connect
from tests.helpers.preloaded import start_rank

ROOT = Path(__file__).resolve().parents[2]


class RankProcesses:
    """`main("RANK PORT")` of a module for each rank; a rank puts its result under result/RANK.

    directory: for what they print.
    """

    def __init__(self, module: str, ranks: int, timeout_s: float, directory: Path) -> None:
        self._server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.channel = StoreChannel(connect("127.0.0.1", self._server.port, 30.0))
        self._deadline = time.monotonic() + timeout_s
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._logs = [directory / f"rank{rank}.log" for rank in range(ranks)]
        self._processes = [
            start_rank(module, f"{rank} {self._server.port}", environment, log)
            for rank, log in enumerate(self._logs)
        ]

    def wait_until_all_have_added(self, key: str) -> None:
        while self.channel.add(key, 0) < len(self._processes):
            self._look()

    def results(self) -> list[Any]:
        """Returns the results of all ranks, once they have ended."""
        while any(process.poll() is None for process in self._processes):
            self._look()
        return [
            json.loads(self.channel.wait_bytes(f"result/{rank}", 1.0, f"the result of rank {rank}"))
            for rank in range(len(self._processes))
        ]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _look(self) -> None:
        died = any(process.poll() for process in self._processes)
        assert time.monotonic() < self._deadline and not died, "a rank hangs or died:\n" + (
            "\n".join(log.read_text() for log in self._logs)
        )
        time.sleep(0.02)


@contextmanager
def rank_processes(
    module: str, ranks: int, timeout_s: float, directory: Path
) -> Iterator[RankProcesses]:
    processes = RankProcesses(module, ranks, timeout_s, directory)
    try:
        yield processes
    finally:
        processes.close()
