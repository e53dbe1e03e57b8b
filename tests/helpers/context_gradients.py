"""One rank of a context group whose backend computes gradients and log-probs of groups, compared with transformers'.

    python -m tests.helpers.context_gradients JOB.json      as tests.helpers.trainer_rank

Rank 0 writes the differences by case to JOB's "out": "logprobs", the largest of log-probs;
"gradients", the largest of a gradient as a share of the tensor's largest; "distance", the norm of
all gradients' differences over theirs. Beside shared prompts there are trees of sessions three
turns deep, separate sequences, and two groups packed into one microbatch.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, pack
from tests.helpers.trainer_rank import make_groups
from tools.bench_trainer import TREES, make_sessions

VOCAB_SIZE = 128


def microbatches(multiple: int) -> list[tuple[str, list[Group], Microbatch]]:
    """Shared prompts, trees, separate sequences, and two groups in one microbatch.

    multiple: of a microbatch's rows.
    """
    first, second, third = make_groups(0, 3, 4, seed=5)
    shape = argparse.Namespace(prompt=5, response=6, responses=2)
    sessions = make_sessions(shape, VOCAB_SIZE, TREES["last turn tried three times"], index=0)
    # token 0 pads, and has no gradient in transformers' embedding
    sessions = replace(sessions, tokens=np.maximum(sessions.tokens, 1))
    return [
        ("shared", [first], pack([first], True, multiple)),
        ("trees", [sessions], pack([sessions], True, multiple)),
        ("separate", [second], pack([second], False, multiple)),
        ("packed", [third, first], pack([third, first], True, multiple)),
    ]


class Source:
    """A MicrobatchSource of one microbatch."""

    waited_s = 0.0
    traffic = None
    by_rule = ()

    def __init__(self, microbatch: Microbatch) -> None:
        self._left = [microbatch]
        self.advantages: dict[int, Any] = {}

    @property
    def is_last(self) -> bool:
        return not self._left

    def settle(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        if not self._left:
            raise StopIteration
        return self._left.pop()


class WeightedSum:
    """An objective: the sum of log-probs, and of entropies, times fixed weights."""

    first_sampled = 0
    entropy_gradient = True

    def __init__(self) -> None:
        self.logprobs: torch.Tensor | None = None

    def begin(self) -> None:
        """Nothing is looked at."""

    def balance(self, microbatch: Microbatch) -> float:
        return 0.0

    def sent(self, microbatch: Microbatch, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def loss(self, microbatch: Microbatch, outputs: Any) -> torch.Tensor:
        self.logprobs = outputs.policy.values.detach().clone()
        weights = target_weights(microbatch)
        return (outputs.policy.values * weights + 0.1 * outputs.entropy * weights).sum()


def target_weights(microbatch: Microbatch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(microbatch.targets))
    return torch.randn(len(microbatch.targets), generator=generator)


def expected(
    path: str, groups: list[Group], microbatch: Microbatch
) -> tuple[torch.Tensor, torch.nn.Module]:
    """Log-probs by transformers of whole sequences one by one, and the model with gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs = []
    entropies = []
    for group in groups:
        for tokens, trained in zip(
            group.sequences(), np.split(group.trained, group.offsets()[1:-1]), strict=True
        ):
            ids = torch.from_numpy(np.asarray(tokens).astype(np.int64))
            log_softmax = model(ids[None]).logits[0, :-1].log_softmax(-1)
            places = torch.from_numpy(np.flatnonzero(trained))
            rows = log_softmax[places - 1]
            logprobs.append(rows.gather(-1, ids[places, None])[:, 0])
            entropies.append(-(rows.exp() * rows).sum(-1))
    values = torch.cat(logprobs)
    weights = target_weights(microbatch)
    (values * weights + 0.1 * torch.cat(entropies) * weights).sum().backward()
    return values.detach(), model


def main(job_file: str) -> None:
    from pa_npu import platform as platforms
    from pa_npu.backends.registry import backend_module
    from pa_npu.config.load import load_config
    from pa_npu.control.channel import connect
    from pa_npu.families.spec import ModelSpec
    from pa_npu.telemetry.timeline import Timeline

    job: dict[str, Any] = json.loads(Path(job_file).read_text())
    config = load_config([job["config"]])
    host, port = os.environ["PA_NPU_STORE"].rsplit(":", 1)
    store = connect(host, int(port), 60)
    rank = int(os.environ["RANK"])
    spec = ModelSpec.read(config.model.path)
    backend = backend_module(config.trainer.backend).create(
        config,
        spec,
        platforms.get("cpu"),
        dist.PrefixStore("trainer", store),
        rank,
        0,
        Timeline(None, ""),
    )
    errors: dict[str, dict[str, float]] = {}
    for name, groups, microbatch in microbatches(config.trainer.pad_multiple):
        objective: Any = WeightedSum()
        backend.accumulate(Source(microbatch), objective)
        gradients = whole_gradients(backend, config, spec)
        logprobs, model = expected(config.model.path, groups, microbatch)
        assert objective.logprobs is not None
        errors[name] = {
            "logprobs": float((objective.logprobs - logprobs).abs().max()),
            **compared(backend, gradients, model, spec),
        }
    if rank == 0:
        Path(job["out"]).write_text(json.dumps([errors]))
    backend.close()


def whole_gradients(backend: Any, config: Any, spec: Any) -> dict[str, torch.Tensor]:
    """By transformers' names, of fsdp: every shard gathered."""
    if config.trainer.backend != "fsdp":
        return {}
    return {
        name: weight.grad.full_tensor() for name, weight in backend._policy.named_weights().items()
    }


def compared(
    backend: Any, gradients: dict[str, torch.Tensor], model: torch.nn.Module, spec: Any
) -> dict[str, float]:
    """Returns "gradients" and "distance" of a rank's gradients to those of the model.

    gradients: of fsdp; Megatron's are in its main_grad.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if gradients:
        expected = {name: weight.grad for name, weight in model.named_parameters()}
        assert gradients.keys() == expected.keys()
        pairs = [(gradients[name], cast(torch.Tensor, grad)) for name, grad in expected.items()]
    else:
        from tests.helpers.megatron import gradient_pairs

        stage = backend._stage
        names = {name: p.main_grad for name, p in stage.policy.named_parameters()}
        pairs = list(gradient_pairs(names, model, spec).values())
    largest = 0.0
    difference = 0.0
    whole = 0.0
    for ours, theirs in pairs:
        delta = ours.double() - theirs.double()
        largest = max(largest, float(delta.abs().max() / theirs.abs().max()))
        difference += float(delta.square().sum())
        whole += float(theirs.double().square().sum())
    return {"gradients": largest, "distance": (difference / whole) ** 0.5}
