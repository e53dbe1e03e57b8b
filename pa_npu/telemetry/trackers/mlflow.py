"""MLflow: one run of an experiment; the store is MLFLOW_TRACKING_URI's, else a database in RUN/trackers.

A server cannot be told an id: it gives one, which is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric

from pa_npu.telemetry.trackers.protocol import TrackedRun

_REFUSED = re.compile(r"[^\w\-. :/]")  # of the characters in a metric's name
_LONGEST_VALUE = 500  # characters of a parameter, the least that any server takes
_PARAMETERS_AT_ONCE = 100


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        directory = Path(run.run_dir).resolve() / "trackers"
        directory.mkdir(parents=True, exist_ok=True)
        local = not os.environ.get("MLFLOW_TRACKING_URI")
        if local:
            mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
        self._client = mlflow.MlflowClient()
        if run.resumed:
            self.id = str(self._client.get_run(run.id).info.run_id)
            self._client.update_run(self.id, status="RUNNING")
            return
        place = {"artifact_location": (directory / "mlflow_artifacts").as_uri()} if local else {}
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, **place)
        own = {"pa_npu.id": run.id}
        self.id = str(self._client.create_run(experiment, run_name=run.name, tags=own).info.run_id)
        parameters = [mlflow.entities.Param(key, str(value)[:_LONGEST_VALUE]) for key, value in run.config.items()]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self.id, params=parameters[first : first + _PARAMETERS_AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = mlflow.utils.time.get_current_time_millis()
        metrics = [Metric(metric_name(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        self._client.log_table(self.id, data, f"{name}/iteration_{step:06d}.json")

    def finish(self) -> None:
        self._client.set_terminated(self.id)


def metric_name(name: str) -> str:
    """The name with the characters that MLflow refuses replaced; "@" as verl does."""
    return _REFUSED.sub("_", name.replace("@", "_at_"))


start = MLflow
