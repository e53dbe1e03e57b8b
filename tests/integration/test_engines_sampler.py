"""vLLM's own sampler, built without the log-prob mode as vllm-ascend builds it, reports the sampled distribution's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pa_npu.engines.vllm.worker import apply_logprobs_mode

TEMPERATURE = 0.5


def reported(sampler: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and their log-probs."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    rows = len(logits)
    wanted = {
        "temperature": torch.full((rows,), TEMPERATURE),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    output = sampler(logits.clone(), SamplingMetadata(**wanted))
    return output.sampled_token_ids[:, 0].long(), output.logprobs_tensors.logprobs[:, 0]


def test_logprobs_are_those_of_the_sampled_distribution() -> None:
    sampler_module = pytest.importorskip("vllm.v1.sample.sampler")
    sampler = sampler_module.Sampler()
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = reported(sampler, logits)
    wanted = (logits / TEMPERATURE).log_softmax(-1)
    assert (logprobs - wanted[torch.arange(6), tokens]).abs().max() > 0.1, (
        "as built it reports another distribution's"
    )

    worker = SimpleNamespace(
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        model_runner=SimpleNamespace(sampler=sampler),
    )
    apply_logprobs_mode(worker)
    tokens, logprobs = reported(sampler, logits)
    assert (logprobs - wanted[torch.arange(6), tokens]).abs().max() < 1e-5
