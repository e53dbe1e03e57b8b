"""Fixtures of rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.users_rewards import USERS_MODULE


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_rewards.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)
