"""A run's identity with a tracker, and what the tracker has got: RUN/trackers/NAME.json."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pa_npu.telemetry.record_file import attempt, json_line

DIRECTORY = "trackers"
_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 21  # within what each of the trackers takes


@dataclass(frozen=True)
class Identity:
    """id: of the run with the tracker; known: whether the tracker has it. iteration, version: the last that it has got."""

    id: str
    project: str
    name: str
    known: bool = False
    iteration: int = -1
    version: int = -1


class KeptIdentity:
    """Reads and writes one tracker's file; a new run, or a file that cannot be read, gets a new id."""

    def __init__(self, run_dir: Path | str, tracker: str, project: str, name: str) -> None:
        self._path = Path(run_dir) / DIRECTORY / f"{tracker}.json"
        self.value = _read(self._path) or Identity(_new_id(), project, name)

    def update(self, **changes: object) -> None:
        """The same with these fields, also on disk."""
        self.value = replace(self.value, **changes)  # type: ignore[arg-type]
        attempt(self._path, self._write)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json_line(asdict(self.value)) + "\n", encoding="utf-8")
        partial.replace(self._path)


def _read(path: Path) -> Identity | None:
    try:
        return Identity(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
