"""The interface of training backends to a trainer rank: TrainBackend, and how one is made (`BackendModule`).

Megatron is the first (`pa_npu.backends.megatron`); another is a package beside it and a line in
`pa_npu.backends.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.algorithm.model_outputs import Outputs, Weights
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient, Reductions
from pa_npu.checkpoints.directories import CheckpointMeta
from pa_npu.checkpoints.saving import PlannedSave
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.publish.publisher import WeightSource
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.notice import Notice
from pa_npu.samples.replica_feed import ReplicaLinks, Traffic
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.computation import Computation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By model.dtype."""


@dataclass(frozen=True)
class Routing:
    """How a mixture's routers spread an update's tokens.

    expert_imbalance: tokens of a layer's busiest expert over the mean of its experts, mean over
    layers; expert_imbalance_max: of the worst layer; expert_imbalance_layers: of each, by its
    number. routing_entropy: of a token's gate probabilities, in nats, mean over tokens and layers.
    experts_untouched: of all layers' experts, how many no token has taken since the trainers began.
    With algorithm.router_replay, else None: replay_changed: share of the replayed choices that
    routers would not have made;
    expert_choices_missing: tokens without expert choices from which a target follows.
    """

    expert_imbalance: float
    expert_imbalance_max: float
    expert_imbalance_layers: dict[str, float]
    routing_entropy: float
    experts_untouched: int
    replay_changed: float | None = None
    expert_choices_missing: int | None = None


@dataclass(frozen=True)
class Step:
    """The result of an optimizer step, equal on all ranks. grad_norm: before it was clipped.
    routing: of a mixture, where it is known."""

    grad_norm: float
    learning_rate: float
    routing: Routing | None = None


@dataclass(frozen=True)
class StepOptions:
    """What one step takes in place of the configuration's: those of a client that says them with
    every step. Weight decay is of every trained tensor, as torch's AdamW has it.

    updates: steps before this one, which the moments are of. clip_norm: 0 clips nothing.
    """

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    clip_norm: float
    updates: int


@dataclass(frozen=True, eq=False)
class SteppedTensor:
    """A tensor that the optimizer steps, as far as this rank steps it: flat views of the memory
    itself, [n], n may be 0.

    name: the parameter's. dimensions: of the whole parameter, by which weight decay goes.
    weights: fp32, those that are stepped. model: in model.dtype, what the model computes with; None
    where it computes with `weights`, or with what it makes of them in every pass.
    gradient: of what the step will apply; None where nothing has come to the parameter.
    mean, square: AdamW's moments; None before the first step.
    settings: the optimizer's own group, whose "lr" and "weight_decay" are read when they are asked
    for.
    may_be_zero: whether its gradient can be exactly 0 although the update's is not, as that of an
    expert to which no token went.
    share: 1 over the number of ranks that step the same elements; 0 of a tensor that another tensor
    must follow.
    """

    name: str
    dimensions: int
    weights: torch.Tensor
    model: torch.Tensor | None
    gradient: torch.Tensor | None
    mean: torch.Tensor | None
    square: torch.Tensor | None
    settings: Mapping[str, Any]
    may_be_zero: bool = False
    share: float = 1.0

    @property
    def rate(self) -> float:
        return float(self.settings["lr"])

    @property
    def decay(self) -> float:
        return float(self.settings["weight_decay"])


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor that this rank's policy computes with. weights: [n], a flat view of the memory."""

    name: str
    weights: torch.Tensor


@dataclass(frozen=True, eq=False)
class CopiedWeights:
    """Tensors of which every rank of a group holds the same values. among: the ranks, in words."""

    group: dist.ProcessGroup
    among: str
    tensors: Sequence[HeldTensor]


class MicrobatchSource(Protocol):
    """The microbatches of one update as they arrive; `waited_s` counts the seconds spent waiting
    for them.

    is_last: whether the microbatch handed out last is the update's last one. traffic: how they came
    to this replica so far.
    advantages: of the groups handed out whose credit is known, by dispatch index: those of each
    sample's trained tokens, float32.
    by_rule: the groups so far that are trained by rule, of which no microbatch comes.
    """

    @property
    def waited_s(self) -> float: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def advantages(self) -> Mapping[int, Sequence[np.ndarray]]: ...

    @property
    def by_rule(self) -> Sequence[Notice]: ...

    def settle(self) -> int:
        """Waits until the number of the update's groups is known, and returns it. Raises
        DeadlineExceeded.
        """

    def __iter__(self) -> Iterator[Microbatch]: ...

    def __next__(self) -> Microbatch: ...


class TrainBackend(Protocol):
    """One rank's share of the models: runs them over what the objective asks for, steps, gives and
    loads weights and state.

    Every method is collective: all trainer ranks call it in the same order. What is trained and why
    is the objective's (pa_npu.algorithm.objective), when it is published and saved the trainer's.
    Whoever runs a model that takes token ids alone refuses microbatches with attachments
    (refuse_attachments).
    """

    @property
    def place(self) -> Place:
        """This rank's place among the trainer ranks."""

    @property
    def software(self) -> str:
        """The backend with the versions of what it is made of, for people."""

    @property
    def device(self) -> torch.device:
        """The device that microbatches are expected on."""

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one stage of one replica; None where this rank is alone."""

    @property
    def replica_links(self) -> ReplicaLinks | None:
        """The ranks of this replica, on groups made for passing rollouts alone; None where a
        replica is one rank.
        """

    @property
    def reductions(self) -> Reductions:
        """Sums over trainer ranks."""

    def published_weights(
        self, bucket_bytes: int, late_from: str | None = None
    ) -> WeightSource | None:
        """Returns this rank's part of a publish; None on ranks that take no part.

        The ranks that send are those for which Place.is_publisher(publish.senders) is true. With
        "leader" the other ranks whose place `sends` give their parts to their stage's leader.

        late_from: for engines that come inside an iteration, sent from a thread: of which model
        ("policy", or a copy), in host memory and over a group of its own.
        """

    def name_policy(self, weights: Weights, name: str = "policy") -> None:
        """Say which weights the policy holds, or the model `name`.

        Copies take the name along, and log-probs carry it (Outputs).
        """

    def copy_policy(self, name: str) -> None:
        """Make "old", "reference" or "published" equal to the policy as it is now.

        Done on the device when it returns.
        """

    def accumulate(
        self, microbatches: MicrobatchSource, objective: Objective
    ) -> ReducedGradient | None:
        """Forward and backward over one update's microbatches as they arrive; gradients are summed,
        over replicas too, undivided.

        Begins with gradients of zero, before it takes the first microbatch. Done on the device when
        it returns. What it returns says how they were summed over replicas, on elements from
        objective.first_sampled on; None where there is one.
        """

    def gradient_size(self, first: int = 0, every: int = SAMPLED_EVERY) -> torch.Tensor:
        """Returns the norm of the gradient that this rank holds, or of one element in `every` from
        `first` on; fp32 []. 0 where there is none. Not collective.
        """

    def scale_gradients(self, factor: float) -> None:
        """Multiply the update's gradient."""

    def stepped(self) -> list[SteppedTensor]:
        """Returns all tensors that the optimizer steps, equally many on all replicas, in one order.
        Not collective.

        Between `scale_gradients` and `step` their gradients are those that the step clips and
        applies. The step writes into the same memory, except that it makes moments where there are
        none, and that optimizer.offload moves what is stepped.
        """

    def copied(self) -> list[CopiedWeights]:
        """Returns what this rank's policy holds copies of, for every group of ranks; equally many
        tensors on all ranks of a group, in one order. Not collective.
        """

    def share_weights(self) -> None:
        """Let every rank compute with what was written into SteppedTensors, into `model` where that
        is there, else into `weights`. Collective; a step does it by itself."""

    def step(self) -> Step:
        """Clip and apply the gradient. Done on the device when it returns.

        It is clipped by the factor clip_grad / (norm + 1e-6), where that is below 1.
        """

    def evaluate(
        self, microbatches: list[Microbatch], on_outputs: Callable[[Microbatch, Outputs], None]
    ) -> None:
        """Calls `on_outputs` with the policy's log-probs where they are computed; changes nothing.

        Microbatches come from the host.
        """

    def rounding(
        self,
        microbatches: list[Microbatch],
        on_logprobs: Callable[[Microbatch, torch.Tensor, torch.Tensor], None],
    ) -> bool:
        """Calls `on_logprobs` with each microbatch's log-probs twice: as training computes those of the
        iteration's version, and the policy's in a wider type (bf16 in fp32, fp32 in fp64) from the
        same weights. One layer's wide copy at a time is enough.

        Returns False on a device without a wider type. Changes nothing. Microbatches come from the host, as
        many as each replica likes.
        """

    def digest(self, name: str = "policy") -> str:
        """Digest of this rank's weights of the policy, or of a copy
        (weight_transfer.digest.digest_of). Not collective.
        """

    def computation(self) -> Computation:
        """Returns what this rank's live modules compute with beside their weights, to compare with
        engines (I5).
        """

    def plan_save(self, directory: Path, with_reference: bool) -> PlannedSave:
        """Agree on what each rank writes into `directory` of the state as it is. with_reference:
        that is no longer the HF model.
        """

    def load(self, directory: Path) -> CheckpointMeta:
        """Restore a checkpoint."""

    def export(self, directory: Path) -> None:
        """Write the policy as an HF directory."""

    def close(self) -> None:
        """Leave the groups."""


def refuse_attachments(microbatch: Microbatch, config: Config) -> None:
    """Raises ConfigError where a microbatch has attachments: for models that take token ids alone,
    in every pass over it.
    """
    if not microbatch.attachments:
        return
    names = sorted({name for packed in microbatch.attachments for name in packed.arrays})
    groups = ", ".join(map(str, microbatch.group_indices))
    raise ConfigError(
        f"environment.name: {config.environment.name} attaches {', '.join(names)} to samples of "
        f"group {groups} of iteration {microbatch.iteration}, but {config.model.path} with "
        f"trainer.backend={config.trainer.backend} takes token ids alone; choose an environment "
        "that attaches nothing, or a model and a backend that take attachments"
    )


class BackendModule(Protocol):
    """The functions that the registry's entry for a backend offers."""

    def changes(self) -> list[str]:
        """Returns one line, for people, for each change to another package in a trainer's process."""

    def fit(self, config: Config, spec: ModelSpec) -> tuple[Config, list[str]]:
        """Returns the configuration as this model needs it, and a line for people about each thing
        that was found; before anything starts.

        Raises ConfigError where the backend cannot train the model.
        """

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
        """Join the other trainer ranks on `store`, build this rank's share of the model and load
        its HF weights. Collective.

        Args:
            config: the run's, after `fit`.
            spec: shape of the model in model.path.
            platform: of the device kind that the run uses.
            store: rendezvous of all trainer ranks, for this backend alone.
            rank: among all trainer ranks, from 0.
            local_rank: this process's device among its visible ones.
            timeline: takes spans of what the rank does.

        Raises:
            ConfigError: the backend cannot train the model as configured.
            DeadlineExceeded: other ranks do not join in time.
        """

    def export_checkpoint(
        self, checkpoint: Path, output: Path, model: str | None = None, merged: bool = False
    ) -> None:
        """Write the policy of `checkpoint` as the HF directory `output`, in one process on the
        host.

        Args:
            checkpoint: directory of a complete checkpoint (.../iteration_000010).
            output: directory to make; it must not hold a model yet.
            model: the HF model that the run began with, where it has moved since.
            merged: of adapters, write the model with them merged into it, also where
            checkpoint.export_hf says otherwise.

        Raises:
            UserError: the checkpoint or the model cannot be read, or is of another form.
            ExportError: the directory cannot be written.
        """
