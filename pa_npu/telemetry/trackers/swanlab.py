"""SwanLab: one experiment by its id, its files in RUN/trackers/swanlab. After SWANLAB_MODE=offline `swanlab sync` sends them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from pa_npu.telemetry.trackers.protocol import TrackedRun


class SwanLab:
    def __init__(self, run: TrackedRun) -> None:
        directory = Path(run.run_dir) / "trackers" / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("SWANLAB_MODE", "online")
        swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.config),
            log_dir=str(directory),
            mode=mode,
        )
        self.id = run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        swanlab.log(dict(values), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        swanlab.log({name: table}, step=step)

    def finish(self) -> None:
        swanlab.finish()


start = SwanLab
