"""HF export from several trainer ranks: transformers loads it and finds the tensors that the trainers had loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.helpers.models import make_model
from tests.helpers.weights_rank import start_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("family", "tied", "trainer", "max_file_bytes"),
    [
        ("qwen3", False, {"devices": 4, "tensor_parallel": 2, "pipeline_parallel": 2}, 100_000),
        ("llama", True, {"devices": 2}, 2**30),
        ("qwen3_moe", False, {"devices": 4, "pipeline_parallel": 2, "expert_parallel": 2}, 100_000),
    ],
    ids=["qwen3-untied-TP2-PP2", "llama-tied-DP2", "qwen3_moe-PP2-EP2"],
)
def test_export_of_a_parallel_job_is_the_model(
    family: str, tied: bool, trainer: dict[str, Any], max_file_bytes: int, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", family, tied=tied, seed=1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    target = tmp_path / "hf"
    job = {
        "trainer": trainer,
        "models": [str(model)],
        "store": ["127.0.0.1", store.port],
        "workers": 0,
        "bucket_mib": 1.0,
        "export": str(target),
        "max_file_bytes": max_file_bytes,
    }
    ranks = start_ranks(job, trainer["devices"], tmp_path)
    try:
        codes = [process.wait(180) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join(
        (tmp_path / f"rank{rank}.log").read_text()[-3000:] for rank in range(trainer["devices"])
    )
    assert codes == [0] * trainer["devices"], logs

    files = list(target.glob("*.safetensors"))
    assert (len(files) > 2) == (max_file_bytes < 2**20), files
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    actual, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert (
        actual.dtype == torch.float32
        and json.loads((target / "config.json").read_text())["dtype"] == "float32"
    )
    for (name, ours), theirs in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(actual.eval()(tokens).logits, expected.eval()(tokens).logits)
