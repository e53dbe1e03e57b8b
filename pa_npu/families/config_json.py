"""Reads a model's config.json, with bounds, and checks its values by key."""

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
    """Returns the object in `directory`/config.json.

    Raises DataError if it is missing, too large, or not a JSON object.
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


def read_json_object(file: Path, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in a regular file of at most `max_bytes`; else raises DataError."""
    try:
        raw = json.loads(read_plain(file, max_bytes).decode("utf-8"))
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
    """Returns a size or a number of parts.

    The default is for an absent or null key; without a default it raises KeyError. Raises
    ValueError for any other value.
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
    """Returns a positive finite number; rules for absent keys are those of `count`."""
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
    """Returns an object; {} if it is absent, null or empty. Raises ValueError."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: {value!r:.40} is not an object")
    return value


def flag(raw: dict[str, Any], key: str) -> bool:
    """Returns true or false; false if it is absent or null. Raises ValueError."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r:.40} is neither true nor false")
    return bool(value)


def token_ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    """Returns a token id or a list of them; empty if it is absent or null. Raises ValueError."""
    value = raw.get(key)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for token in values:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise ValueError(f"{key}: {token!r:.40} is not a token id")
    return tuple(values)
