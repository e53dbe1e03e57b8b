"""Placeholders are expanded as transformers does, and positions on three axes are its own, behind a shared prompt too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from pa_npu.attention import PrefixLayout
from pa_npu.vision.placeholders import collapsed, expanded
from pa_npu.vision.positions import ImageRows, image_positions
from tests.helpers.vision import IMAGE_TOKEN, make_vision


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(make_vision(tmp_path, family))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config).model
    images = [ImageRows(3, 2, 3), ImageRows(9, 4, 1), ImageRows(20, 1, 5)]
    kinds = torch.zeros(1, 30, dtype=torch.int64)
    for image in images:
        kinds[0, image.start : image.end] = 1
    # transformers takes images that touch each other for one
    kinds[0, 9] = 0
    images[1] = ImageRows(10, 3, 1)
    kinds[0, 10:13] = 1
    kinds[0, 13] = 0
    grids = torch.tensor([[1, 2 * image.height, 2 * image.width] for image in images])
    expected = model.get_rope_index(kinds, mm_token_type_ids=kinds, image_grid_thw=grids)[0][:, 0]
    positions = image_positions(PrefixLayout.from_sequences([30]), images)
    assert torch.equal(positions[0], torch.arange(30))
    assert torch.equal(positions[1:], expected)


def test_positions_restart_behind_a_shared_prompt() -> None:
    """Each response has the positions that it has alone behind its prompt."""
    shared = PrefixLayout.from_groups([(12, (4, 7)), (5, (3,))])
    image = ImageRows(2, 3, 2)
    packed = image_positions(shared, [image])
    for leaf, length in zip(shared.leaves, (16, 19, 8), strict=True):
        alone = PrefixLayout.from_sequences([length])
        of_leaf = [image] if length > 8 else []
        assert torch.equal(packed[:, shared.path_rows(leaf)], image_positions(alone, of_leaf))
    # behind the image text goes on at 2 + 3, not at 8
    assert packed[1, 8] == 5


def test_an_image_that_a_segment_cuts_is_refused() -> None:
    layout = PrefixLayout.from_groups([(5, (4, 4))])
    with pytest.raises(ValueError, match="rows 3 to 7 of an image are not in one segment, 0 to 5"):
        image_positions(layout, [ImageRows(3, 2, 2)])


def test_expanding_and_collapsing_placeholders() -> None:
    tokens, spans = expanded([7, IMAGE_TOKEN, 8, IMAGE_TOKEN, 9], IMAGE_TOKEN, [3, 1])
    assert tokens == [7, *[IMAGE_TOKEN] * 3, 8, IMAGE_TOKEN, 9]
    assert spans == [(1, 3), (5, 1)]
    # a placeholder that the policy wrote stays what it is
    written = np.array([*tokens, IMAGE_TOKEN, 5], np.int32)
    short, places = collapsed(written, spans)
    assert short.tolist() == [7, IMAGE_TOKEN, 8, IMAGE_TOKEN, 9, IMAGE_TOKEN, 5]
    assert places == [1, 3]
    with pytest.raises(ValueError, match="2 placeholders for 1 images"):
        expanded([IMAGE_TOKEN, IMAGE_TOKEN], IMAGE_TOKEN, [3])
