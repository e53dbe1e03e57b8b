"""Weights & Biases: one run by its id; its files are in RUN/trackers/wandb. After WANDB_MODE=offline `wandb sync` sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from pa_npu.telemetry.trackers.protocol import TrackedRun

STEP = "iteration"
"""The axis of all curves: wandb's own step cannot go back, and an evaluation may come later than the iteration after it."""


class WandB:
    def __init__(self, run: TrackedRun) -> None:
        directory = Path(run.run_dir) / "trackers"
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.config),
            dir=str(directory),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self.id = str(self._run.id)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows]), STEP: step})

    def finish(self) -> None:
        self._run.finish()


start = WandB
