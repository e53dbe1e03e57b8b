"""Scores that a judge has given, on disk, by what it was asked: a resumed run gets the same ones (I6), and asks once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_BUSY_S = 5.0


class JudgeCache:
    """path: a database that several processes may use; None keeps nothing. What the disk refuses costs its entries, said once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._database.execute(
                "create table if not exists scores (content text primary key, score real, answer text)"
            )
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def get(self, content: Any) -> float | None:
        """The score of what has these contents (JSON)."""
        if self._database is None:
            return None
        try:
            row = self._database.execute("select score from scores where content = ?", (_key(content),)).fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return float(row[0]) if row else None

    def put(self, content: Any, score: float, answer: str) -> None:
        """answer: what the judge wrote, for people who look into the file."""
        if self._database is None:
            return
        try:
            clean = answer.encode("utf-8", "replace").decode()
            self._database.execute("insert or replace into scores values (?, ?, ?)", (_key(content), score, clean))
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()

    def _give_up(self, error: Exception) -> None:
        log.warning("reward.judge: scores: %s cannot be used (%s); the judge is asked every time", self._path, error)
        self.close()
        self._database = None


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
