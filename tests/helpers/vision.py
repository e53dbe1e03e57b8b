"""Small models that read images, images, prompts that show them, and what transformers makes of these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from pa_npu.config.schema import Config
from pa_npu.data.image_rows import ImageInput
from pa_npu.samples.group import Group
from pa_npu.samples.shown_images import attached
from pa_npu.samples.types import Sample, SampleBuilder
from pa_npu.vision.images import ImageReader, ShownImage, to_png
from pa_npu.vision.placeholders import expanded
from pa_npu.vision.processor import ImageProcessor
from tools import make_tiny_model, tiny_vision

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
IMAGE_TOKEN = 322


def make_vision(directory: Path, family: str = "qwen2_5_vl", *, tied: bool = False) -> Path:
    """Makes a model with random weights in `directory`/model."""
    disable_progress_bar()
    options = ["--task", "vision", "--family", family, "--out", str(directory), "--random"]
    if tied:
        options.append("--tied")
    arguments = make_tiny_model.parse_arguments(options)
    torch.manual_seed(3)
    tokenizer = make_tiny_model.make_tokenizer()
    model = tiny_vision.make_vision_model(arguments, tokenizer)
    path = directory / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(str(path))
    tiny_vision.write_processor(path, family)
    return path


def picture(seed: int, width: int = 84, height: int = 56) -> Image.Image:
    """Returns an image of coarse noise."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 7, width // 7, 3), np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def write_squares(directory: Path, number: int, seed: int = 1) -> Path:
    """Writes rows of the tiny task; returns train.jsonl, beside which is train.parquet."""
    directory.mkdir(exist_ok=True)
    tiny_vision.write_rows(directory, "train", number, random.Random(seed), 28)
    return directory / "train.jsonl"


def vision_config(model: Path, train: Path | None = None, /, **sections: Any) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu"},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": str(train or model / "none.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"backend": "transformers", "max_response_tokens": 16},
        "trainer": {"backend": "fsdp"},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return Config.model_validate(merged)


@cache
def reader_of(model: Path) -> ImageReader:
    images = ImageInput.from_config(vision_config(model))
    assert isinstance(images, ImageInput)
    return images.reader


Prompted = tuple[npt.NDArray[np.int32], tuple[ShownImage, ...]]


def prompt_of(
    model: Path, images: Sequence[Image.Image], text: Sequence[int] = (44, 83)
) -> Prompted:
    """Returns tokens that show the images one after another before a text, and the images."""
    reader = reader_of(model)
    files = [reader.read(to_png(np.array(image)), model) for image in images]
    grids = [reader.processor.grid_of(file.height, file.width) for file in files]
    short = [3]
    for _ in images:
        short += [320, IMAGE_TOKEN, 321]
    short += [*text, 4]
    lengths = [reader.processor.num_tokens(grid) for grid in grids]
    tokens, spans = expanded(short, IMAGE_TOKEN, lengths)
    shown = tuple(
        ShownImage(*span, grid=grid, file=file, reader=reader)
        for span, grid, file in zip(spans, grids, files, strict=True)
    )
    return np.array(tokens, np.int32), shown


def sample_of(prompted: Prompted, response: Sequence[int], version: int = 0) -> Sample:
    tokens, images = prompted
    builder = SampleBuilder(tokens, placeholders=attached(images))
    builder.write(np.array(response, np.int32), np.zeros(len(response), np.float32), version)
    return builder.finish(True, "")


def group_of(samples: Sequence[Sample], index: int = 0) -> Group:
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    return Group.from_samples(
        samples, advantages, advantages, run_seed=1, iteration=0, index=index, prompt_id=index
    )


def shown_to(processor: ImageProcessor, tokens: npt.NDArray[np.int32], images: Any) -> Any:
    """Returns the arguments with which transformers' own forward reads a sequence. images: (start,
    end, pixels, grid) of each.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    kinds = torch.zeros_like(ids)
    patches = []
    for start, end, pixels, _ in images:
        kinds[0, start:end] = 1
        patches.append(processor.patches(torch.from_numpy(np.array(pixels))))
    if not patches:
        return {"input_ids": ids}
    grids = torch.tensor([grid for *_, grid in images])
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": grids,
    }


def transformers_logprobs(
    model: Any, processor: ImageProcessor, tokens: npt.NDArray[np.int32], images: Any
) -> torch.Tensor:
    """Returns the log-prob of each token behind the first by transformers' own forward."""
    inputs = shown_to(processor, tokens, images)
    logprobs = model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


def images_of(sample: Sample, processor: ImageProcessor) -> list[Any]:
    """Returns a sample's images for `shown_to`."""
    images = []
    for run in sample.placeholders:
        pixels = run.attachments[0].array
        images.append((run.start, run.end, pixels, processor.grid_of(*pixels.shape[:2])))
    return images


def showing_image(group: Group, model: Path) -> Group:
    """Returns a group with an image of its own before its responses, in place of its prompt."""
    prompted = prompt_of(model, [picture(100 * group.iteration + group.index)])
    samples = []
    for tokens, length in zip(group.sequences(), group.trained_lengths.tolist(), strict=True):
        samples.append(sample_of(prompted, tokens[-length:].tolist(), group.iteration))
    shown = group_of(samples, group.index)
    return replace(shown, run_seed=group.run_seed, iteration=group.iteration, rewards=group.rewards)
