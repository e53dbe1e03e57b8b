"""trackio: one run by its name; it keeps a database in RUN/trackers/trackio unless TRACKIO_DIR or a Space is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pa_npu.telemetry.trackers.protocol import TrackedRun


def start(run: TrackedRun) -> Trackio:
    # read when the library is imported
    os.environ.setdefault("TRACKIO_DIR", str(Path(run.run_dir).resolve() / "trackers" / "trackio"))
    return Trackio(run)


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._library = trackio
        self.id = run.id if run.resumed else f"{run.name}-{run.id[:6]}"  # a run is known by its name alone
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._library.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def finish(self) -> None:
        self._run.finish()
