"""One prompt through the environment: samples that are well-formed, or one line that names the environment and its mistake."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from pa_npu.data.prompts import Prompt
from pa_npu.engines.pool import GroupSession
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.generate import GroupGenerate
from pa_npu.environments.protocol import Environment, EnvironmentFailed
from pa_npu.errors import PaNpuError
from pa_npu.samples.types import Sample


async def run_episode(
    environment: Environment,
    prompt: Prompt,
    num_samples: int,
    session: GroupSession,
    seed: int,
    sampling: Sampling,
    version: int,
) -> list[Sample]:
    """num_samples samples of a prompt. Errors of engines pass as they are; what else is raised becomes EnvironmentFailed."""
    generate = GroupGenerate(session, seed, sampling, version)
    try:
        samples = await environment.rollout(prompt, num_samples, generate)
    except PaNpuError:
        raise
    except Exception as error:  # an environment is users' code
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise EnvironmentFailed(
            f"environment {type(environment).__name__}, prompt {prompt.prompt_id}: {type(error).__name__}: {error} "
            f"({Path(frame.filename).name}, line {frame.lineno}); correct the environment"
        ) from error
    _check(environment, prompt, samples, num_samples)
    return samples


def _check(environment: Environment, prompt: Prompt, samples: Sequence[Sample], num_samples: int) -> None:
    what = f"environment {type(environment).__name__}, prompt {prompt.prompt_id}"
    if len(samples) != num_samples or not all(isinstance(sample, Sample) for sample in samples):
        raise EnvironmentFailed(f"{what}: must return {num_samples} samples, returned {len(samples)}; correct rollout")
    for number, sample in enumerate(samples):
        lengths = {len(getattr(sample, name)) for name in ("tokens", "trained", "logprobs", "versions")}
        if len(lengths) != 1 or not sample.num_trained or sample.trained[0]:
            raise EnvironmentFailed(
                f"{what}: sample {number} must have arrays of one length and trained tokens behind an untrained first one; "
                f"put it together with SampleBuilder"
            )
