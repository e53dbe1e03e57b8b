"""The publish group between the trainers' and the engines' environment: buckets, giving up, and a group made after that.

The engine's end is `python -m pa_npu.launcher.selftest.collectives PORT KIND`, in the interpreter
of engines, which need not have more than torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.errors import DeadlineExceeded, UserError
from pa_npu.launcher.selftest.parts import Bench, Finding
from pa_npu.weight_transfer.collectives import rules
from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.transport import (
    Deadline,
    broadcast,
    drop_group,
    join_group,
    run_and_exit,
    wait,
)

_TYPES = (torch.float32, torch.bfloat16, torch.uint8)
# elements: larger than what sockets hold, so that one that nobody receives stays pending
_BUCKET = 2**24
_TIMED = 8
_GIVEN_UP_AFTER_S = 2.0
_ENDED_WITHIN_S = 60.0
_DEADLINE_S = 120.0


def collectives(bench: Bench) -> list[Finding]:
    """Runs the trainer's end, rank 0.

    On a single device that no group can have twice there is nothing to find: a run shows its way.
    """
    platform = platforms.get(bench.device)
    if platform.device_count() < 2 and not rules(platform.comm_backend).shares_device:
        print("one device: weights go through its memory, without a group")
        return []
    server = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_DEADLINE_S),
    )
    with _engine_end(bench, platform.visible_devices_env, server.port) as far:
        try:
            return _trainer_end(server, platform)
        finally:
            far.kill()


def _trainer_end(server: dist.TCPStore, platform: Any) -> list[Finding]:
    platform.set_device(0)
    device = platform.device(0)
    buckets = _buckets(device)
    group = _join(server.port, "selftest", 0, platform, device)
    _send(group, buckets)
    start_s = time.monotonic()
    _send(group, buckets[:1] * _TIMED)
    seconds = time.monotonic() - start_s
    differing = _differing(server, "first", buckets)
    buckets[0][0] += 1
    seen = _differing(server, "first", buckets)

    start_s = time.monotonic()
    try:  # the other end does not take part
        wait(
            broadcast(group, buckets[0]),
            Deadline(_GIVEN_UP_AFTER_S),
            "a broadcast that nobody receives",
            "none is needed",
        )
        raise UserError(
            "a broadcast that nobody receives was done; look whether collectives wait for their "
            "members"
        )
    except DeadlineExceeded:
        drop_group(group, device, "the self-test gives it up")
    ended_s = time.monotonic() - start_s
    server.set("go on", "")
    _send(_join(server.port, "selftest.1", 0, platform, device), buckets)
    gbytes = _TIMED * buckets[0].numel() * buckets[0].element_size() / 1e9
    return [
        Finding("buckets that arrived otherwise", differing, 0),
        Finding("control: buckets of which a changed one is told apart", seen, 1, least=True),
        Finding("broadcasts to one engine", gbytes / seconds, unit="GB/s"),
        Finding("giving up a broadcast", ended_s, _ENDED_WITHIN_S, unit="s"),
        Finding(
            "buckets that arrived otherwise in the group after it",
            _differing(server, "second", buckets),
            0,
        ),
    ]


def engine_end(port: int, kind: str) -> int:
    """Rank 1: receives, tells digests, leaves the group that is given up, and receives in the next
    one.
    """
    platform = platforms.get(kind)
    platform.set_device(0)
    device = platform.device(0)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_DEADLINE_S)
    )
    buckets = [torch.zeros_like(bucket) for bucket in _buckets(device)]
    group = _join(port, "selftest", 1, platform, device)
    _send(group, buckets)
    _send(group, buckets[:1] * _TIMED)
    store.set("first", " ".join(digest_of([bucket]) for bucket in buckets))
    store.wait(["go on"])
    drop_group(group, device, "the self-test gives it up")
    _send(_join(port, "selftest.1", 1, platform, device), buckets)
    store.set("second", " ".join(digest_of([bucket]) for bucket in buckets))
    return 0


def _engine_end(bench: Bench, visible: str | None, port: int) -> subprocess.Popen[bytes]:
    """Start it in the engines' interpreter, on the second device."""
    named = [
        word.partition("=")[2] for word in bench.overrides if word.startswith("rollout.python=")
    ]
    package = str(Path(__file__).parents[3])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    }
    if visible is not None:
        devices = os.environ.get(visible, "0,1").split(",")
        environment[visible] = devices[1]
    arguments = ["-m", "pa_npu.launcher.selftest.collectives", str(port), bench.device]
    return subprocess.Popen([named[-1] if named else sys.executable, *arguments], env=environment)


def _buckets(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 200, (_BUCKET,), generator=generator).to(dtype).to(device)
        for dtype in _TYPES
    ]


def _join(
    port: int, name: str, rank: int, platform: Any, device: torch.device
) -> dist.ProcessGroup:
    backend = platform.comm_backend
    return join_group(
        "127.0.0.1", port, name, rank, 2, backend, _DEADLINE_S, "self-test", device=device
    )


def _send(group: dist.ProcessGroup, buckets: list[torch.Tensor]) -> None:
    """Rank 0 sends, rank 1 receives into them."""
    for bucket in buckets:
        wait(
            broadcast(group, bucket),
            Deadline(_DEADLINE_S),
            "a bucket",
            "look at logs/collectives.log",
        )


def _differing(server: dist.TCPStore, key: str, buckets: list[torch.Tensor]) -> int:
    theirs = server.get(key).decode().split()
    return sum(
        digest_of([bucket]) != digest for bucket, digest in zip(buckets, theirs, strict=True)
    )


if __name__ == "__main__":
    run_and_exit(lambda: engine_end(int(sys.argv[1]), sys.argv[2]))
