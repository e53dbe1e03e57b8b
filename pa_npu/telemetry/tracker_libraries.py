"""The trackers' libraries: a class for each, which starts a run, or goes on with one, and takes numbers and tables.

A library is imported where its run starts, in the thread of its tracker.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Identity:
    """id: of the run with the tracker; known: whether the tracker has it. iteration, version: the
    last that was given to it.
    """

    id: str
    project: str
    name: str
    known: bool = False
    iteration: int = -1
    version: int = -1


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it.

    identity: with the id that the run had with this tracker before, or a new one to use. directory:
    for what the tracker writes locally. first_step: of this attempt. config: resolved, flat.
    """

    identity: Identity
    directory: Path
    first_step: int
    config: Mapping[str, Any]


class Tracker(ABC):
    """One run with one tracker. Every method may raise anything, and may take as long as it likes:
    it is alone in its thread.

    id: names the run to the tracker. Given as Identity.id, it makes a later process go on with the
    run, where the tracker can.
    """

    id: str

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step. Steps of training and of evaluations ascend each on their own."""

    @abstractmethod
    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Samples of a step: texts and numbers."""

    @abstractmethod
    def finish(self) -> None:
        """Ends the run with the tracker. Everything is where it belongs when this returns."""


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; a resumed run takes back what comes again."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id = run.identity.id
        # readers drop what earlier event files have of the purged step and later ones
        self._writer = SummaryWriter(
            str(run.directory.parent / "tensorboard"), purge_step=run.first_step or None
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)
        self._writer.add_text(name, text.encode("utf-8", "replace").decode(), step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _markdown_cell(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(str(value).split()).replace("|", "\\|")


class _Logged(Tracker):
    """Libraries that log a dictionary of numbers and tables. library: the module; run: what logs,
    which may be the module.
    """

    _library: Any
    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put(step, dict(values))

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self._put(step, {name: self._made(list(columns), [list(row) for row in rows])})

    def finish(self) -> None:
        self._run.finish()

    def _put(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)

    def _made(self, columns: list[str], rows: list[list[Any]]) -> Any:
        return self._library.Table(columns=columns, data=rows)


class WandB(_Logged):
    """Weights & Biases: one run by its id; its files are in RUN/trackers/wandb. After
    WANDB_MODE=offline `wandb sync` sends them.

    The axis of all curves is a number of ours: wandb's own step cannot go back, and an evaluation
    may come later than the iteration after it.
    """

    _STEP = "iteration"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._library = wandb
        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.identity.project,
            name=run.identity.name,
            id=run.identity.id,
            resume="allow",
            config=dict(run.config),
            dir=str(run.directory),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        self.id = str(self._run.id)
        self._run.define_metric(self._STEP)
        self._run.define_metric("*", step_metric=self._STEP)

    def _put(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({**values, self._STEP: step})


class SwanLab(_Logged):
    """One experiment by its id, its files in RUN/trackers/swanlab.

    After SWANLAB_MODE=offline `swanlab sync` sends them.
    """

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._library = self._run = swanlab
        directory = run.directory / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        swanlab.init(
            project=run.identity.project,
            name=run.identity.name,
            id=run.identity.id,
            resume="allow",
            config=dict(run.config),
            log_dir=str(directory),
            mode=os.environ.get("SWANLAB_MODE", "online"),
        )
        self.id = run.identity.id

    def _made(self, columns: list[str], rows: list[list[Any]]) -> Any:
        table = self._library.echarts.Table()
        table.add(columns, rows)
        return table


class Trackio(_Logged):
    """One run by its name; it keeps a database in RUN/trackers/trackio unless TRACKIO_DIR or a
    Space is named.
    """

    def __init__(self, run: TrackedRun) -> None:
        # read when the library is imported
        os.environ.setdefault("TRACKIO_DIR", str(run.directory.resolve() / "trackio"))
        import trackio

        self._library = trackio
        identity = run.identity
        # known by its name alone
        self.id = identity.id if identity.known else f"{identity.name}-{identity.id[:6]}"
        self._run = trackio.init(
            project=identity.project,
            name=self.id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


class MLflow(Tracker):
    """One run of an experiment; the store is MLFLOW_TRACKING_URI's, else a database in
    RUN/trackers.

    A server cannot be told an id: it gives one, which is kept.
    """

    _REFUSED = re.compile(r"[^\w\-. :/]")  # of the characters in a metric's name
    _LONGEST_VALUE = 500  # characters of a parameter, the least that any server takes
    _PARAMETERS_AT_ONCE = 100

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._library = mlflow
        directory = run.directory.resolve()
        identity = run.identity
        directory.mkdir(parents=True, exist_ok=True)
        local = not os.environ.get("MLFLOW_TRACKING_URI")
        if local:
            mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
        self._client = mlflow.MlflowClient()
        if identity.known:
            self.id = str(self._client.get_run(identity.id).info.run_id)
            self._client.update_run(self.id, status="RUNNING")
            return
        place = {"artifact_location": (directory / "mlflow_artifacts").as_uri()} if local else {}
        existing = self._client.get_experiment_by_name(identity.project)
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment(identity.project, **place)
        )
        tags = {"pa_npu.id": identity.id}
        self.id = str(
            self._client.create_run(experiment, run_name=identity.name, tags=tags).info.run_id
        )
        parameters = [
            mlflow.entities.Param(key, str(value)[: self._LONGEST_VALUE])
            for key, value in run.config.items()
        ]
        for first in range(0, len(parameters), self._PARAMETERS_AT_ONCE):
            self._client.log_batch(
                self.id, params=parameters[first : first + self._PARAMETERS_AT_ONCE]
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = self._library.utils.time.get_current_time_millis()
        metric = self._library.entities.Metric
        metrics = [metric(self._named(name), value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        data = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        self._client.log_table(self.id, data, f"{name}/iteration_{step:06d}.json")

    def finish(self) -> None:
        self._client.set_terminated(self.id)

    def _named(self, name: str) -> str:
        """Returns the name with the characters that MLflow refuses replaced; "@" as verl does."""
        return self._REFUSED.sub("_", name.replace("@", "_at_"))


TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard>=2.14"),
    "wandb": (WandB, "wandb>=0.19,<1"),
    "swanlab": (SwanLab, "swanlab>=0.10,<1"),
    "mlflow": (MLflow, "mlflow>=3,<4"),
    "trackio": (Trackio, "trackio>=0.43,<1"),
}
"""Each tracker with its package.

The extras of setup.py with the same names install it, and give the reasons of the ranges.
"""
