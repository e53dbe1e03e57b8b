"""Lines that refuse a run."""

from __future__ import annotations

import pytest

from pa_npu.launcher.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line; returns its one line on stderr."""
    code = main(["run", *arguments])
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("error: ") and error.count("\n") == 1, f"not one line: {error!r}"
    return error
