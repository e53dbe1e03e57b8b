"""Formats numbers with nouns, and values of any kind, for a sentence."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


def counted(number: int, noun: str) -> str:
    """Returns the number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def three_digits(value: float) -> str:
    """Returns the number with three significant digits and no exponent: 1030, not 1.03e+03."""
    return f"{float(f'{value:.3g}'):.15g}"


def as_json(value: Any, max_characters: int = 80) -> str:
    """Returns the value as JSON, cut to `max_characters`."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    if len(text) <= max_characters:
        return text
    return text[: max_characters - 3] + "..."


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` is probably a misspelling of, or None."""
    by_letters = {_letters(candidate): candidate for candidate in known}
    written = _letters(name)
    # letters in another order are the likelier slip: gpro is grpo, not gspo
    swapped = [letters for letters in by_letters if sorted(letters) == sorted(written)]
    similar = swapped or difflib.get_close_matches(written, list(by_letters), n=1, cutoff=0.7)
    return by_letters[similar[0]] if similar else None


def choose_among(name: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the known name that is nearest, if one is near."""
    nearest = nearest_name(name, known)
    return f"did you mean {nearest}?" if nearest else "use one of these"


def _letters(name: str) -> str:
    return name.lower().replace("_", "-")
