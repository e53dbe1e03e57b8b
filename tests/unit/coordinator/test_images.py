"""A prompt's images reach engines with every turn and trainers once for each group, whatever the environment is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_npu.coordinator.episode import GroupGenerate, run_episode
from pa_npu.coordinator.images import with_images
from pa_npu.data.prompts import Prompt
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import EnvironmentFailed, write
from pa_npu.environments.single_turn import SingleTurn, samples_of
from pa_npu.publish.messages import Probe, ProbeResponse
from pa_npu.publish.probe_samples import sample_probe
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.samples.wire import from_bytes, to_bytes
from pa_npu.trainer.border import probe_microbatches
from tests.helpers.vision import (
    IMAGE_TOKEN,
    group_of,
    make_vision,
    picture,
    prompt_of,
    vision_config,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def prompt(model: Path) -> Prompt:
    tokens, images = prompt_of(model, [picture(1)])
    return Prompt(0, tokens, "1", "text", {}, images=images)


def response(*tokens: int) -> Generation:
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Generation(np.array(tokens, np.int32), logprobs, "", "stop", 3)


class Session:
    """Answers with a placeholder that the policy writes, and notes what it was asked with."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def generate(
        self, tokens: Any, n: int, seed: int, sampling: Sampling, images: Any = ()
    ) -> list[Generation]:
        self.asked.append((len(tokens), len(images)))
        return [response(5, IMAGE_TOKEN, 6) for _ in range(n)]


class TwoTurns:
    """Shows a token of its own between two turns; knows nothing of images."""

    waits_are_bounded = True

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Any) -> list[Sample]:
        samples = []
        for number in range(num_samples):
            sample = SampleBuilder(prompt.tokens)
            for turn in range(2):
                (written,) = await generate(sample.tokens, sample=number, turn=turn)
                write(sample, written)
                sample.show(np.array([9], np.int32))
            samples.append(sample.finish(True, ""))
        return samples


class Cutting:
    """Shows placeholders without the beginning of the prompt."""

    waits_are_bounded = True

    async def rollout(self, prompt: Prompt, num_samples: int, generate: Any) -> list[Sample]:
        return samples_of(prompt.tokens[1:], [response(5, 6)] * num_samples)


def episode(environment: Any, prompt: Prompt, session: Any) -> list[Sample]:
    config = vision_config(Path("none"))
    generate = GroupGenerate(session, 1, Sampling(8, 1.0), prompt=prompt)
    return asyncio.run(run_episode(config, environment, prompt, 3, generate, 16))


@pytest.mark.parametrize("several", [False, True], ids=["one turn", "two turns"])
def test_an_environment_need_not_know_of_images(several: bool, prompt: Prompt) -> None:
    session = Session()
    environment = TwoTurns() if several else SingleTurn.__new__(SingleTurn)
    samples = episode(environment, prompt, session)
    first = len(prompt.tokens)
    assert session.asked == ([(first, 1), (first + 4, 1)] * 3 if several else [(first, 1)])
    (image,) = prompt.images
    for sample in samples:
        (run,) = sample.placeholders  # what the policy wrote is no image
        assert (run.start, run.length) == (image.start, image.length)
    assert len({id(s.placeholders[0].attachments[0].array) for s in samples}) == 1


def test_pixels_go_to_trainers_once_for_each_group(prompt: Prompt) -> None:
    sizes = []
    for number in (1, 8):
        samples = samples_of(prompt.tokens, [response(5, 6)] * number)
        group = group_of(asyncio.run(with_images(prompt, samples)))
        data = to_bytes(group)
        sizes.append(len(data))
        arrived = from_bytes(data)
        assert np.array_equal(arrived.attachments[0].array, prompt.images[0].pixels)
    pixels = prompt.images[0].pixels.nbytes
    assert sizes[1] - sizes[0] < 7 * 300 < pixels < sizes[0]


def test_placeholders_that_nobody_attached_are_refused(prompt: Prompt) -> None:
    with pytest.raises(
        EnvironmentFailed, match="sample 0 has placeholders of images, but does not"
    ):
        episode(Cutting(), prompt, Session())
    generate = GroupGenerate(Session(), 1, Sampling(8, 1.0), prompt=prompt)
    with pytest.raises(ValueError, match="do not begin with the prompt"):
        asyncio.run(generate(prompt.tokens[1:]))


def test_a_probe_shows_the_image_to_engines_and_to_trainers(prompt: Prompt, model: Path) -> None:
    asked = []

    class Engine:
        async def generate(self, tokens: Any, *_: Any, images: Any = (), **__: Any) -> Any:
            asked.append(images)
            return [response(5, 6)]

    config = vision_config(model)
    probe = asyncio.run(
        sample_probe(
            version=3,
            engines=[Engine()],  # type: ignore[list-item]
            prompt=prompt,
            plan=ProbePlan(num_tokens=4, num_responses=1, rides=False),
            sampling=Sampling(8, 1.0),
            run_seed=1,
            deadline_s=5,
        )
    )
    assert asked and all(images == prompt.images for images in asked)
    (microbatch,) = probe_microbatches(probe, 3, config, 0)
    (shown,) = microbatch.attachments
    assert np.array_equal(shown.arrays["pixels"].numpy(), prompt.images[0].pixels)
    text = Probe([3, 4], [ProbeResponse([5], [-0.5])])
    assert not probe_microbatches(text, 3, config, 0)[0].attachments
