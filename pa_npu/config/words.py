"""Puts numbers with their nouns, and values of any kind, into a sentence."""

from __future__ import annotations

import json
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(value: Any, most: int = 80) -> str:
    """A value as it is written in JSON, cut to so many characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 3] + "..."
