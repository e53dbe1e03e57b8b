"""Values out of a model's config.json: the file read with bounds, counts and numbers checked by key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.errors import DataError

# A config.json of a large model has a few KiB.
LARGEST_CONFIG_BYTES = 4 * 2**20


def read_config_json(directory: Path) -> dict[str, Any]:
    """The object in `directory`/config.json.

    Raises DataError when it is missing, too large, or not a JSON object.
    """
    if not directory.is_dir():
        raise DataError(
            f"model.path: {directory} is not a directory; give the path of an HF model directory"
        )
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise DataError(
            f"model.path: {directory} is an adapter, no model; give the directory of the model "
            "that it belongs to"
        )
    if not (directory / "config.json").exists():
        raise DataError(
            f"model.path: {directory} has no config.json; give the path of an HF model directory"
        )
    return read_json_object(directory / "config.json", LARGEST_CONFIG_BYTES)


def read_json_object(file: Path, largest_bytes: int) -> dict[str, Any]:
    """The JSON object in a regular file of at most so many bytes; anything else raises DataError."""
    try:
        raw = json.loads(read_plain(file, largest_bytes).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"model.path: {file} cannot be read ({reason(error)}); restore it from the model's "
            "source"
        ) from None
    if not isinstance(raw, dict):
        raise DataError(
            f"model.path: {file} is not a JSON object; restore it from the model's source"
        )
    return raw


def count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size or number of parts.

    An absent or null key is the default, without which it raises KeyError; ValueError else.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{key}: {value!r:.40} is not a count")
    return value


def positive(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number, with the same rules for what is absent."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0 < value < 1e30
        or not math.isfinite(value)
    ):
        raise ValueError(f"{key}: {value!r:.40} is not a positive number")
    return float(value)


def mapping(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """An object; absent, null or empty is {}."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: {value!r:.40} is not an object")
    return value


def flag(raw: dict[str, Any], key: str) -> bool:
    """true or false; absent or null is false."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r:.40} is neither true nor false")
    return bool(value)


def token_ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    """A token id or a list of some; absent or null is none."""
    value = raw.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise ValueError(f"{key}: {token!r:.40} is not a token id")
    return tuple(values)
