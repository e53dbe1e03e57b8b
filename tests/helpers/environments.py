"""Environments of their own that `bash tests/run.sh nightly` makes, for packages that cannot stand beside engines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python_of(name: str) -> Path:
    """Returns the interpreter of requirements/NAME.txt; it is not there where that is not installed."""
    return ROOT / f".venv-{name}" / "bin" / "python"


def needs(name: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that need such an environment."""
    return pytest.mark.skipif(
        not python_of(name).exists(), reason=f"bash tests/run.sh nightly makes .venv-{name}"
    )
