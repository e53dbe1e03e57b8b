"""Samples a probe: responses of all engines to one prompt, for the trainers to compare (I5)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from pa_npu.control.tasks import gather
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import RolloutEngine, Sampling
from pa_npu.publish.messages import Probe, ProbeImage, ProbeResponse
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.seeds import group_seed

# Keeps the seeds of probes apart from those of groups, whose index is far below.
_PROBE_INDEX = 2**32


async def sample_probe(
    *,
    version: int,
    engines: Sequence[RolloutEngine],
    prompt: Prompt,
    plan: ProbePlan,
    sampling: Sampling,
    run_seed: int,
    deadline_s: float,
) -> Probe:
    """Returns at least one sampled response per engine, all to the same prompt, with log-probs.

    Args:
        version: of the weights that the engines hold.
        engines: that serve.
        prompt: of all responses.
        plan: how many responses there are, and how long.
        sampling: of the run.
        run_seed: of the run.
        deadline_s: of each request.
    """
    probe_sampling = Sampling(
        # The response has as many tokens as asked for, whatever ends a response otherwise.
        max_tokens=min(plan.num_tokens, sampling.max_tokens),
        temperature=sampling.temperature,
        ignore_eos=True,
    )
    seed = group_seed(run_seed, version, _PROBE_INDEX)
    # If the probe decides about publishes, the number of responses must not depend on the engines.
    num_responses = max(len(engines), plan.num_responses)

    async def sample(number: int) -> ProbeResponse:
        engine = engines[number % len(engines)]
        shown: dict[str, Any] = {"images": prompt.images} if prompt.images else {}
        completions = await engine.generate(
            prompt.tokens, 1, seed + number, probe_sampling, deadline_s=deadline_s, **shown
        )
        return ProbeResponse(completions[0].tokens.tolist(), completions[0].logprobs.tolist())

    responses = await gather([sample(number) for number in range(num_responses)])
    images = [
        ProbeImage(image.start, image.length, base64.b64encode(image.png()).decode())
        for image in prompt.images
    ]
    return Probe([int(token) for token in prompt.tokens], responses, images)
