"""Packed groups with images have the log-probs and gradients of separate sequences in transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pa_npu.attention.trie import pack as pack_ids
from pa_npu.backends.fsdp.model import ScoredModel, load_model, plain_experts
from pa_npu.backends.fsdp.vision import freeze_tower, pack_images
from pa_npu.backends.widened import widened
from pa_npu.samples.group import Group
from pa_npu.samples.microbatch import Microbatch, pack
from pa_npu.vision.processor import ImageProcessor
from tests.helpers.vision import (
    IMAGE_TOKEN,
    group_of,
    images_of,
    make_vision,
    picture,
    prompt_of,
    reader_of,
    sample_of,
    transformers_logprobs,
)


class Compared:
    """A model packed as the backend packs, and transformers' own, with equal weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processor: ImageProcessor = reader_of(path).processor
        self.theirs = load_model(str(path), torch.float32).eval()
        self.scored = ScoredModel(load_model(str(path), torch.float32), "auto").eval()

    def group(
        self, *responses: Sequence[int], images: Sequence[int] = (1,), index: int = 0
    ) -> Group:
        prompt = prompt_of(self.path, [picture(seed) for seed in images])
        return group_of([sample_of(prompt, response) for response in responses], index)

    def of_packed(self, microbatch: Microbatch) -> torch.Tensor:
        """Log-probs of the targets; the sum of a weighted loss goes backward."""
        scores = self.scored(
            microbatch.tokens,
            microbatch.layout,
            microbatch.rows,
            microbatch.targets,
            1.0,
            512,
            images=pack_images(microbatch, self.processor),
        )
        logprobs: torch.Tensor = scores.logprobs
        (logprobs * weights(len(logprobs))).sum().backward()
        return logprobs.detach()

    def of_separate(self, groups: Sequence[Group]) -> torch.Tensor:
        parts = []
        for group in groups:
            for sample in group.samples([""] * group.num_samples):
                images = images_of(sample, self.processor)
                logprobs = transformers_logprobs(self.theirs, self.processor, sample.tokens, images)
                parts.append(logprobs[torch.from_numpy(sample.trained[1:])])
        joined = torch.cat(parts)
        (joined * weights(len(joined))).sum().backward()
        return joined.detach()

    def gradients_differ(self) -> dict[str, float]:
        """The largest difference of gradients, over each tensor's largest, in tower and decoder."""
        worst = {"tower": 0.0, "decoder": 0.0}
        theirs = dict(self.theirs.named_parameters())
        for name, parameter in self.scored.causal.named_parameters():
            expected = theirs[name].grad
            if expected is None:
                assert parameter.grad is None, name
                continue
            assert parameter.grad is not None, name
            part = "tower" if ".visual." in name else "decoder"
            difference = (parameter.grad - expected).abs().max() / expected.abs().max()
            worst[part] = max(worst[part], float(difference))
        return worst


def weights(number: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, number)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def compared(path: Path) -> Compared:
    return Compared(path)


def draw(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 300, length).tolist()


Groups = Callable[[Compared], list[Group]]
GROUPS: dict[str, Groups] = {
    "one image, four responses": lambda c: [c.group(*(draw(n, n) for n in (7, 12, 3, 20)))],
    "two images of other sizes": lambda c: [
        group_of(
            [
                sample_of(prompt_of(c.path, [picture(1), picture(2, 56, 112)]), draw(n, n))
                for n in (9, 5)
            ]
        )
    ],
    "two images behind equal tokens, and text alone": lambda c: [
        c.group(draw(4, 1), draw(9, 2), images=(1,)),
        c.group(draw(6, 3), draw(6, 4), images=(2,), index=1),
        c.group(draw(6, 5), draw(5, 6), images=(), index=2),
    ],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_packed_groups_are_separate_sequences(kind: str, compared: Compared) -> None:
    groups = GROUPS[kind](compared)
    microbatch = pack(groups, True, 8)
    num_shown = sum(len(group.placeholders) for group in groups)
    assert len(microbatch.attachments) < num_shown, "an image of several samples is there once"
    expected = compared.of_separate(groups)
    found = compared.of_packed(microbatch)
    assert (found - expected).abs().max() < 5e-6
    worst = compared.gradients_differ()
    assert worst["tower"] < 2e-5 and worst["decoder"] < 2e-5, worst


def test_a_placeholder_that_the_policy_wrote_is_a_token(compared: Compared) -> None:
    group = compared.group([5, IMAGE_TOKEN, 7, 8], [IMAGE_TOKEN, IMAGE_TOKEN, 9])
    microbatch = pack([group], True, 1)
    found = compared.of_packed(microbatch)
    # transformers' own forward refuses such a sequence: here its embeddings are put in beforehand
    base = compared.theirs.base_model
    expected = []
    for sample in group.samples(["", ""]):
        ((start, end, pixels, grid),) = images_of(sample, compared.processor)
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        patches = compared.processor.patches(torch.from_numpy(np.array(pixels)))
        features = base.get_image_features(patches, torch.tensor([grid]), return_dict=True)
        embeddings = base.get_input_embeddings()(ids).clone()
        embeddings[0, start:end] = features.pooler_output[0]
        kinds = torch.zeros_like(ids)
        kinds[0, start:end] = 1
        positions, _ = base.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor([grid])
        )
        deep: dict[str, Any] = {}
        if hasattr(features, "deepstack_features"):
            deep["visual_pos_masks"] = kinds.bool()
            deep["deepstack_visual_embeds"] = [level[0] for level in features.deepstack_features]
        states = base.language_model(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False, **deep
        ).last_hidden_state
        logprobs = compared.theirs.lm_head(states)[0, :-1].log_softmax(-1)
        logprobs = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        expected.append(logprobs[torch.from_numpy(sample.trained[1:])])
    assert (found - torch.cat(expected).detach()).abs().max() < 5e-6


def test_two_images_behind_equal_tokens_are_merged_by_a_trie_of_tokens_alone(
    compared: Compared,
) -> None:
    """The control of the test above: what a careless packing does, without an error."""
    groups = GROUPS["two images behind equal tokens, and text alone"](compared)[:2]
    first, second = (group.sequences()[0] for group in groups)
    right = compared.of_separate(groups)
    by_ids = pack_ids([first, second])
    assert by_ids.layout.total < len(first) + len(second)
    swapped = replace(groups[1], placeholders=groups[0].placeholders)
    wrong = compared.of_separate([groups[0], swapped])
    assert (right - wrong).abs().max() > 0.2


def test_a_frozen_tower_has_no_graph_and_a_trained_one_has_a_gradient_without_images(
    compared: Compared,
) -> None:
    text = pack([compared.group(draw(6, 1), draw(5, 2), images=())], True, 1)
    images = pack_images(text, compared.processor, fill=True)
    assert images.patches is not None and not len(images.rows)
    arguments = (text.tokens, text.layout, text.rows, text.targets, 1.0, 512)
    filled = compared.scored(*arguments, images=images).logprobs
    assert torch.equal(filled, compared.scored(*arguments).logprobs), "nothing sees it"
    filled.sum().backward()
    tower = [p for n, p in compared.scored.causal.named_parameters() if ".visual." in n]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in tower)

    compared.scored.zero_grad()
    freeze_tower(compared.scored.causal)
    compared.of_packed(pack([compared.group(draw(4, 3))], True, 1))
    assert all(parameter.grad is None for parameter in tower)


@pytest.mark.parametrize(("narrow", "wide"), [("float32", "float64"), ("bfloat16", "float32")])
def test_a_wider_type_reaches_the_tower_too(narrow: str, wide: str, path: Path) -> None:
    """As the trainer measures its rounding; patches come in fp32 whatever the weights' type is."""
    group = Compared(path).group(draw(7, 1), draw(9, 2))
    microbatch = pack([group], True, 1)
    images = pack_images(microbatch, reader_of(path).processor)
    arguments = (
        microbatch.tokens,
        microbatch.layout,
        microbatch.rows,
        microbatch.targets,
        1.0,
        512,
    )
    scored = ScoredModel(load_model(str(path), getattr(torch, narrow)), "auto").eval()
    with torch.no_grad():
        as_trained = scored(*arguments, images=images).logprobs
        with plain_experts(scored.causal), widened(scored, getattr(torch, wide)):
            widest = scored(*arguments, images=images).logprobs
    difference = float((as_trained - widest).abs().max())
    assert 0 < difference < (1e-5 if narrow == "float32" else 1.0)
