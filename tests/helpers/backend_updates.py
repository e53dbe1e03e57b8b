"""The two updates by which training backends are compared, and the same updates by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pa_npu.checkpoints.saving import Checkpointing
from pa_npu.config.schema import Config
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, build_microbatches
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner, Update
from tests.helpers.backend import Source
from tests.helpers.groups import trained_advantages
from tests.helpers.megatron import model_config
from tests.helpers.trainer_rank import make_groups

Make = Callable[[Config], Learner]
"""Makes a Learner over a fresh backend with the weights of config.model.path."""

DTYPES = [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"]
"""Types of the model in tests of the suite that take seconds: CI has that of production."""

GROUPS = 4
RESPONSES = 4
LEARNING_RATE = 3e-3


def config_of(model: Path, /, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
        "schedule": {"prompts_per_iteration": GROUPS, "updates_per_iteration": 2},
        "algorithm": {"kl_coef": 0.1},
        "optimizer": {"learning_rate": LEARNING_RATE, "clip_grad": 0.0, "epsilon": 1e-3},
        "publish": {"noise_margin": None},
    }
    return model_config(
        model,
        **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}},
    )


def shares() -> list[list[Group]]:
    """Returns the groups of the two updates."""
    groups = make_groups(0, GROUPS, RESPONSES, seed=5)
    return [groups[: GROUPS // 2], groups[GROUPS // 2 :]]


def microbatches(groups: list[Group]) -> list[Microbatch]:
    """Returns the microbatches of groups, two of each group."""
    built: list[Microbatch] = []
    for group in groups:
        built += build_microbatches(group, RESPONSES // 2, True, 1)
    return built


def by_hand(policy: Any) -> list[dict[str, torch.Tensor]]:
    """Returns an HF model's weights after each of the two updates: the clipped loss against the
    first weights, plus 0.1 K3 to these.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )

    def logprobs(group: Group) -> list[torch.Tensor]:
        values = []
        for tokens, trained in zip(
            group.sequences(), np.split(group.trained, group.offsets()[1:-1]), strict=True
        ):
            ids = torch.from_numpy(tokens.astype(np.int64))
            table = policy(ids[None]).logits[0, :-1].log_softmax(-1)
            values.append(table.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(trained[1:])])
        return values

    after = []
    with torch.no_grad():
        first = {group.index: logprobs(group) for share in shares() for group in share}
    for share in shares():
        terms = []
        for group in share:
            advantages = np.split(
                group.advantages[group.trained], np.cumsum(group.trained_lengths)[:-1]
            )
            for new, old, advantage in zip(
                logprobs(group), first[group.index], advantages, strict=True
            ):
                value, ratio = torch.from_numpy(advantage), (new - old).exp()
                kl = (old - new).exp() - 1 - (old - new)
                terms.append(0.1 * kl - torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value))
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        optimizer.step()
        after.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    return after


def save(learner: Learner, run: Path, version: int) -> None:
    """Saves the learner as it is, as a run in the directory `run` does."""
    config = learner._config
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})
    Checkpointing(config, learner, lambda version: {}, Timeline(None, "")).finish(version)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def train_share(learner: Learner, share: list[Group]) -> Update:
    """Makes an update over these groups, whose advantages are known."""
    source = Source(microbatches(share))
    source.advantages = {g.index: trained_advantages(g) for g in share}
    learner.accumulate(source)
    return learner.step()
