"""Reads values of records that anybody may have written; a value of another type counts as none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

MAX_NUMBER = 1e15
"""Bound of every number: far above what a run can count, and far below where arithmetic overflows.
"""


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns a finite number of a record; None where it has none."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and abs(value) <= MAX_NUMBER else None


def numbers(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the numbers of the records that have one."""
    values = [number(record, key) for record in records]
    return [value for value in values if value is not None]


def share(value: float) -> str:
    """Returns a share in words, with one digit more near all or nothing, as the page shows it."""
    percent = 100 * value
    size = abs(percent)
    digits = 1 if size % 100 != 0 and (size < 10 or size > 90) else 0
    rounded = math.floor(size * 10**digits + 0.5) / 10**digits
    return f"{math.copysign(rounded, percent):.{digits}f}%"


def index(record: Mapping[str, Any], key: str) -> int | None:
    """Returns a number of a record that counts from 0; None where it has none."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**31 else None


def indices(records: Iterable[Mapping[str, Any]], key: str) -> list[int]:
    """Returns the indices of the records that have one."""
    values = [index(record, key) for record in records]
    return [value for value in values if value is not None]


def text(record: Mapping[str, Any], key: str) -> str:
    """Returns a text of a record; empty where it has none."""
    value = record.get(key)
    return value if isinstance(value, str) else ""


def mapping(record: Any, key: str) -> Mapping[str, Any]:
    """Returns a mapping of a record; empty where it has none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(record: Any, key: str) -> list[Any]:
    """Returns a list of a record; empty where it has none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, list) else []
