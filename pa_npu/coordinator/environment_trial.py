"""An environment with code of the user's, tried on one prompt before a run: what is wrong with it is one line.

python -m pa_npu.coordinator.environment_trial      {"config", "prompt"} as JSON on stdin; see pa_npu.control.worker_process

The policy's part is made up: every turn it writes the reference answer.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.load import load_tree
from pa_npu.config.schema import Config
from pa_npu.control.worker_process import run_trial, serve
from pa_npu.data.image_rows import ImageInput
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.errors import ConfigError
from pa_npu.families.model_directory import load_tokenizer
from pa_npu.vision.images import ShownImage

_TIME_LIMIT_S = 60.0  # importing transformers and a user's modules on a busy machine
_LOGPROB = -0.5
_TRIED_CALLS = 4  # of a tool, at most


def check_environment(config: Config, prompt: Prompt | None) -> None:
    """Make and open the environment, and let it make samples of the prompt if there is one.

    Raises ConfigError in one line.
    """
    name = config.environment.name
    comes_later = name == "agents" and config.agent.command is None
    if name == "single_turn" or comes_later:  # no code of a user's here
        return
    prompt_fields = None
    if prompt is not None:
        prompt_fields = {
            "prompt_id": prompt.prompt_id,
            "tokens": prompt.tokens.tolist(),
            "answer": prompt.answer,
            "text": prompt.text,
            "row": prompt.row,
            "messages": prompt.messages,
            "images": [_described(image) for image in prompt.images],
        }
    request = {"config": config.model_dump(mode="json"), "prompt": prompt_fields}
    own_s = (
        config.deadlines.group_limit_s
        if config.environment.has_gateway
        else _TRIED_CALLS * config.deadlines.environment_timeout_s
    )
    limit_s = _TIME_LIMIT_S + own_s
    problem = run_trial(
        "pa_npu.coordinator.environment_trial",
        json.dumps(request, default=str).encode(),
        limit_s,
        f"environment.name: {name}",
        f"has not made samples of a made-up policy's responses within {limit_s:.0f} s; make it "
        "import and end sooner",
    )
    if problem is not None:
        raise ConfigError(
            problem if problem.startswith("environment.") else f"environment.name: {problem}"
        )


def _described(image: ShownImage) -> dict[str, Any]:
    """Returns an image as JSON can hold it."""
    content = base64.b64encode(image.reader.content(image.file)).decode()
    return {"place": (image.start, image.length), "grid": image.grid, "content": content}


def _shown(config: Config, images: Sequence[Mapping[str, Any]]) -> tuple[ShownImage, ...]:
    """Returns the images that `_described` described."""
    if not images:
        return ()
    reader = ImageInput.from_config(config)
    assert isinstance(reader, ImageInput), "the prompt has images"
    shown = []
    for image in images:
        file = reader.reader.read_bytes(base64.b64decode(image["content"]))
        start, length = image["place"]
        grid = tuple(image["grid"])
        shown.append(ShownImage(start, length, grid=grid, file=file, reader=reader.reader))
    return tuple(shown)


class _MadeUpPolicy:
    """Stands where engines do: writes the reference answer, in any number of responses."""

    def __init__(self, tokenizer: Any, answer: str) -> None:
        ids = tokenizer.encode(answer, add_special_tokens=False) or [0]
        self._tokens = np.array(ids, np.int32)
        self._text = answer

    async def generate(
        self,
        tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        images: Sequence[Any] = (),
    ) -> list[Generation]:
        written = self._tokens[: sampling.max_tokens]
        logprobs = np.full(len(written), _LOGPROB, np.float32)
        return [Generation(written, logprobs, self._text, "stop", version=0) for _ in range(n)]


async def _try(config: Config, prompt_fields: dict[str, Any] | None) -> None:
    # what the launcher, which only starts this process, need not import
    from pa_npu.algorithm.registry import build_algorithm
    from pa_npu.coordinator.episode import GroupGenerate, check_size, run_episode
    from pa_npu.environments.registry import make_environment, opened

    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    async with opened(make_environment(config, tokenizer), _TIME_LIMIT_S) as environment:
        if prompt_fields is None:
            return
        prompt_fields["tokens"] = np.array(prompt_fields["tokens"], np.int32)
        prompt_fields["images"] = _shown(config, prompt_fields["images"])
        prompt = Prompt(**prompt_fields)
        sampling = Sampling(config.rollout.max_response_tokens, config.rollout.temperature)
        if hasattr(environment, "trial"):
            await environment.trial(prompt)
        policy: Any = _MadeUpPolicy(tokenizer, prompt.answer)
        size = config.rollout.responses_per_prompt
        generate = GroupGenerate(policy, 0, sampling)
        samples = await run_episode(
            config, environment, prompt, size, generate, sampling.max_tokens
        )
        check_size(config, build_algorithm(config), prompt, samples)


def _attempt(request: bytes) -> None:
    trial = json.loads(request)
    asyncio.run(_try(load_tree(trial["config"], "environment"), trial["prompt"]))


if __name__ == "__main__":
    serve(_attempt)
