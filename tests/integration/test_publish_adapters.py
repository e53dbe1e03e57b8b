"""publish.lora=adapter in whole runs: engines that get A and B alone generate what those with merged weights do, to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.adapters import make_adapter
from tests.helpers.launched import Launched, settings

pytestmark = pytest.mark.integration
LIMIT_S = 400
SAME = ("loss", "reward_mean", "grad_norm", "logprob_diff_max", "logprob_diff_mean")


def run(
    tiny: Path, directory: Path, **keys: object
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], float]:
    """Its records, the adapters that it ends with, and MiB of a publish that rank 0 sends."""
    directory.mkdir()
    launched = Launched(directory, "run", *settings(tiny, directory / "run", **keys))
    try:
        assert launched.popen.wait(LIMIT_S) == 0, launched.output
    finally:
        launched.close()
    records = [
        json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    logs = "".join(file.read_text() for file in (directory / "run").rglob("*trainer-0*.log"))
    sent = {
        float(size)
        for size in re.findall(r"published version \d+, ([0-9.]+) MiB of it from here", logs)
    }
    assert len(sent) == 1, logs[-3000:]
    return records, load_file(directory / "run" / "hf" / "adapter_model.safetensors"), sent.pop()


@pytest.mark.parametrize(
    ("backend", "keys"),
    [
        # both engines merge what they get in tests/helpers/engine_model_conformance.py, to the bit in
        # unit/test_publish_adapters.py
        pytest.param("transformers", {}, id="transformers", marks=pytest.mark.nightly),
        pytest.param("vllm", {}, id="vllm", marks=pytest.mark.nightly),
        pytest.param(
            "transformers",
            {"schedule__max_staleness": 1, "publish__mode": "delayed", "schedule__iterations": 3},
            id="delayed",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_is_that_of_merged_weights_to_the_bit(
    backend: str, keys: dict[str, object], tiny: Path, tmp_path: Path
) -> None:
    """On from an adapter, on two trainers that share the model, with a checked log-prob difference
    after each publish.
    """
    chosen = {
        "rollout__backend": backend,
        "trainer__backend": "fsdp",
        "trainer__devices": 2,
        "model__adapter": make_adapter(tiny / "model", tmp_path / "adapter"),
        "schedule__order": "prompt",
        "optimizer__learning_rate": 1e-2,
        "algorithm__kl_coef": 0.01,
        "reward__functions": '[{name: format, pattern: "[0-4]"}]',
        "data__test": "null",
        **keys,
    }
    merged, of_merged, whole_mib = run(tiny, tmp_path / "merged", **chosen)
    alone, of_alone, adapter_mib = run(tiny, tmp_path / "alone", **chosen, publish__lora="adapter")
    assert [[record[name] for name in SAME] for record in alone] == [
        [record[name] for name in SAME] for record in merged
    ]
    if "schedule__max_staleness" not in keys:  # else engines are a version behind
        assert all(record["logprob_diff_max"] < 1e-5 for record in alone)
    assert of_alone.keys() == of_merged.keys()
    assert all(torch.equal(tensor, of_merged[name]) for name, tensor in of_alone.items())
    first = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(not torch.equal(tensor, first[name]) for name, tensor in of_alone.items()), (
        "something was trained"
    )
    assert adapter_mib < whole_mib / 3
