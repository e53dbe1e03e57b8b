"""Fixtures of data."""

from __future__ import annotations

from typing import Any

import pytest

from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()
