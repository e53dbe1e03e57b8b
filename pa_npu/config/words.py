"""Formats numbers with nouns, and values of any kind, for a sentence."""

from __future__ import annotations

import json
from typing import Any


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def as_json(value: Any, max_characters: int = 80) -> str:
    """Returns the value as JSON, cut to `max_characters`."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    if len(text) <= max_characters:
        return text
    return text[: max_characters - 3] + "..."
