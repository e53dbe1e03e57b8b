"""A run's identity with a tracker, and what the tracker has got: RUN/trackers/NAME.json."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pa_npu.telemetry.record_file import attempt, json_line

DIRECTORY = "trackers"
RECORDS = "records.jsonl"
"""The file in DIRECTORY that trackers follow: {"kind": iteration or version, "step": its number, "log": ..., "table": ...}."""
EXPLAINED = 3
"""Exit code of a tracker's process that has noted why it ends."""
_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 21  # within what each of the trackers takes


@dataclass(frozen=True)
class Identity:
    """id: of the run with the tracker; known: whether the tracker has it. iteration, version: the last that was given to it.

    delivered: messages that it has taken. lost: times that it could not do what it was asked; reason: of the last.
    """

    id: str
    project: str
    name: str
    known: bool = False
    iteration: int = -1
    version: int = -1
    delivered: int = 0
    lost: int = 0
    reason: str = ""

    def lacks(self, message: Mapping[str, Any]) -> bool:
        """Whether the tracker was not given this message yet."""
        return bool(getattr(self, message["kind"]) < message["step"])


class KeptIdentity:
    """Reads and writes one tracker's file; a new run, or a file that cannot be read, gets a new id."""

    def __init__(self, run_dir: Path | str, tracker: str, project: str = "", name: str = "") -> None:
        self._path = Path(run_dir) / DIRECTORY / f"{tracker}.json"
        self.value = Identity("".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)), project, name)
        self.read()

    def read(self) -> Identity:
        """Reads the identity as it is now: the tracker's process writes it while it runs."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.value = Identity(**json.loads(self._path.read_text(encoding="utf-8")))
        return self.value

    def update(self, **changes: Any) -> None:
        """The same with these fields, also on disk."""
        self.value = replace(self.value, **changes)
        attempt(self._path, self._write)

    def lose(self, reason: str) -> None:
        """Notes that the tracker did not do what it was asked."""
        self.update(lost=self.value.lost + 1, reason=reason)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json_line(asdict(self.value)) + "\n", encoding="utf-8")
        partial.replace(self._path)
