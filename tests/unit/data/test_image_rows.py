"""Rows with images become prompts whose placeholders are those of transformers' processor; what does not fit is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from pa_npu.data.image_rows import ImageInput
from pa_npu.data.prompts import Prompt, load_training
from pa_npu.errors import DataError
from pa_npu.vision.images import to_png
from tests.helpers.vision import (
    IMAGE_TOKEN,
    make_vision,
    picture,
    vision_config,
    write_squares,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"), 4)


def load(model: Path, file: Path, **data: Any) -> tuple[Prompt, ...]:
    config = vision_config(model, file, data=data)
    tokenizer = AutoTokenizer.from_pretrained(model)
    (loaded,) = load_training(config.data, tokenizer, True, images=ImageInput.from_config(config))
    return loaded.prompts


def write(directory: Path, *rows: dict[str, Any]) -> Path:
    for seed in (1, 2):
        (directory / f"{seed}.png").write_bytes(to_png(np.array(picture(seed))))
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return file


def test_a_prompt_has_as_many_placeholders_as_its_image_has_tokens(
    model: Path, squares: Path
) -> None:
    for prompt in load(model, squares):
        (image,) = prompt.images
        height, width, _ = image.pixels.shape
        assert image.length == height * width // 28**2
        assert (prompt.tokens == IMAGE_TOKEN).sum() == image.length
        assert (prompt.tokens[image.start : image.end] == IMAGE_TOKEN).all()
        assert prompt.text.count("<|image_pad|>") == 1


def test_rows_that_hold_their_images_give_the_prompts_of_rows_that_name_them(
    model: Path, squares: Path
) -> None:
    """As verl's parquet files have them: a list of structs with bytes."""
    answers = {"answer_column": "reward_model.ground_truth"}
    held = load(model, squares.with_suffix(".parquet"), **answers)
    for named, inside in zip(load(model, squares), held, strict=True):
        assert np.array_equal(named.tokens, inside.tokens)
        assert named.images[0].key == inside.images[0].key
        assert named.identity == inside.identity
        # what rewards and records get names the image, and does not hold it
        assert json.dumps(inside.row).count("bytes of a row") == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>A<image>B", "images": ["1.png", "2.png"]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "1.png"},
                        {"type": "text", "text": "A"},
                        {"type": "image_url", "image_url": {"url": "2.png"}},
                        {"type": "text", "text": "B"},
                    ],
                }
            ]
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, "A", {"type": "image"}, "B"],
                }
            ],
            "images": ["1.png", "2.png"],
        },
    ],
    ids=["marks in a text", "parts that hold images", "parts and a column"],
)
def test_images_stand_where_the_row_says(row: dict[str, Any], model: Path, tmp_path: Path) -> None:
    (prompt,) = load(model, write(tmp_path, row))
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt.text == f"<|user|>{shown}A{shown}B<|assistant|>"
    assert [image.start for image in prompt.images] == [2, 11]
    assert prompt.images[0].key != prompt.images[1].key


def test_images_that_nothing_places_stand_before_the_question(model: Path, tmp_path: Path) -> None:
    (prompt,) = load(model, write(tmp_path, {"prompt": "A", "images": "1.png"}))
    assert prompt.text == "<|user|><|vision_start|><|image_pad|><|vision_end|>A<|assistant|>"


def test_prompts_with_and_without_images_stand_beside_each_other(
    model: Path, tmp_path: Path
) -> None:
    rows = {"prompt": "A", "images": ["1.png"]}, {"prompt": "A"}, {"prompt": "A", "images": []}
    prompts = load(model, write(tmp_path, *rows))
    assert [len(prompt.images) for prompt in prompts] == [1, 0, 0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "<image><image>A", "images": ["1.png"]},
            "2 times <image> for 1 images; give one each",
        ),
        ({"prompt": "A", "images": ["3.png"]}, "image: "),
        ({"prompt": "A", "images": [5]}, "image: 5 is no image; give a path, bytes"),
        ({"prompt": "A<|image_pad|>"}, "the rendered prompt has 1 placeholders for 0 images"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 parts of images, but no image; add the images' column",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "image", "image": "1.png"}]}],
                "images": ["2.png"],
            },
            "images both in the messages and in a column of their own; keep one of them",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_refused_in_one_line(
    row: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        load(model, write(tmp_path, row))
    assert f"rows.jsonl:1: {reason}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_images_are_never_truncated(model: Path, tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "A" * 60, "images": ["1.png"]}, {"prompt": "A"})
    with pytest.raises(DataError, match="images cannot be truncated"):
        load(model, file, overlong_prompt="truncate", max_prompt_tokens=20)
    assert len(load(model, file, overlong_prompt="skip", max_prompt_tokens=20)) == 1


def test_a_bound_in_pixels_makes_prompts_shorter(model: Path, tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(to_png(np.array(picture(5, 168, 112))))
    file = write(tmp_path, {"prompt": "A", "images": ["large.png"]})
    lengths = [len(load(model, file, max_image_pixels=bound)[0].tokens) for bound in (None, 12544)]
    assert lengths == [29, 17]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"images_column": None}, "1 placeholders for 0 images"),
        ({"chat_template": "never"}, "images need a chat template"),
    ],
)
def test_keys_that_leave_images_out_say_so(
    data: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, {"prompt": "<|image_pad|>A", "images": ["1.png"]})
    if data.get("images_column", "") is None:
        (prompt,) = load(model, file, **data)
        assert not prompt.images  # a text is a text
        return
    with pytest.raises(DataError, match=reason):
        load(model, write(tmp_path, {"prompt": "A", "images": ["1.png"]}), **data)
