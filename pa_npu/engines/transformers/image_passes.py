"""A prompt with images as forward passes of transformers' own model.

transformers finds placeholders by their id and counts them, so that one which the policy wrote
would be taken for an image's. A prompt with such tokens goes through the model in several passes,
of which each has images or text. Positions are always given: transformers keeps what it computed of
them in the model, for one sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.vision.family import TOWER
from pa_npu.vision.positions import ImageRows, image_positions

Pass = tuple[Sequence[int], dict[str, torch.Tensor]]
"""Tokens of a forward pass, and its further arguments."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt, whose tokens [start, end) are its placeholders.

    grid: its patches along time, height and width. patches: float32 [patches, size].
    """

    start: int
    end: int
    grid: tuple[int, int, int]
    patches: torch.Tensor


def has_tower(model: Any) -> bool:
    """Returns whether a model reads images."""
    return hasattr(getattr(model, "base_model", None), TOWER)


class ImagePasses:
    """Makes passes for a model that reads images."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._device = device
        self._image_token = int(model.config.image_token_id)
        self._merged = int(model.config.vision_config.spatial_merge_size)

    def passes(
        self, prompt: Sequence[int], images: Sequence[PromptImage]
    ) -> tuple[list[Pass], int]:
        """Returns the passes of a prompt, and the position of the token behind it."""
        rows = [
            ImageRows(image.start, image.grid[1] // self._merged, image.grid[2] // self._merged)
            for image in images
        ]
        positions = image_positions(PrefixLayout.from_sequences([len(prompt)]), rows)[1:]
        next_position = int(positions[:, -1].max()) + 1
        num_placeholders = sum(image.end - image.start for image in images)
        has_written = sum(token == self._image_token for token in prompt) > num_placeholders
        bounds = [0, len(prompt)]
        if has_written:
            for image in images:
                bounds += [image.start, image.end]
        passes: list[Pass] = []
        for start, end in pairwise(sorted(set(bounds))):
            options = {"position_ids": positions[:, None, start:end].to(self._device)}
            shown = [image for image in images if start <= image.start < end]
            if shown:
                options["pixel_values"] = torch.cat([image.patches for image in shown])
                grids = [image.grid for image in shown]
                options["image_grid_thw"] = torch.tensor(grids, device=self._device)
            passes.append((prompt[start:end], options))
        return passes, next_position

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """Returns the arguments of a pass of one token at this position."""
        return {"position_ids": torch.full((3, 1, 1), position, device=self._device)}
