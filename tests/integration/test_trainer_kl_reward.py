"""KL in the reward, over several iterations of real trainer ranks, against transformers, torch's AdamW and the formulas by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.config.schema import Config
from pa_npu.samples.group import Group
from tests.helpers.groups import prompt_tokens
from tests.helpers.models import make_model
from tests.helpers.trainer_rank import Job, make_groups, run_job

pytestmark = pytest.mark.integration
GROUPS, RESPONSES, ITERATIONS, SEED = 4, 4, 3, 9
COEFFICIENT, LEARNING_RATE, EPSILON = 0.2, 1e-2, 1e-3

CASES = {
    "k1 rloo": ("k1", {"name": "rloo"}, {"devices": 1}),
    "k2 centred, clip": (
        "k2",
        {"loss": "clip", "advantage": "centred", "aggregation": "token-mean"},
        {"devices": 1},
    ),
    "k3 rloo, PP2": ("k3", {"name": "rloo"}, {"devices": 2, "pipeline_parallel": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


def make_config(
    model: Path, run_dir: Path, estimator: str, algorithm: dict[str, Any], trainer: dict[str, Any]
) -> Config:
    kl = {"kl_coef": COEFFICIENT, "kl_in": "reward", "kl_estimator": estimator}
    return Config.model_validate(
        {
            "run": {"dir": str(run_dir), "seed": SEED, "device": "cpu"},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": "unused.jsonl"},
            "rollout": {"responses_per_prompt": RESPONSES, "max_response_tokens": 16},
            "algorithm": {**algorithm, **kl},
            "optimizer": {"learning_rate": LEARNING_RATE, "epsilon": EPSILON, "clip_grad": 0.0},
            "schedule": {
                "prompts_per_iteration": GROUPS,
                "iterations": ITERATIONS,
                "order": "prompt",
            },
            "trainer": trainer,
        }
    )


def response_logprobs(model: Any, group: Group) -> list[torch.Tensor]:
    """[response tokens] for each response, one forward pass each."""
    actual = []
    prompt = torch.from_numpy(prompt_tokens(group)).long()
    responses = (
        torch.from_numpy(group.tokens[group.trained]).long().split(group.trained_lengths.tolist())
    )
    for response in responses:
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        actual.append(logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1))
    return actual


def penalty(policy: torch.Tensor, reference: torch.Tensor, estimator: str) -> float:
    """The sum over a response's tokens."""
    log_ratio = (policy - reference).double()
    terms = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}
    return float(terms[estimator].sum())


def by_hand(
    model: Path, estimator: str, rloo: bool, coefficient: float
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Final weights, and per iteration the loss and the mean k3 divergence per token."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(
        False
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    losses, divergences = [], []
    for iteration in range(ITERATIONS):
        terms, divergence, num_tokens = [], 0.0, 0
        for group in make_groups(iteration, GROUPS, RESPONSES, SEED):
            logprobs, others = response_logprobs(policy, group), response_logprobs(reference, group)
            pairs = list(zip(logprobs, others, strict=True))
            divergence += sum(penalty(ours.detach(), theirs, "k3") for ours, theirs in pairs)
            rewards = [
                float(reward) - coefficient * penalty(ours.detach(), theirs, estimator)
                for reward, (ours, theirs) in zip(group.rewards, pairs, strict=True)
            ]
            for i, ours in enumerate(logprobs):
                baseline = (
                    (sum(rewards) - rewards[i]) / (RESPONSES - 1)
                    if rloo
                    else sum(rewards) / RESPONSES
                )
                # the gradient of the clipped ratio at 1 is that of the log-prob, its value that of
                # the advantage
                term = ours if rloo else (ours - ours.detach()).exp()
                terms.append((rewards[i] - baseline) * term.sum())
                num_tokens += len(ours)
        loss = -torch.stack(terms).sum() / (GROUPS * RESPONSES if rloo else num_tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        divergences.append(divergence / num_tokens)
    return {name: value.detach() for name, value in policy.named_parameters()}, losses, divergences


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_rewards_that_contain_the_kl(
    case: str, model: Path, tmp_path: Path
) -> None:
    estimator, algorithm, trainer = CASES[case]
    config = make_config(model, tmp_path, estimator, algorithm, trainer)
    job = Job(config, tmp_path, last=ITERATIONS, export=str(tmp_path / "hf"))
    reports = run_job(job)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    weights = {name: value.detach() for name, value in exported.named_parameters()}

    rloo = "name" in algorithm
    expected, losses, divergences = by_hand(model, estimator, rloo, COEFFICIENT)
    assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert [report["kl"] for report in reports] == pytest.approx(divergences, rel=1e-3, abs=1e-6)
    assert weights.keys() == expected.keys()
    difference = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    without, _, _ = by_hand(model, estimator, rloo, 0.0)
    shown = max(float((without[name] - expected[name]).abs().max()) for name in expected)
    assert difference < 1e-5, f"{case}: weights after {ITERATIONS} iterations"
    assert shown > 50 * difference and shown > 1e-3, "without the KL the weights must be others"
