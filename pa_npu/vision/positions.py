"""Positions on three axes (M-RoPE of Qwen2-VL, arXiv 2409.12191, section 2.1), for sequences that share prefixes.

    text      t = h = w, one more for each token
    image     t stays; h and w count rows and columns of its tokens; all from where the text was
    after it  one more than the largest of these

Behind a shared prefix positions restart: a segment goes on where its parent ended, which is not its
number of tokens if an image is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pa_npu.attention import PrefixLayout


@dataclass(frozen=True)
class ImageRows:
    """Rows [start, start + height * width) of a packing, which are an image's tokens.

    height, width: in tokens.
    """

    start: int
    height: int
    width: int

    @property
    def end(self) -> int:
        return self.start + self.height * self.width


def image_positions(layout: PrefixLayout, images: Sequence[ImageRows]) -> torch.Tensor:
    """Returns the positions of all rows, int64 [4, rows].

    The first is the number of the token in its sequence, which decides what it attends to; the
    others are those along time, height and width.

    Raises ValueError if an image's rows do not lie in one segment.
    """
    axes = np.zeros((3, layout.total), np.int64)
    ordered = sorted(images, key=lambda image: image.start)
    number = 0
    next_position: list[int] = []  # behind each segment
    for start, end, parent in zip(layout.starts, layout.ends, layout.parents, strict=True):
        position = next_position[parent] if parent >= 0 else 0
        row = start
        while number < len(ordered) and ordered[number].start < end:
            image = ordered[number]
            if image.end > end or image.start < row:
                raise ValueError(
                    f"rows {image.start} to {image.end} of an image are not in one segment, "
                    f"{start} to {end}"
                )
            axes[:, row : image.start] = np.arange(position, position + image.start - row)
            position += image.start - row
            axes[0, image.start : image.end] = position
            axes[1, image.start : image.end] = position + np.repeat(
                np.arange(image.height), image.width
            )
            axes[2, image.start : image.end] = position + np.tile(
                np.arange(image.width), image.height
            )
            position += max(image.height, image.width)
            row = image.end
            number += 1
        axes[:, row:end] = np.arange(position, position + end - row)
        next_position.append(position + end - row)
    if number < len(ordered):
        raise ValueError(f"row {ordered[number].start} of an image is not in the packing")
    return torch.cat([layout.position_ids()[None], torch.from_numpy(axes)])
