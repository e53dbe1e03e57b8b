"""The interface of trackers: one starts a run, or goes on with one, and takes numbers and tables, in a thread of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it.

    run_dir: what the tracker writes locally goes into it. id: that the run had with this tracker before, or a new one to use;
    resumed: which of both. first_step: of this attempt. config: resolved, flat.
    """

    run_dir: str
    project: str
    name: str
    id: str
    resumed: bool
    first_step: int
    config: Mapping[str, Any]


class Tracker(Protocol):
    """One run with one tracker. Every method may raise anything, and may take as long as it likes: it is alone in its thread."""

    id: str
    """Names the run to the tracker. Given as TrackedRun.id, it makes a later process go on with the run, where the tracker can."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step. Steps of training and of evaluations ascend each on their own."""
        ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Samples of a step: texts and numbers."""
        ...

    def finish(self) -> None:
        """Ends the run with the tracker. Everything is where it belongs when this returns."""
        ...


REQUIREMENTS = {
    "tensorboard": "tensorboard>=2.14",
    "wandb": "wandb>=0.19,<1",
    "swanlab": "swanlab>=0.10,<1",
    "mlflow": "mlflow>=3,<4",
    "trackio": "trackio>=0.43,<1",
}
"""The package of each tracker. The extras of setup.py with the same names install it, and give the reasons of the ranges."""


def find_start(tracker: str) -> Callable[[TrackedRun], Tracker]:
    """The `start` of the module with the tracker's name; imports it, and with it the library."""
    start: Callable[[TrackedRun], Tracker] = importlib.import_module(f"{__package__}.{tracker}").start
    return start
