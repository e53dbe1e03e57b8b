"""TensorBoard: event files in RUN/tensorboard; a resumed run takes back what comes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from pa_npu.telemetry.trackers.protocol import TrackedRun

DIRECTORY = "tensorboard"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id
        # readers drop what earlier event files have of the purged step and later ones
        self._writer = SummaryWriter(str(Path(run.run_dir) / DIRECTORY), purge_step=run.first_step or None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        text = _markdown(columns, rows).encode("utf-8", "replace").decode()
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


start = TensorBoard
