"""Pixels and patches are those of transformers' image processor, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pa_npu.errors import DataError
from pa_npu.vision.processor import ImageProcessor

SIZES = ((100, 140), (33, 700), (1200, 900), (56, 56), (501, 500))
OLDER: dict[str, Any] = {}
NEWER = {
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    )


@pytest.mark.parametrize("values", [OLDER, NEWER], ids=["Qwen2.5-VL", "Qwen3-VL"])
def test_patches_are_those_of_transformers_to_the_bit(
    values: dict[str, Any], tmp_path: Path
) -> None:
    theirs = Qwen2VLImageProcessorPil(**values)
    theirs.save_pretrained(tmp_path)
    processor = ImageProcessor.from_directory(str(tmp_path))
    for height, width in SIZES:
        image = noise(height, width)
        expected = theirs(images=[image], return_tensors="pt")
        pixels = processor.resized(image)
        assert tuple(expected["image_grid_thw"][0].tolist()) == processor.grid_of(height, width)
        assert torch.equal(processor.patches(torch.from_numpy(pixels)), expected["pixel_values"])
        # an engine that resizes them again, by whatever library, has nothing to do
        assert processor.size_of(*pixels.shape[:2]) == pixels.shape[:2]


def test_a_bound_in_pixels_makes_images_smaller(tmp_path: Path) -> None:
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    grids = []
    for bound in (None, 50_000):
        processor = ImageProcessor.from_directory(str(tmp_path), bound)
        grids.append(processor.num_tokens(processor.grid_of(600, 800)))
    assert grids == [609, 54]
    with pytest.raises(
        DataError, match=r"^data.max_image_pixels: 2000000 must lie within 12544 and"
    ):
        ImageProcessor.from_directory(str(tmp_path), 2_000_000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor is not supported"),
        ({"do_resize": False}, "do_resize: False, only true is supported"),
        ({"resample": 2}, "resample: 2, only 3 is supported"),
        ({"patch_size": "14"}, "patch: '14' is not a count"),
        ({"image_mean": [0.5]}, "must be three numbers"),
    ],
)
def test_a_processor_that_computes_something_else_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError) as refused:
        ImageProcessor.from_directory(str(tmp_path))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_directory_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no image processor \(preprocessor_config.json\)"):
        ImageProcessor.from_directory(str(tmp_path))
