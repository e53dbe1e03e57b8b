"""ImageProcessor: the pixels that a model sees of an image, and the patches that its tower reads.

    image of any size ──resized──> pixels uint8 [height, width, 3] ──patches──> float32 [patches, size]
       coordinator, once, by Pillow            both ends: engines and trainers

Resizing is the step in which libraries differ (Pillow and torchvision by up to two levels of 255).
So the coordinator does it once, and engines and trainers get its pixels: an engine that resizes
them again finds the size that it wants. What is left are a product, a difference and a quotient in
fp32.

The arithmetic is that of transformers' Qwen2VLImageProcessor, which tests compare with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.errors import DataError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
"""An image as models see it: [height, width, 3], RGB."""

_FILES = ("processor_config.json", "preprocessor_config.json")
_LARGEST_FILE_BYTES = 2**20
_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# transformers' defaults, for keys that a file leaves out.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS = 56 * 56
_MAX_PIXELS = 28 * 28 * 1280
_BICUBIC = 3
# An image that is longer than this many times its width is refused by transformers too.
_LARGEST_RATIO = 200


@dataclass(frozen=True)
class ImageProcessor:
    """The image processor of a model's directory.

    patch: pixels of a patch's side. merged: patches of a side that become one token.
    frames: how often a patch repeats an image, which stands for so many frames of a video.
    min_pixels, max_pixels: of an image after resizing.
    mean, std: of the three colours.
    """

    patch: int = 14
    merged: int = 2
    frames: int = 2
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @classmethod
    def from_directory(cls, path: str, max_pixels: int | None = None) -> ImageProcessor:
        """Reads the processor of a model's directory.

        max_pixels: data.max_image_pixels; None keeps the model's own bound.

        Raises DataError for a directory without one, and for one that computes something else.
        """
        raw = _read(path)
        kind = raw.get("image_processor_type", raw.get("feature_extractor_type"))
        if kind not in _KINDS:
            raise DataError(
                f"model.path: {path}: its image processor {kind!s:.60} is not supported, only "
                f"{_KINDS[0]} is; use a model of Qwen2.5-VL or Qwen3-VL"
            )
        try:
            processor = cls._from_raw(raw)
        except (TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"model.path: {path}: its preprocessor_config.json has a value that cannot be used "
                f"({error}); restore it from the model's source"
            ) from None
        if max_pixels is None:
            return processor
        # rounding down to whole tokens may take three quarters of a small image
        lowest = 4 * processor.min_pixels
        if not lowest <= max_pixels <= processor.max_pixels:
            raise DataError(
                f"data.max_image_pixels: {max_pixels} must lie within {lowest} and "
                f"{processor.max_pixels}, by the image processor of {path}; change it"
            )
        return replace(processor, max_pixels=max_pixels)

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any]) -> ImageProcessor:
        for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if raw.get(key, True) is not True:
                raise ValueError(f"{key}: {raw[key]!r}, only true is supported")
        if raw.get("resample", _BICUBIC) != _BICUBIC:
            raise ValueError(f"resample: {raw['resample']!r}, only {_BICUBIC} is supported")
        if abs(raw.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-9:
            raise ValueError(f"rescale_factor: {raw['rescale_factor']!r}, only 1/255 is supported")
        size = raw.get("size") or {}
        lower = raw.get("min_pixels") or size.get("shortest_edge") or _MIN_PIXELS
        upper = raw.get("max_pixels") or size.get("longest_edge") or _MAX_PIXELS
        counts = {
            "patch": raw.get("patch_size", 14),
            "merged": raw.get("merge_size", 2),
            "frames": raw.get("temporal_patch_size", 2),
            "min_pixels": lower,
            "max_pixels": upper,
        }
        for name, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r:.40} is not a count")
        if lower > upper:
            raise ValueError(f"min_pixels {lower} is more than max_pixels {upper}")
        mean = _three(raw.get("image_mean", _MEAN))
        std = _three(raw.get("image_std", _STD))
        return cls(mean=mean, std=std, **counts)

    @property
    def identity(self) -> str:
        """Names everything that pixels and patches depend on. Equal texts mean equal pixels."""
        import PIL

        numbers = ", ".join(f"{key.name} {getattr(self, key.name)}" for key in fields(self))
        return f"Pillow {PIL.__version__}, {numbers}"

    @property
    def token_pixels(self) -> int:
        """Pixels of the side of a square that becomes one token."""
        return self.patch * self.merged

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width after resizing, multiples of `token_pixels`. An image of that size
        keeps it.

        Raises ValueError for an image that is too long and thin.
        """
        size = self._rounded(height, width)
        if self._rounded(*size) != size:
            raise ValueError(
                f"{width} x {height} pixels: too long and thin for {self.min_pixels} to "
                f"{self.max_pixels} pixels"
            )
        return size

    def _rounded(self, height: int, width: int) -> tuple[int, int]:
        longer = max(height, width)
        shorter = min(height, width)
        if longer > _LARGEST_RATIO * shorter:
            raise ValueError(
                f"{width} x {height} pixels: its longer side is more than {_LARGEST_RATIO} times "
                "the shorter one"
            )
        side = self.token_pixels
        resized_height = round(height / side) * side
        resized_width = round(width / side) * side
        if resized_height * resized_width > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            resized_height = max(side, math.floor(height / factor / side) * side)
            resized_width = max(side, math.floor(width / factor / side) * side)
        elif resized_height * resized_width < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            resized_height = math.ceil(height * factor / side) * side
            resized_width = math.ceil(width * factor / side) * side
        return resized_height, resized_width

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns the patches of an image of this size along time, height and width."""
        resized_height, resized_width = self.size_of(height, width)
        return 1, resized_height // self.patch, resized_width // self.patch

    def num_tokens(self, grid: Sequence[int]) -> int:
        """Returns the number of placeholder tokens of an image."""
        return math.prod(grid) // self.merged**2

    def resized(self, image: Image) -> Pixels:
        """Returns the pixels that the model sees of an RGB image."""
        from PIL.Image import Resampling

        height, width = self.size_of(image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), Resampling.BICUBIC)
        return np.array(image, np.uint8)

    @cached_property
    def _table(self) -> torch.Tensor:
        """Returns the value of each level of each colour, float32 [256, 3].

        transformers rescales in fp64, which not every device has.
        """
        import torch

        levels = (np.arange(256, dtype=np.float64)[:, None] * (1 / 255)).astype(np.float32)
        mean = np.asarray(self.mean, np.float32)
        table = (levels - mean) / np.asarray(self.std, np.float32)
        return torch.from_numpy(table)

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns what the tower reads, float32 [patches, 3 * frames * patch * patch].

        pixels: uint8 [height, width, 3], on any device; sides are multiples of `token_pixels`.
        """
        import torch

        height, width, _ = pixels.shape
        colours = self._table.to(pixels.device)[
            pixels.to(torch.int64), torch.arange(3, device=pixels.device)
        ]
        colours = colours.permute(2, 0, 1)
        rows = height // self.patch // self.merged
        columns = width // self.patch // self.merged
        shape = (3, rows, self.merged, self.patch, columns, self.merged, self.patch)
        # rows and columns of tokens, patches inside a token, then a patch's colours and pixels
        ordered = colours.reshape(shape).permute(1, 4, 2, 5, 0, 3, 6)
        repeated = ordered[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, self.frames, -1, -1)
        num_patches = rows * columns * self.merged**2
        return repeated.reshape(num_patches, 3 * self.frames * self.patch**2)


def _read(path: str) -> Mapping[str, Any]:
    """Returns the values of the directory's image processor."""
    for name in _FILES:
        file = Path(path) / name
        if not file.exists():
            continue
        try:
            raw = json.loads(read_plain(file, _LARGEST_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"model.path: {file} cannot be read ({reason(error)}); restore it from the model's "
                "source"
            ) from None
        inner = raw.get("image_processor", raw) if isinstance(raw, dict) else None
        if isinstance(inner, dict) and "image_processor_type" in inner:
            return inner
    raise DataError(
        f"model.path: {path} has no image processor ({_FILES[1]}), which images need; complete "
        "the download, or remove data.images_column"
    )


def _three(values: Any) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        raise ValueError(f"{values!r:.40} must be three numbers")
    return tuple(float(value) for value in values)
