"""One rank's policy through its versions: updates by the objective over what the backend runs, copies, checkpoints.

What every training backend needs alike stands here; TrainBackend is what is left to write for one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.algorithm.agreement import DifferenceSums
from pa_npu.algorithm.objective import (
    FixedWeights,
    Objective,
    Outputs,
    PolicyState,
    Targets,
    TrainedResponse,
    measure,
)
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, MetricSums, Statistics, Totals
from pa_npu.backends.protocol import MicrobatchSource, Routing, Step, TrainBackend
from pa_npu.checkpoints.directories import damaged
from pa_npu.checkpoints.provenance import layout_of
from pa_npu.checkpoints.saving import PlannedSave
from pa_npu.config.schema import Config
from pa_npu.control.messages import UpdateReport
from pa_npu.errors import InvariantViolation
from pa_npu.platform.base import Platform
from pa_npu.publish.late_engines import CopyGate, VersionGate
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import Traffic
from pa_npu.telemetry.sample_store import TrainerLogprobs
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.finite_difference import FiniteDifference, finite_difference
from pa_npu.trainer.invariants import GradientSum
from pa_npu.trainer.loss_checks import LossGradient
from pa_npu.trainer.step_replay import StepReplay


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step, equal on all ranks.

    differences: of its tokens' log-probs from the engines' (I5); exact: whether the weights that
    sampled them computed both; first: differences in every replica's first microbatch. normaliser:
    what the gradient was divided by.
    """

    report: UpdateReport
    differences: DifferenceSums
    exact: bool
    first: DifferenceSums
    normaliser: float


# AdamW moves a weight by about the learning rate. With one below this the weights may differ and
# all log-probs in fp32 be equal.
_LEAST_RATE = 1e-10
# Of what a rank says of its optimizer for a checkpoint: two digests, its number and a share, as
# JSON.
_DESCRIPTION_BYTES = 512


class Learner:
    """One rank's policy, and the models beside it.

    Every method is collective. gate: guards the weights that late engines are sent; closed while
    they change.
    """

    def __init__(
        self,
        config: Config,
        backend: TrainBackend,
        platform: Platform,
        timeline: Timeline,
        *,
        kept: TrainerLogprobs | None = None,
    ) -> None:
        """kept: gets the log-probs of what is trained; of use on a last stage's tensor leader
        only.
        """
        self._config = config
        self._algorithm = build_algorithm(config)
        self._models = trainer_models(config, self._algorithm)
        self.backend = backend
        self._platform = platform
        self._timeline = timeline
        gate = VersionGate if self._models.published_source == "policy" else CopyGate
        self.gate = gate(config.deadlines.border_timeout_s)
        self._kept = kept
        self._source: MicrobatchSource | None = None
        self._seen_traffic = Traffic()
        self._policy: PolicyState | None = None  # unknown until the first publish
        # the policy's that the reference was last made equal to; 0 is the HF model
        self._reference_version = 0
        self._reference_digest: str | None = None
        self._replay = StepReplay(config, backend.place.rank)
        self._gradient_at_start: torch.Tensor | None = None
        self._computed_with: str | None = None
        self._name_reference()
        for name, directory in self._models.directories.items():
            backend.name_policy(FixedWeights(directory), name)
        platform.take_memory_peak()  # what loading took is no iteration's

    def accumulate(
        self,
        microbatches: MicrobatchSource,
        judge_first: Callable[[DifferenceSums], None] | None = None,
    ) -> list[TrainedResponse]:
        """Forward and backward over one update's microbatches as they arrive; gradients stay
        unnormalised sums.

        judge_first: called with this replica's first microbatch's differences before its backward,
        where log-probs are computed (on the last pipeline stage); it may raise. Returns what this
        replica has trained, counted where gradients pass (I2). Raises InvariantViolation where that
        is not what it was given (I7).
        """
        keep = None if self._kept is None else self._kept.add
        self._first_sampled = self._replay.first_sampled % SAMPLED_EVERY
        self._gradient_at_start = None
        self._objective = Objective(
            config=self._config,
            device=self.backend.device,
            judge_first=judge_first,
            keep=keep,
            first_sampled=self._first_sampled,
            reference=self._reference_state(),
            before_first=self._look_at_start,
            algorithm=self._algorithm,
        )
        start = time.perf_counter()
        waited_s = microbatches.waited_s
        # groups that were taken ahead, to measure rounding by, are this update's too
        traffic = self._seen_traffic if microbatches is self._source else Traffic()
        reduced = self.backend.accumulate(microbatches, self._objective)
        for notice in microbatches.by_rule:
            self._objective.totals.add_by_rule(notice.leading_tokens)
        self._wait_s = microbatches.waited_s - waited_s
        self._train_s = time.perf_counter() - start - self._wait_s
        self._source, self._seen_traffic = microbatches, microbatches.traffic
        self._traffic = self._seen_traffic.since(traffic)
        self._expected_advantages = dict(microbatches.advantages)
        if self._kept is not None:
            self._kept.write()
        self._sum = GradientSum(self._where())
        if self._gradient_at_start is not None:
            self._sum.check_zero(float(self._gradient_at_start))
        self._sum.check_passed(self._objective.entered, self._objective.trained)
        self._sum.check_reduced(reduced, self.backend.place.mesh.data, self.backend.reductions)
        return self._objective.trained

    def step(self) -> Update:
        """Divide by the update's normaliser, clip, apply. Raises InvariantViolation."""
        start = time.perf_counter()
        with self._timeline.span("step"):
            totals, traffic = self._over_replicas()
            normaliser = self._objective.normaliser(totals, self.backend.reductions)
            before = self.backend.gradient_size(self._first_sampled)
            self.backend.scale_gradients(1.0 / normaliser)
            divided = self.backend.gradient_size(self._first_sampled)
            self._sum.check_divided(float(before), float(divided), normaliser)
            tensors = self.backend.stepped()
            begun = self._replay.before(
                self._where(), tensors, self.backend.reductions, self.backend.device
            )
            self.gate.close_policy()
            # the weights that computed the log-probs, which the step changes
            self._computed_with = self.backend.digest() if self._gives_no_difference() else None
            step = self.backend.step()
            # on all ranks, before any says that it is ready to publish
            if self._config.devices.engines_sleep:
                self._platform.release_memory()
        if not math.isfinite(step.grad_norm):
            raise InvariantViolation(
                f"gradient norm is {step.grad_norm}: the update would destroy the weights; lower "
                "optimizer.learning_rate, or look at the rewards and log-prob differences of the "
                "last iterations in metrics.jsonl"
            )
        if self._config.optimizer.offload or any(tensor.mean is None for tensor in tensors):
            tensors = self.backend.stepped()  # the step has moved them, or made their moments
        self._replay.after(begun, tensors, step)
        update = self._update(totals, traffic, normaliser, step, time.perf_counter() - start)
        if self._policy is not None:
            self._name_policy(PolicyState(self._policy.version, self._policy.updates + 1))
        return update

    def probe(self, microbatches: list[Microbatch]) -> DifferenceSums:
        """Log-probs of the current policy against the engines' for the same tokens, over all ranks;
        changes nothing.
        """
        sums = MetricSums(self.backend.device)

        def take(microbatch: Targets, outputs: Outputs) -> None:
            sums.add(
                {},
                measure(microbatch, outputs.policy.values, outputs.entropy, self._config),
                microbatch.ages.max(),
            )

        self.backend.evaluate(microbatches, take)
        return sums.over_ranks(self.backend.reductions).all

    def rounding(self, microbatches: list[Microbatch]) -> DifferenceSums | None:
        """How far the trainers' log-probs are from those in a wider type, over all ranks; None
        where the device has none.
        """
        sums = MetricSums(self.backend.device)
        entropies: list[torch.Tensor] = []

        def keep_entropy(microbatch: Targets, outputs: Outputs) -> None:
            entropies.append(outputs.entropy)

        def compare(microbatch: Targets, narrow: torch.Tensor, wide: torch.Tensor) -> None:
            differences = measure(microbatch, narrow, entropies.pop(0), self._config, wide)
            sums.add({}, differences, microbatch.ages.max())

        self.backend.evaluate(microbatches, keep_entropy)
        if not self.backend.rounding(microbatches, compare):
            return None
        return sums.over_ranks(self.backend.reductions).all

    def finite_difference(
        self, microbatches: Sequence[Microbatch], advantages: Mapping[int, Sequence[np.ndarray]]
    ) -> FiniteDifference | None:
        """Compares the gradient of microbatches that are about to be trained with what weights that
        move along it change.

        Collective; changes no weight. advantages: as of LossGradient.check.
        Returns None where no token has a gradient. Raises InvariantViolation (I7).
        """
        return finite_difference(
            self.backend,
            self._config,
            microbatches,
            GradientSum(self._where()),
            advantages,
            seed=self._replay.first_sampled,
        )

    def publish(self, version: int) -> None:
        """The policy is that of `version`, which engines are about to hold.

        The models that follow the policy follow it where they are due, and late engines get this
        version from here on.
        """
        self.gate.close()
        self.skip_publish(version)
        if self._models.keeps_published:
            self._keep_published()
        self.gate.open(version)

    def offer(self, version: int) -> None:
        """The policy is that of `version`, which engines receive and swap to later.

        Until they have, late engines get the version before.
        """
        self.skip_publish(version)
        self.gate.offer(version, self._keep_published)

    def engines_swapped(self) -> None:
        """Engines have swapped to what was offered: late engines get it too.

        Call it before the next step, which changes the weights.
        """
        self.gate.take_offer()

    def skip_publish(self, version: int) -> None:
        """The policy is that of `version`; engines, also late ones, keep what they have.

        The old policy and the reference follow the policy where they are due.
        """
        self._name_policy(PolicyState(version))
        if "old" in self._models.computed:
            self.backend.copy_policy("old")
        refresh = self._config.algorithm.reference_refresh_every
        if refresh and version and version % refresh == 0:
            self.backend.copy_policy("reference")
            self._reference_version = version
            self._reference_digest = None

    def plan_save(self, directory: Path) -> PlannedSave:
        """See SavedState."""
        has_reference, version = "reference" in self._models.computed, self._reference_version
        plan = self.backend.plan_save(directory, has_reference and version > 0)
        reference = {"version": version, "saved": version > 0} if has_reference else None
        optimizer = self._of_all_ranks(self._replay.saved(self.backend.stepped()))
        plan.description |= {
            "layout": layout_of(self._config),
            "reference": reference,
            "optimizer": optimizer,
        }
        return plan

    def load(self, directory: Path) -> int:
        """See SavedState.

        Raises DataError where the optimizer's state is another one than was saved.
        """
        meta = self.backend.load(directory)
        self._reference_version = meta.reference["version"] if meta.reference else 0
        self._name_reference()
        rank, by_rank = self.backend.place.rank, meta.optimizer or []
        saved = None
        if by_rank:
            saved = by_rank[rank] if rank < len(by_rank) else by_rank[0]
        if wrong := self._replay.load(meta.updates, self.backend.stepped(), saved, meta.seed):
            raise damaged(directory, wrong)
        return meta.version

    def _keep_published(self) -> None:
        """Copies the policy, which is the version that engines have. Runs on any thread."""
        self.backend.copy_policy("published")

    def _reference_state(self) -> PolicyState | None:
        """The weights that the reference is of; None where there is none."""
        return (
            PolicyState(self._reference_version) if "reference" in self._models.computed else None
        )

    def _name_reference(self) -> None:
        """The reference is what it has just been loaded as."""
        self._reference_digest = None
        if (state := self._reference_state()) is not None:
            self.backend.name_policy(state, "reference")

    def _look_at_start(self) -> None:
        # what was left of the update before is left everywhere
        self._gradient_at_start = self.backend.gradient_size(self._first_sampled, SAMPLED_EVERY**2)

    def _of_all_ranks(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's description, by rank.

        Collective; as JSON, of which nothing but values can be made.
        """
        if not dist.is_initialized():
            return [own]
        text = json.dumps(own).encode()
        mine = torch.frombuffer(bytearray(text.ljust(_DESCRIPTION_BYTES)), dtype=torch.uint8).to(
            self.backend.device
        )
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return [json.loads(bytes(part.cpu().tolist())) for part in gathered]

    def _name_policy(self, weights: PolicyState) -> None:
        self._policy = weights
        self.backend.name_policy(weights)

    def _where(self) -> str:
        if self._policy is None:
            return "an update of weights without a version"
        return (
            f"iteration {self._policy.version}, update {self._policy.updates}, replica "
            f"{self.backend.place.replica}"
        )

    def _check(self, statistics: Statistics) -> None:
        """Checks the update's gradient, once its numbers have come from the device (I7)."""
        self._sum.check_factor(statistics.factor_error)
        objective = self._objective
        if objective.advantages:
            found = torch.cat(objective.advantages).tolist()
            self._sum.check_advantages(objective.entered, found, self._expected_advantages)
        if self._computed_with is not None and self._has_moved_from_old() and not statistics.moved:
            self._sum.check_unmoved(self._computed_with, self.backend.digest("old"))
        self._check_reference(statistics)
        LossGradient(self._sum, self._config, self._algorithm, self._policy).check(
            objective.given, self._expected_advantages, self._partial_head_group()
        )

    def _check_reference(self, statistics: Statistics) -> None:
        """A reference that gives the policy's own log-probs has the policy's weights, and none that
        were put there since (I7).
        """
        reference = self._reference_state()
        if (
            reference is None
            or self._policy is None
            or self._config.optimizer.learning_rate < _LEAST_RATE
        ):
            return
        if self._reference_digest is None:
            self._reference_digest = self.backend.digest("reference")
        if self._computed_with is not None and not statistics.apart and reference != self._policy:
            found = self.backend.digest("reference")
            self._sum.check_apart(self._computed_with, found, self._reference_digest)

    def _has_moved_from_old(self) -> bool:
        """Whether an update of this iteration lies between the policy and the old policy."""
        return (
            self._policy is not None and self._policy.updates > 0 and "old" in self._models.computed
        )

    def _gives_no_difference(self) -> bool:
        """Whether a frozen model of other weights gave this rank the policy's own log-probs; on
        ranks that compute them.
        """
        if not self._objective.entered or not self.backend.place.is_last_stage:
            return False
        reference = self._reference_state()
        is_other = reference is not None and reference != self._policy
        sums = self._objective.sums
        return (self._has_moved_from_old() and not bool(sums.moved)) or (
            is_other and not bool(sums.apart)
        )

    def _partial_head_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the gradient of what meets the LM head is summed later; None where
        each has all of it.
        """
        return self.backend.tensor_group

    def _over_replicas(self) -> tuple[Totals, Traffic]:
        own = [*astuple(self._objective.totals), *astuple(self._traffic)]
        values = torch.tensor(own, dtype=torch.int64, device=self.backend.device)
        numbers = [int(value) for value in self.backend.reductions.replicas(values).tolist()]
        split = len(astuple(Totals()))
        return Totals(*numbers[:split]), Traffic(*numbers[split:])

    def _update(
        self, totals: Totals, traffic: Traffic, normaliser: float, step: Step, step_s: float
    ) -> Update:
        reductions, device = self.backend.reductions, self.backend.device
        statistics = self._objective.sums.over_ranks(reductions)
        self._check(statistics)
        peak = self._platform.take_memory_peak()
        own = torch.tensor(
            [self._wait_s, self._train_s + step_s, step_s], dtype=torch.float32, device=device
        )
        wait_s, train_s, step_s = (reductions.ranks(own) / self.backend.place.mesh.size).tolist()
        fullest = torch.tensor(
            [peak.host_bytes, peak.device_bytes or 0], dtype=torch.int64, device=device
        )
        host_bytes, device_bytes = reductions.ranks(fullest, largest=True).tolist()
        routing: dict[str, Any] = {
            field.name: getattr(step.routing, field.name, None) for field in fields(Routing)
        }
        report = UpdateReport(
            **statistics.metrics(totals.tokens_leading, normaliser),
            **routing,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens_response=totals.tokens_response,
            tokens_computed=totals.tokens_computed,
            microbatches=totals.num_microbatches,
            rollout_reads=traffic.reads,
            rollout_buffer_bytes=traffic.buffer_bytes,
            rollout_head_bytes=traffic.head_bytes,
            rollout_collective_bytes=traffic.collective_bytes,
            memory_trainer_host_bytes=host_bytes,
            memory_trainer_device_bytes=None if peak.device_bytes is None else device_bytes,
            wait_s=wait_s,
            train_s=train_s,
            step_s=step_s,
        )
        moved = self._policy is not None and self._policy.updates > 0
        exact = not statistics.age_max and ("old" in self._models.computed or not moved)
        return Update(report, statistics.all, exact, statistics.first, normaliser)
