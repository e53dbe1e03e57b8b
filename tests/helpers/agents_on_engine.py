"""Agents whose policy is a real engine, and what transformers says of each token that they were answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pa_npu.config.schema import Config
from pa_npu.coordinator.episode import GroupGenerate
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.registry import make_environment, opened
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.samples.types import Sample
from tests.helpers.engine_process import API_KEY, EngineProcess

SAMPLING = Sampling(max_tokens=64, temperature=1.0)
TOLERANCE = 1e-3  # of a log-prob in fp32; another token's is off by more


class EngineSession:
    """Lets one engine answer, as GroupSession lets several."""

    def __init__(self, client: Any, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s

    async def generate(
        self, tokens: Any, n: int, seed: int, sampling: Sampling, images: Any = ()
    ) -> list[Generation]:
        written = await self._client.generate(
            tokens, n, seed, sampling, deadline_s=self._deadline_s
        )
        return [replace(generation, version=0) for generation in written]


async def samples_as_sampled(
    engine: EngineProcess,
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    num_sessions: int,
    timeout_s: float,
) -> list[Sample]:
    """Returns the samples of so many sessions for each row of the taught calculator's task.

    Log-probs of every trained token, behind the very tokens before it, are those of transformers.
    """
    directory: Path = engine.model
    tokenizer = load_tokenizer(str(directory), False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    samples: list[Sample] = []
    await engine.wait_ready()
    client = engine.kind.client(engine.url, len(tokenizer), API_KEY)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        environment = await stack.enter_async_context(
            opened(make_environment(config, tokenizer), 60.0)
        )
        for number, row in enumerate(rows):
            answer = row["answer"].removeprefix("#### ")
            prompt = Prompt(number, np.zeros(3, np.int32), answer, "", dict(row))
            generate = GroupGenerate(EngineSession(client, timeout_s), number, SAMPLING)
            rollout = environment.rollout(prompt, num_sessions, generate)
            samples += await asyncio.wait_for(rollout, timeout_s)
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        trained = sample.trained[1:]
        assert trained.any()
        assert np.abs(own[trained] - sample.logprobs[1:][trained]).max() < TOLERANCE
    return samples
