"""Groups of gloo on one device: the threads of a process, and collectives of two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import glob, json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from pa_npu.weight_transfer.gloo_device import share_device

rank, file, shares = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "share"

def loops():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    return names.count("gloo_tcp_loop")

if shares:
    assert share_device() and share_device()
for attempt in range(2):  # a process may leave its groups and make others
    store = dist.FileStore(f"{file}.{attempt}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    groups = [dist.new_group([0, 1]) for _ in range(3)] + [dist.new_group([0]), dist.new_group([1])]
    sums = []
    works = []
    for number, group in enumerate(groups[:3]):
        value = torch.full((1000,), float(rank + number))
        sums.append(value)
        works.append(dist.all_reduce(value, group=group, async_op=True))
    for work in works:
        work.wait()
    own = groups[3 + rank]
    alone = torch.ones(2)
    dist.all_reduce(alone, group=own)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60), groups[0])
    threads = loops()
    dist.barrier(groups[1])
    dist.destroy_process_group()
print(json.dumps({"sums": [value[0].item() for value in sums], "threads": threads, "alone": alone.tolist()}), flush=True)
"""


@pytest.mark.parametrize("way", ["share", "each"])
def test_groups_share_a_thread_and_compute_as_before(way: str, tmp_path: Path) -> None:
    """Also side by side, in groups of one, and made a second time."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), way],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    for result in results:
        assert result["sums"] == [1.0, 3.0, 5.0] and result["alone"] == [1.0, 1.0]
        assert result["threads"] == 1 if way == "share" else result["threads"] >= 5, "the control"
