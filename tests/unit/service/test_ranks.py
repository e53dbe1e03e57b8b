"""Several trainer ranks of a service: losses, gradients, steps and files are those of one rank, and refusals are common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.helpers import service_rank
from tests.helpers.models import make_model
from tests.helpers.preloaded import start_rank

LIMIT_S = 120.0


def seen_by(ranks: int, model: Path, out: Path, *, budget: int) -> dict[str, Any]:
    """Returns what the first of so many ranks sees. budget: packed tokens of a microbatch."""
    out.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        job = service_rank.Job(rank, ranks, store.port, str(model), str(out), budget)
        argument = msgspec.json.encode(job).decode()
        log = out / f"rank{rank}.log"
        processes.append(start_rank(service_rank.__name__, argument, environment, log))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
        logs = [file.read_text() for file in sorted(out.glob("rank*.log"))]
        assert codes == [0] * ranks, "\n".join(logs)
    finally:
        for process in processes:
            process.kill()
    return dict(torch.load(out / "seen.pt", weights_only=False))


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """One has all datums of a call in a microbatch, the two have several, and not the same number."""
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    one = seen_by(1, model, tmp_path / "one", budget=1000)
    two = seen_by(2, model, tmp_path / "two", budget=90)
    assert one["microbatches"] == [1]
    assert min(two["microbatches"]) > 1 and len(set(two["microbatches"])) == 2
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5, abs=1e-5)
    torch.testing.assert_close(two["logprobs"], one["logprobs"], rtol=1e-5, atol=1e-5)
    for step in range(2):
        expected, gradient = one[f"gradient {step}"], two[f"gradient {step}"]
        assert expected.keys() == gradient.keys()
        largest = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name], value, rtol=2e-5, atol=2e-6 * largest)
    norms = [[step["grad_norm"] for step in seen["metrics"]] for seen in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert one["same"] and two["same"], "a file has whole tensors, and a slot goes on from it"
    assert one["digest"] != two["digest"], "control: a sum in another order has other last bits"
    for seen in (one, two):
        first, second = seen["refused"]
        assert "not finite" in first and "cannot be read" in second, "refused on both ranks"
