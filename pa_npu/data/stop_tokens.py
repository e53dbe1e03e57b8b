"""Texts of the tokens at which a model's responses stop, as its tokenizer's directory names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = "generation_config.json"


def stop_texts(tokenizer: Any) -> tuple[str, ...]:
    """Returns the texts of the tokenizer's end token, and of those that the model's
    generation_config.json names.
    """
    stops = [str(getattr(tokenizer, "eos_token", None) or "")]
    for token in _named_tokens(Path(str(getattr(tokenizer, "name_or_path", "") or "."))):
        stops.append(str(tokenizer.convert_ids_to_tokens(token)))
    return tuple(stop for stop in stops if stop)


def _named_tokens(directory: Path) -> list[int]:
    """Returns the ids of the file; none where it cannot be read, which the check of the model's
    files says (families/model_directory.py).
    """
    try:
        tokens = json.loads((directory / _FILE).read_text(encoding="utf-8"))["eos_token_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    several = tokens if isinstance(tokens, list) else [tokens]
    return [token for token in several if type(token) is int]


def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """Returns the texts of the tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(token) for token in added if getattr(token, "special", False)}
    texts |= {str(text) for text in getattr(tokenizer, "all_special_tokens", ())}
    return tuple(sorted(text for text in texts if text))
