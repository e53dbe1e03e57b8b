"""Ranks of fsdp send their own rows: two copies of two shards, of a model, its adapters alone, and merged.

A shard that is sent otherwise than it is trained is found, and its tensor named (I5).
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pa_npu.config.schema import Config
from pa_npu.engines.live_weights import LiveReport, LiveTensor, LiveWeights
from pa_npu.engines.protocol import LoadedWeights
from pa_npu.errors import InvariantViolation
from pa_npu.publish.live_memory import LiveMemoryCheck
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import OrderedContents, added
from pa_npu.weight_transfer.manifest import Assembler, Manifest, check_covered
from tests.helpers import senders_rank
from tests.helpers.adapters import make_adapter
from tests.helpers.megatron import model_config
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, run_job

pytestmark = pytest.mark.integration
RANKS, SHARDS = 4, 2


def sent_by_ranks(directory: Path, config: Config, **options: Any) -> list[dict[str, Any]]:
    """Returns what tests.helpers.senders_rank writes down, by rank."""
    run_job(Job(config, directory, module=senders_rank.__name__, options=options))
    ranks = range(config.trainer.devices)
    return [torch.load(directory / f"sent-{rank}.pt") for rank in ranks]


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
    sent = sent_by_ranks(tmp_path / "job", config, lora=kinds, faults=False)
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


def test_a_shard_that_is_not_sent_as_it_is_trained_ends_the_publish_and_its_tensor_is_named(
    tmp_path: Path,
) -> None:
    """Two ranks, of which one or both send, in fp32 and bf16, by the check of a run."""
    model = make_model(tmp_path / "model", "qwen2")
    trainer = {"backend": "fsdp", "devices": SHARDS}
    config = model_config(model, run={"dir": str(tmp_path / "run")}, trainer=trainer)
    sent = sent_by_ranks(tmp_path / "job", config, faults=True)
    sending = {"leader": 1, "shards": SHARDS}
    assert sending.keys() == set(senders_rank.SENDERS)
    for dtype in senders_rank.DTYPES:
        for senders, count in sending.items():
            check = LiveMemoryCheck()
            num_senders = arrive(check, 0, sent, f"{dtype} {senders} before")
            assert num_senders == count
            arrive(check, 1, sent, f"{dtype} {senders} {senders_rank.HONEST}")
            for fault in senders_rank.FAULTS:
                with pytest.raises(InvariantViolation) as raised:
                    arrive(check, 1, sent, f"{dtype} {senders} {fault}")
                assert re.fullmatch(message_of(fault), str(raised.value)), (dtype, senders, fault)


def arrive(check: LiveMemoryCheck, version: int, sent: list[dict[str, Any]], way: str) -> int:
    """Lets an engine load what all senders sent, and compares it. Returns the number of senders."""
    tensors, num_bytes = assembled(sent, way)
    check.expect(version, added(of_rank[way][2] for of_rank in sent))
    live = LiveWeights()
    loaded = dict(live.received(tensors.items()))
    memory = [LiveTensor(name, (name,), tensor) for name, tensor in loaded.items()]
    report = msgspec.convert(live.report(memory, Computation()), LiveReport)
    check.check(version, {"http://engine": LoadedWeights((version,), live=(report,))})
    return len(num_bytes)


def message_of(fault: str) -> str:
    named = [senders_rank.DAMAGED]
    if fault == senders_rank.EXCHANGED_TENSORS:
        named.insert(0, senders_rank.LIKE)
    names = re.escape(", ".join(named))
    return rf"I5: as weight version 1 .* in {len(named)} of \d+ tensors \({names}\); .*"
