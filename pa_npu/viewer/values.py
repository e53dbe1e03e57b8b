"""Values of records that anybody may have written: numbers, texts, lists and mappings, or nothing in their place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_NUMBER = 1e15
"""Bound of every number: far above what a run can count, and far below where arithmetic overflows.
"""


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record; None where it has none that can be calculated with."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) <= MAX_NUMBER else None


def share(value: float) -> str:
    """A share in words, with the digits that the page gives it: one more where it is near all or
    nothing.
    """
    percent = 100 * value
    is_near = abs(percent) % 100 != 0 and (abs(percent) < 10 or abs(percent) > 90)
    scale = 10 if is_near else 1
    rounded = math.floor(abs(percent) * scale + 0.5) / scale
    return f"{math.copysign(rounded, percent):.{1 if is_near else 0}f}%"


def index(record: Mapping[str, Any], key: str) -> int | None:
    """A number that counts, from 0."""
    value = record.get(key)
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
        else None
    )


def text(record: Mapping[str, Any], key: str) -> str:
    """A text of a record; empty where it has none."""
    value = record.get(key)
    return value if isinstance(value, str) else ""


def mapping(record: Any, key: str) -> Mapping[str, Any]:
    """A mapping of a record; empty where it has none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(record: Any, key: str) -> list[Any]:
    """A list of a record; empty where it has none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, list) else []
