"""What a trainer rank needs of a training backend: TrainBackend, and how one is made (`BackendModule`).

Megatron is the first (`pa_npu.backends.megatron`); another is a package beside it and a line in `pa_npu.backends.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from pa_npu.algorithm.agreement import DifferenceSums
from pa_npu.checkpoints.saving import PlannedSave
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.control.messages import UpdateReport
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher, PublishStats, WeightSource
from pa_npu.publish.version_gate import VersionGate
from pa_npu.samples.group_source import Traffic
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import ReplicaLinks
from pa_npu.telemetry.sample_store import TrainerLogprobs
from pa_npu.telemetry.timeline import Timeline


@dataclass(frozen=True)
class ProbeResult:
    """What engine and trainer log-probs differ by over some tokens (I5). difference_max: the largest absolute one."""

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
    """What an optimizer step did, equal on all ranks. differences: of its tokens' log-probs from the engines' (I5); first: of those
    in every replica's first microbatch."""

    report: UpdateReport
    differences: DifferenceSums
    first: ProbeResult


class MicrobatchSource(Protocol):
    """The microbatches of one update as they arrive; `waited_s` counts the seconds spent waiting for them.

    is_last: whether the microbatch handed out last is the update's last one. traffic: how they came to this replica so far.
    """

    @property
    def waited_s(self) -> float: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def is_last(self) -> bool: ...

    def settle(self) -> int:
        """How many groups the update has; waits until that is known. Raises DeadlineExceeded."""

    def __iter__(self) -> Iterator[Microbatch]: ...

    def __next__(self) -> Microbatch: ...


class TrainBackend(Protocol):
    """One rank's share of the policy. Every method is collective: all trainer ranks call it in the same order."""

    @property
    def place(self) -> Place:
        """This rank's place among the trainer ranks."""

    @property
    def software(self) -> str:
        """The backend with the versions of what it is made of, for people."""

    @property
    def device(self) -> torch.device:
        """Where microbatches are expected."""

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one stage of one replica; None where this rank is alone."""

    @property
    def replica_links(self) -> ReplicaLinks | None:
        """The ranks of this replica, on groups made for passing rollouts alone; None where a replica is one rank."""

    @property
    def gate(self) -> VersionGate:
        """Guards the weights that late engines are sent; closed while they change."""

    def published_weights(self, bucket_bytes: int, *, late: bool = False) -> WeightSource | None:
        """What this rank contributes to a publish; None on ranks of replicas other than the first, which send nothing.

        late: for engines that come inside an iteration, sent from a thread: the model that keeps the published weights
        longest, gathered over a group of its own.
        """

    def attach(self, publisher: Publisher) -> None:
        """Let `publish` send through it; without one no engine is sent anything."""

    def keep_logprobs(self, kept: TrainerLogprobs) -> None:
        """Give `kept` the log-probs of what is trained from here on; of use on a last stage's tensor leader only."""

    def accumulate(
        self, microbatches: MicrobatchSource, judge_first: Callable[[ProbeResult], None] | None = None
    ) -> list[TrainedResponse]:
        """Forward and backward over one update's microbatches as they arrive; gradients stay unnormalised sums.

        judge_first: called with this replica's first microbatch's differences before its backward, where log-probs are computed (on
        the last pipeline stage); it may raise. Returns what this replica has trained, counted where it goes through the model (I2).
        """

    def step(self) -> Update:
        """Divide by the update's normaliser, reduce, clip, apply."""

    def probe(self, microbatches: list[Microbatch]) -> ProbeResult:
        """Log-probs of the current policy against the engines' for the same tokens; changes nothing."""

    def publish(self, version: int, members: PublishMembers | None = None) -> PublishStats | None:
        """Send the weights to all engines, if there are any, and freeze them as the old policy where needed.

        Returns what this rank sent. Raises WeightSyncError on a leader that loses an engine; call it again, on all ranks, with the
        members that are left.
        """

    def skip_publish(self, version: int) -> None:
        """Begin `version` as `publish` does, while engines keep the version that was published last, and so do the trainers for
        engines that come late."""

    def engines_swapped(self) -> None:
        """Engines have swapped to what `publish` sent with PublishMembers.delayed. Before the next step, which changes it."""

    def policy_digest(self) -> str:
        """Digest of the weights that this rank trains (publish.digest.digest_of). Not collective."""

    def plan_save(self, directory: Path) -> PlannedSave:
        """Agree on what each rank writes into `directory` of the state as it is."""

    def load(self, directory: Path) -> int:
        """Restore a checkpoint and return its weight version."""

    def export(self, directory: Path) -> None:
        """Write the policy as an HF directory."""

    def close(self) -> None:
        """Leave the groups."""


class BackendModule(Protocol):
    """What the registry's entry for a backend offers."""

    def changes(self) -> list[str]:
        """What the backend changes in other packages for the whole of a trainer's process, one line each, for people."""

    def create(
        self,
        config: Config,
        spec: ModelSpec,
        platform: Platform,
        store: dist.Store,
        rank: int,
        local_rank: int,
        timeline: Timeline,
    ) -> TrainBackend:
        """Join the other trainer ranks on `store`, build this rank's share of the model and load its HF weights. Collective.

        local_rank: this process's device among its visible ones.
        """

    def export_checkpoint(self, checkpoint: Path, output: Path, model: str | None = None) -> None:
        """Write the policy of `checkpoint` as the HF directory `output`, in one process on the host.

        model: the HF model that the run began with, where it has moved since.
        """
