"""Reads a model's config.json for images: its placeholder token, and whether it can be trained with them.

Supported are models in which an image is a run of one placeholder token inside a causal decoder,
with positions on three axes. In others attention goes both ways inside an image, or the tower
stands beside the decoder; a shared prompt would be another function there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import read_plain
from pa_npu.errors import DataError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""model_type of the models that are trained with images."""
TOWER = "visual"
"""The module of these models that makes embeddings of patches, its merger included."""

_LARGEST_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True)
class VisionModel:
    """A model that reads images.

    image_token: its placeholder. marks: further tokens that only stand around images and videos.
    merged: patches of a side that become one token.
    """

    family: str
    image_token: int
    marks: tuple[int, ...]
    merged: int


def read_vision(path: str) -> VisionModel | None:
    """Returns what the model of a directory reads images with; None for a model that is not trained
    with images (`why_not`), and for a directory that has no config.json, which others report.

    Raises DataError for values that cannot be used.
    """
    raw = _config(path)
    if raw.get("model_type") not in FAMILIES:
        return None
    try:
        return VisionModel(
            family=raw["model_type"],
            image_token=_token(raw, "image_token_id"),
            marks=tuple(
                _token(raw, name)
                for name in ("vision_start_token_id", "vision_end_token_id", "video_token_id")
                if raw.get(name) is not None
            ),
            merged=int(raw["vision_config"].get("spatial_merge_size", 2)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"model.path: {path}/config.json has a value of its images that cannot be used "
            f"({error}); restore it from the model's source"
        ) from None


@dataclass(frozen=True)
class TowerShape:
    """The part of a model that reads images: blocks over patches.

    patch_values: numbers of a patch as it comes in. merged: patches of a side that become one token.
    """

    depth: int
    hidden_size: int
    ffn_size: int
    patch_values: int
    merged: int


def read_tower(path: str) -> TowerShape | None:
    """Returns the shape of a model's tower; None for a model that is not trained with images.

    Raises DataError for values that cannot be used.
    """
    vision = read_vision(path)
    if vision is None:
        return None
    raw = _config(path)["vision_config"]
    try:
        frames = int(raw.get("temporal_patch_size", 2))
        channels = int(raw.get("in_channels", raw.get("in_chans", 3)))
        return TowerShape(
            depth=int(raw["depth"]),
            hidden_size=int(raw["hidden_size"]),
            ffn_size=int(raw["intermediate_size"]),
            patch_values=channels * frames * int(raw["patch_size"]) ** 2,
            merged=vision.merged,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"model.path: {path}/config.json has a value in vision_config that cannot be used "
            f"({error}); restore it from the model's source"
        ) from None


def why_not(path: str) -> str:
    """Says why a model for which `read_vision` gives None is not trained with images."""
    raw = _config(path)
    kind = f"{raw.get('model_type')!s:.40}"
    if "vision_config" not in raw:
        return f"a model of {kind} reads text alone"
    return (
        f"a model of {kind} may attend both ways inside an image, or have no placeholder tokens, "
        "which is not supported"
    )


def _config(path: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(read_plain(Path(path) / "config.json", _LARGEST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def is_of_tower(name: str) -> bool:
    """Returns whether a weight or module of this name, in a file or in transformers, is the
    tower's.
    """
    return TOWER in name.split(".")[:2]


def _token(raw: Mapping[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: {value!r:.40} is no token")
    return value
