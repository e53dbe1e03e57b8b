"""A trainer rank of a service in a process of its own, which tests.helpers.preloaded starts with a Job as JSON.

It trains two slots, one of which goes on from a file that the other has saved, and writes what a client
sees and the gradients; the first rank's answer is the service's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pa_npu import platform as platforms
from pa_npu.backends.registry import backend_module
from pa_npu.families.spec import ModelSpec
from pa_npu.service.slots import GRADIENT, MEAN, SQUARE, WEIGHTS, Slots
from pa_npu.service.wire import AdamParameters, Datum, Refused
from pa_npu.telemetry.timeline import Timeline
from tests.helpers.service import call_of, random_datum, service_config

STEPS = 2


class Job(msgspec.Struct):
    """port: of the store. out: directory of what the first rank writes. budget: packed tokens of a
    microbatch.
    """

    rank: int
    ranks: int
    port: int
    model: str
    out: str
    budget: int


def calls(vocab: int) -> list[list[Datum]]:
    """Calls of datums with shared beginnings, of which the last has fewer than there are ranks."""
    random = np.random.default_rng(5)
    begin = random.integers(0, vocab, 40)
    group = [random_datum(random, 60, vocab, begin=begin, sampled=True) for _ in range(6)]
    others = [random_datum(random, length, vocab, sampled=True) for length in (9, 33)]
    return [group + others, others[:1]]


def main(argument: str) -> None:
    job = msgspec.json.decode(argument, type=Job)
    rank, out = job.rank, Path(job.out)
    config = service_config(
        Path(job.model),
        out,
        trainer={"backend": "fsdp", "devices": job.ranks},
        microbatch={"max_tokens": job.budget},
    )
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    spec = ModelSpec.from_config(config)
    timeline = Timeline(None, "")
    backend: Any = backend_module("fsdp").create(
        config, spec, platforms.get("cpu"), store, rank, rank, timeline
    )
    slots = Slots(config, backend, "base of the test")
    slots.create("a", 7)
    seen: dict[str, Any] = {"losses": [], "logprobs": [], "metrics": []}
    _, microbatches = slots._prepared(call_of(calls(spec.vocab_size)[0], "importance_sampling"))
    seen["microbatches"] = slots.ranks.all_of(len(microbatches), int)
    for step in range(STEPS):
        for data in calls(spec.vocab_size):
            outputs = slots.forward_backward("a", call_of(data, "importance_sampling"))
            seen["losses"].append(outputs.loss)
            seen["logprobs"] += [torch.from_numpy(values) for values in outputs.logprobs]
        seen[f"gradient {step}"] = slots.ranks.joined(slots._slots["a"].parts[GRADIENT])
        seen["metrics"].append(slots.step("a", AdamParameters(learning_rate=1e-2)))
    for data in calls(spec.vocab_size):
        forward = slots.forward("a", call_of(data, "importance_sampling"))
        seen["losses"].append(forward.loss)
    file = out / "state.safetensors"
    slots.save("a", file, [WEIGHTS, MEAN, SQUARE, GRADIENT])
    slots.ranks.all_of(None, type(None))  # the file is there
    slots.create("b", 8)
    slots.load("b", file, with_optimizer=True)
    seen["same"] = slots.digest("a") == slots.digest("b") == slots.show(file)
    slots.load("b", file, with_optimizer=False)
    seen["refused"] = refusals(slots, data, file)
    seen["digest"] = slots.digest("a")
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    backend.close()


def refusals(slots: Slots, data: list[Datum], file: Path) -> list[str]:
    """Returns the reasons of what only one rank sees: a gradient that is not finite, a file."""
    huge = Datum(
        data[0].tokens,
        {**data[0].inputs, "advantages": np.full(len(data[0].tokens), 3e38, np.float32)},
    )
    reasons = []
    for refused in (
        lambda: slots.forward_backward("a", call_of([huge], "importance_sampling")),
        lambda: slots.load("a", file if slots.ranks.rank else file / "none", with_optimizer=False),
    ):
        try:
            refused()
        except Refused as refusal:
            reasons.append(str(refusal))
    return reasons
