"""One rank of a context group: attention of its rows with gathered keys, written to a file.

    python -m tests.helpers.context_rank JOB.json      with RANK and WORLD_SIZE set

JOB.json: {"store": file, "out": directory}. Every rank computes CASES and saves OUT/RANK.pt: by case
the output and the gradients of its own rows, and how many bytes the backward keeps.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pa_npu.attention import PrefixLayout, shared_prompt_attention
from pa_npu.attention.context import ContextGroup
from tests.helpers.preloaded import start_rank

HEADS = 8
KV_HEADS = 4
LAYOUTS = {
    "group": PrefixLayout.from_groups([(45, [13, 29, 7, 22])]),
    "tree": PrefixLayout((41, 13, 29, 17, 7, 22), (-1, 0, 0, 2, 0, 0)),
    "packed": PrefixLayout.from_groups([(9, [3, 30]), (21, [2]), (1, [5, 5])]).pad(4),
    "one row": PrefixLayout.from_sequences([1]),
}
CASES = [
    (layout, form, recomputes, pieces)
    for layout in LAYOUTS
    for form, recomputes, pieces in (
        ("dense", False, 1),
        ("merge", False, 1),
        ("merge", True, 4),
        ("gather", False, 4),
    )
]


def tensors(layout: PrefixLayout) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of all rows, fp64; the same on all ranks."""
    generator = torch.Generator().manual_seed(layout.total)
    return [
        torch.randn(layout.total, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def main(job_file: str) -> None:
    from pa_npu.platform import pieces as module

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(job["store"], world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    group = ContextGroup(dist.group.WORLD, multiple=2)
    results = {}
    for case in CASES:
        name, form, recomputes, pieces = case
        module._MIN_PIECE_BYTES = 1 if pieces > 1 else 2**40
        rows = group.rows_of(LAYOUTS[name])
        own = rows.row_numbers()
        whole = [
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows.layout.total))
            for x in tensors(LAYOUTS[name])
        ]
        q, k, v = (x[own].requires_grad_() for x in whole[:3])
        grad = whole[3][own]
        real = rows.total - rows.padding
        grad[real:] = 0.0

        def attend(*qkv: torch.Tensor, rows: Any = rows, form: str = form) -> torch.Tensor:
            return shared_prompt_attention(*qkv, rows, impl=form)

        out = checkpoint(attend, q, k, v, use_reentrant=False) if recomputes else attend(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        results[case] = (own[:real], [x.detach()[:real] for x in (out, *gradients)])
    torch.save(results, Path(job["out"]) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def computed_by(ranks: int, directory: Path) -> list[dict[Any, Any]]:
    """Runs `ranks` ranks and returns their results."""
    directory.mkdir()
    job_file = directory / "job.json"
    job_file.write_text(json.dumps({"store": str(directory / "store"), "out": str(directory)}))
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        start_rank(
            "tests.helpers.context_rank",
            str(job_file),
            {**environment, "RANK": str(rank)},
            directory / f"rank{rank}.log",
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((directory / f"rank{rank}.log").read_text() for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
