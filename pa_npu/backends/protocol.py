"""What the loop needs from a training backend; Megatron is the first, another is one more file like megatron_backend.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pa_npu.algorithm.agreement import DifferenceSums
from pa_npu.control.messages import UpdateReport
from pa_npu.samples.microbatch import Microbatch


@dataclass(frozen=True)
class ProbeResult:
    """What engine and trainer log-probs differ by over the probe's tokens (I5). difference_max: the largest absolute one."""

    difference_max: float
    differences: DifferenceSums


@dataclass(frozen=True)
class TrainedResponse:
    """One response that went through forward and backward: its group's dispatch index, its number there, its trained tokens."""

    group: int
    number: int
    tokens: int


@dataclass(frozen=True)
class Update:
    """What an optimizer step did, equal on all ranks. differences: of its tokens' log-probs from the engines' (I5)."""

    report: UpdateReport
    differences: DifferenceSums


@dataclass(frozen=True)
class Members:
    """Who takes part in a publish: `workers` engine workers, in the groups of this epoch."""

    epoch: int
    workers: int


class MicrobatchSource(Protocol):
    """The microbatches of one update as they arrive; `waited_s` counts the seconds spent waiting for them."""

    waited_s: float

    def __iter__(self) -> Iterator[Microbatch]: ...

    def __next__(self) -> Microbatch: ...


class PlannedSave(Protocol):
    """This rank's share of a checkpoint, with the weights as they were when it was planned."""

    description: dict[str, Any]
    """The backend's fields of CheckpointMeta."""

    def write(self) -> None:
        """Write this rank's files, alone, possibly in a forked process."""

    def release(self) -> None:
        """Drop the data, which a forked process has."""

    def complete(self) -> None:
        """When all ranks have written: make the files a checkpoint that `load` reads. A rank does its part alone."""


class TrainBackend(Protocol):
    """One rank's share of the policy. Every method is collective: all trainer ranks call it in the same order."""

    def accumulate(self, microbatches: MicrobatchSource) -> list[TrainedResponse]:
        """Forward and backward over one update's microbatches as they arrive; gradients stay unnormalised sums.

        Returns what this replica has trained, counted where it goes through the model (I2).
        """

    def step(self) -> Update:
        """Divide by the update's normaliser, reduce, clip, apply."""

    def probe(self, microbatches: list[Microbatch]) -> ProbeResult:
        """Log-probs of the current policy against the engines' for the same tokens; changes nothing."""

    def publish(self, version: int, members: Members | None = None) -> None:
        """Send the weights to all engines, if there are any, and freeze them as the old policy where needed.

        Raises WeightSyncError on a leader that loses an engine; call it again, on all ranks, with the members that are left.
        """

    def plan_save(self, directory: Path) -> PlannedSave:
        """Agree on what each rank writes into `directory` of the state as it is."""

    def load(self, directory: Path) -> int:
        """Restore a checkpoint and return its weight version."""

    def export(self, directory: Path) -> None:
        """Write the policy as an HF directory."""
