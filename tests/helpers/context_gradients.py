"""One rank of a context group whose backend computes gradients and log-probs of groups, compared with transformers'.

    python -m tests.helpers.context_gradients JOB.json      as tests.helpers.trainer_rank

Rank 0 writes the largest differences, by backend, to JOB's "out": of log-probs, and of a gradient
as a share of the tensor's largest. Beside shared prompts there is a tree, and two groups packed
into one microbatch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, pack
from tests.helpers.trainer_rank import make_groups

PAD = 2


def microbatches() -> list[tuple[str, list[Group], Microbatch]]:
    """Shared prompts, separate sequences, and two groups in one microbatch."""
    first, second, third = make_groups(0, 3, 4, seed=5)
    return [
        ("shared", [first], pack([first], True, PAD)),
        ("separate", [second], pack([second], False, PAD)),
        ("packed", [third, first], pack([third, first], True, PAD)),
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
    for name, groups, microbatch in microbatches():
        objective: Any = WeightedSum()
        backend.accumulate(Source(microbatch), objective)
        gradients = whole_gradients(backend, config, spec)
        logprobs, model = expected(config.model.path, groups, microbatch)
        assert objective.logprobs is not None
        errors[name] = {"logprobs": float((objective.logprobs - logprobs).abs().max())}
        if config.trainer.backend == "fsdp":
            theirs = {n: p.grad for n, p in model.named_parameters()}
            assert gradients.keys() == theirs.keys()
            errors[name]["gradients"] = max(
                float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items()
            )
        else:
            from tests.helpers.megatron import relative_gradient_errors

            stage = cast(Any, backend)._stage
            for parameter in stage.policy.parameters():
                parameter.grad = parameter.main_grad
            errors[name]["gradients"] = max(relative_gradient_errors(stage, model, spec).values())
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
