"""Ranks of fsdp send their own rows: two copies of two shards, of a model, its adapters alone, and merged."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.weight_transfer.contents import OrderedContents, added
from pa_npu.weight_transfer.manifest import Assembler, Manifest, check_covered
from tests.helpers.adapters import make_adapter
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job

pytestmark = pytest.mark.integration
RANKS, SHARDS = 4, 2


def assembled(sent: list[dict[str, Any]], way: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Returns what an engine gets from all senders of one way, and the bytes of each."""
    parts = [of_rank[way] for of_rank in sent if way in of_rank]
    senders = [(Manifest.from_json(m), buckets) for m, buckets, _ in parts if m is not None]
    manifests = [manifest for manifest, _ in senders]
    check_covered(manifests)
    assembler = Assembler(*manifests)
    tensors: dict[str, torch.Tensor] = {}
    turns = zip_longest(
        *(zip(manifest.buckets, buckets, strict=True) for manifest, buckets in senders)
    )
    for turn in turns:
        for message in turn:
            if message is not None:
                tensors.update(assembler.completed(*message))
    return tensors, [manifest.num_bytes for manifest in manifests]


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_engines_get_the_same_bits_of_one_two_and_four_senders(
    adapters: bool, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    sections: dict[str, Any] = {"model": {"dtype": "bf16"}}
    if adapters:
        sections["model"]["adapter"] = str(make_adapter(model, tmp_path / "adapter"))
    config = model_config(
        model,
        run={"dir": str(tmp_path / "run")},
        trainer={"backend": "fsdp", "devices": RANKS, "shards": SHARDS},
        rollout={"responses_per_prompt": 4},
        schedule={"prompts_per_iteration": 4},
        **sections,
    )
    kinds = ["merged", "adapter"] if adapters else ["merged"]
    job = Job(
        config, tmp_path / "job", module="tests.helpers.senders_rank", options={"lora": kinds}
    )
    run_job(job)
    sent = [torch.load(job.directory / f"sent-{rank}.pt") for rank in range(RANKS)]
    for kind in kinds:
        expected, (total,) = assembled(sent, f"{kind} leader")
        contents = OrderedContents()
        for name, tensor in expected.items():
            contents.add(name, tensor)
        trained = contents.read()
        for senders, count in (("leader", 1), ("shards", SHARDS), ("all", RANKS)):
            way = f"{kind} {senders}"
            tensors, num_bytes = assembled(sent, way)
            assert len(num_bytes) == count and sum(num_bytes) == total
            assert max(num_bytes) < 1.15 * total / count
            assert tensors.keys() == expected.keys()
            wrong = [name for name in expected if not torch.equal(tensors[name], expected[name])]
            assert not wrong, f"{way}: {wrong}"
            summed = added(of_rank[way][2] for of_rank in sent if way in of_rank)
            assert summed == trained, "each element is summed up once, in the model that trains"
