"""The tokens by which a run knows its teachers again, kept in its directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

WITNESSES = "teachers.json"
"""In the run directory: the tokens by which each teacher is known, and their log-probs."""


@dataclass(frozen=True, eq=False)
class Witness:
    """Tokens that a teacher has written, the last `written` of them, and their log-probs as it
    scores them.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class Witnesses:
    """The witnesses of a run's teachers, in its directory."""

    def __init__(self, run_dir: str) -> None:
        self._file = Path(run_dir) / WITNESSES

    def read(self, name: str) -> Witness | None:
        """Returns what an earlier attempt of the run has kept; None if there is nothing."""
        try:
            entry = json.loads(self._file.read_text(encoding="utf-8"))[name]
            return Witness(
                np.asarray(entry["tokens"], np.int32), np.asarray(entry["logprobs"], np.float32)
            )
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def keep(self, name: str, witness: Witness) -> None:
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            kept = {}
        kept[name] = {
            "tokens": witness.tokens.tolist(),
            "logprobs": [float(value) for value in witness.logprobs],
        }
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        draft.replace(self._file)
