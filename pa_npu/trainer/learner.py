"""Learner: one rank's policy through its versions, with its updates, its copies and its checkpoints.

What every training backend needs alike is here; TrainBackend is what each of them writes itself.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.algorithm.model_outputs import FixedWeights, PolicyState
from pa_npu.algorithm.objective import JudgeFirst, Objective, TrainedResponse
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, Statistics, Totals
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
from pa_npu.trainer.comparison import LogprobComparison
from pa_npu.trainer.copies import check_copies
from pa_npu.trainer.finite_difference import FiniteDifference, finite_difference
from pa_npu.trainer.invariants import GradientSum
from pa_npu.trainer.loss_checks import LossGradient
from pa_npu.trainer.step_replay import StepReplay


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step, equal on all ranks.

    differences: sums of the differences between its tokens' log-probs and the engines' (I5).
    exact: whether both log-probs were computed by the weights that sampled the tokens.
    first: differences in every replica's first microbatch.
    normaliser: the number that the gradient was divided by.
    """

    report: UpdateReport
    differences: DifferenceSums
    exact: bool
    first: DifferenceSums
    normaliser: float


# AdamW moves a weight by about the learning rate. With a rate below this, weights may differ while
# all log-probs in fp32 are equal.
_MIN_RATE = 1e-10
# Room for a rank's description of its optimizer in a checkpoint: three digests, its number and a
# share, as JSON.
_DESCRIPTION_BYTES = 512


class Learner:
    """One rank's policy, and the models beside it. Every method is collective.

    gate: guards the weights that late engines are sent; closed while these change.
    """

    def __init__(
        self,
        config: Config,
        backend: TrainBackend,
        platform: Platform,
        timeline: Timeline,
        *,
        kept_logprobs: TrainerLogprobs | None = None,
    ) -> None:
        """Makes a learner. kept_logprobs: records the log-probs of trained tokens; needed only on
        the last stage's tensor leader, which computes them.
        """
        self._config = config
        self._algorithm = build_algorithm(config)
        self._models = trainer_models(config, self._algorithm)
        self.backend = backend
        self._comparison = LogprobComparison(config, backend)
        self._platform = platform
        self._timeline = timeline
        gate = VersionGate if self._models.published_source == "policy" else CopyGate
        self.gate = gate(config.deadlines.border_timeout_s)
        self._kept_logprobs = kept_logprobs
        self._source: MicrobatchSource | None = None
        self._seen_traffic = Traffic()
        self._policy: PolicyState | None = None  # unknown until the first publish
        # the version of the policy that the reference was last made equal to; 0 is the HF model
        self._reference_version = 0
        self._reference_digest: str | None = None
        self._replay = StepReplay(config, backend.place.rank)
        self._gradient_at_start: torch.Tensor | None = None
        # of the update before
        self._num_microbatches = 0
        self._computed_with: str | None = None
        self._name_reference()
        for name, directory in self._models.directories.items():
            backend.name_policy(FixedWeights(directory), name)
        platform.pop_memory_peak()  # the memory that loading took belongs to no iteration

    def accumulate(
        self,
        microbatches: MicrobatchSource,
        judge_first: JudgeFirst | None = None,
    ) -> list[TrainedResponse]:
        """Runs forward and backward over one update's microbatches as they arrive; gradients stay
        unnormalised sums.

        judge_first: called on the last pipeline stage with the differences of this replica's first
        microbatch, before its backward, and of its stretches (Objective); it may raise.

        Returns the responses that this replica has trained, counted where gradients pass (I2).
        Raises InvariantViolation if these are not the responses that it was given (I7).
        """
        keep = None if self._kept_logprobs is None else self._kept_logprobs.add
        self._first_sampled = self._replay.first_sampled % SAMPLED_EVERY
        self._gradient_at_start = None
        self._objective = Objective(
            config=self._config,
            device=self.backend.device,
            judge_first=judge_first,
            keep=keep,
            first_sampled=self._first_sampled,
            num_expected=self._num_microbatches,
            reference=self._reference_state(),
            before_first=self._look_at_start,
            algorithm=self._algorithm,
        )
        start = time.perf_counter()
        waited_s = microbatches.waited_s
        # traffic of groups that were taken ahead, to measure rounding by, belongs to this update
        traffic_before = self._seen_traffic if microbatches is self._source else Traffic()
        reduced = self.backend.accumulate(microbatches, self._objective)
        self._objective.finish()
        self._num_microbatches = len(self._objective.given)
        for notice in microbatches.by_rule:
            self._objective.totals.add_by_rule(notice.leading_tokens)
        self._wait_s = microbatches.waited_s - waited_s
        self._train_s = time.perf_counter() - start - self._wait_s
        self._source = microbatches
        self._seen_traffic = microbatches.traffic
        self._traffic = self._seen_traffic.since(traffic_before)
        self._expected_advantages = dict(microbatches.advantages)
        if self._kept_logprobs is not None:
            self._kept_logprobs.write()
        self._sum = GradientSum(self._where())
        if self._gradient_at_start is not None:
            self._sum.check_zero(float(self._gradient_at_start))
        self._sum.check_passed(self._objective.entered, self._objective.trained)
        mesh = self.backend.place.mesh
        self._sum.check_reduced(reduced, mesh.data * mesh.context, self.backend.reductions)
        return self._objective.trained

    def step(self) -> Update:
        """Divides the gradient by the update's normaliser, clips it and applies it. Raises
        InvariantViolation.
        """
        start = time.perf_counter()
        with self._timeline.span("step"):
            totals, traffic = self._over_replicas()
            normaliser = self._objective.normaliser(totals, self.backend.reductions)
            size_before = self.backend.gradient_size(self._first_sampled)
            self.backend.scale_gradients(1.0 / normaliser)
            size_after = self.backend.gradient_size(self._first_sampled)
            self._sum.check_divided(float(size_before), float(size_after), normaliser)
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
        check_copies(
            self._where(),
            self.backend.copied(),
            self._config.run.seed,
            self._replay.updates,
            self.backend.device,
        )
        update = self._update(totals, traffic, normaliser, step, time.perf_counter() - start)
        if self._policy is not None:
            self._name_policy(PolicyState(self._policy.version, self._policy.updates + 1))
        return update

    def probe(self, microbatches: list[Microbatch]) -> DifferenceSums:
        """See LogprobComparison."""
        return self._comparison.probe(microbatches)

    def rounding(self, microbatches: list[Microbatch]) -> DifferenceSums | None:
        """See LogprobComparison."""
        return self._comparison.rounding(microbatches)

    def finite_difference(
        self, microbatches: Sequence[Microbatch], advantages: Mapping[int, Sequence[np.ndarray]]
    ) -> FiniteDifference | None:
        """Moves weights along the gradient of microbatches that are about to be trained, and
        compares the change of the objective with the one that the gradient predicts.

        Collective; leaves every weight as it was. advantages: as in LossGradient.check.
        Returns None if no token has a gradient. Raises InvariantViolation (I7).
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
        """Names the policy `version`, which engines are about to hold, and updates the models that
        follow it if that is due. Late engines get this version from here on.
        """
        self.gate.close()
        self.skip_publish(version)
        if self._models.keeps_published:
            self._keep_published()
        self.gate.open(version)

    def offer(self, version: int) -> None:
        """Names the policy `version`, which engines receive now and swap to later. Until they have
        swapped, late engines get the version before.
        """
        self.skip_publish(version)
        self.gate.offer(version, self._keep_published)

    def engines_swapped(self) -> None:
        """Gives late engines the offered version too, now that engines have swapped to it. Call it
        before the next step, which changes the weights.
        """
        self.gate.accept_offer()

    def skip_publish(self, version: int) -> None:
        """Names the policy `version`, while engines, late ones too, keep the version that they
        have. The old policy and the reference follow the policy if that is due.
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
        has_reference = "reference" in self._models.computed
        version = self._reference_version
        own = self._replay.saved(self.backend.stepped())
        if has_reference:
            own["reference"] = self._described_reference()
        plan = self.backend.plan_save(directory, has_reference and version > 0)
        reference = {"version": version, "saved": version > 0} if has_reference else None
        optimizer = self._gathered(own)
        plan.description |= {
            "layout": layout_of(self._config),
            "reference": reference,
            "optimizer": optimizer,
        }
        return plan

    def load(self, directory: Path) -> int:
        """See SavedState.

        Raises DataError if the optimizer's state or the reference is not the one that was saved.
        """
        meta = self.backend.load(directory)
        self._reference_version = meta.reference["version"] if meta.reference else 0
        self._name_reference()
        rank = self.backend.place.rank
        by_rank = meta.optimizer or []
        saved = None
        if by_rank:
            saved = by_rank[rank] if rank < len(by_rank) else by_rank[0]
        problem = self._replay.load(meta.updates, self.backend.stepped(), saved, meta.seed)
        if not problem and saved is not None:
            problem = self._changed_reference(saved)
        if problem:
            raise damaged(directory, problem)
        return meta.version

    def _described_reference(self) -> str:
        """Returns the reference's digest on this rank, with the type that it is in."""
        if self._reference_digest is None:
            self._reference_digest = self.backend.digest("reference")
        return f"{self._config.model.dtype} {self._reference_digest}"

    def _changed_reference(self, saved: dict[str, Any]) -> str:
        """Returns what is wrong with the loaded reference, or an empty text, also where the two
        cannot be compared. saved: as StepReplay.load takes it.
        """
        before = saved.get("reference")
        if before is None or self._reference_state() is None:
            return ""
        own = self._replay.saved(self.backend.stepped())
        if (saved["rank"], saved["shape"]) != (own["rank"], own["shape"]):
            return ""  # another part of the model
        loaded = self._described_reference()
        if before == loaded or before.split()[0] != loaded.split()[0]:
            return ""
        return (
            f"the reference of rank {own['rank']} has other weights than the one that was saved "
            f"(version {self._reference_version}; the digest differs)"
        )

    def _keep_published(self) -> None:
        """Copies the policy, which holds the version that engines have. Runs on any thread."""
        self.backend.copy_policy("published")

    def _reference_state(self) -> PolicyState | None:
        """Returns which weights the reference has; None if there is no reference."""
        if "reference" not in self._models.computed:
            return None
        return PolicyState(self._reference_version)

    def _name_reference(self) -> None:
        """Names the weights that the reference has just been loaded with."""
        self._reference_digest = None
        state = self._reference_state()
        if state is not None:
            self.backend.name_policy(state, "reference")

    def _look_at_start(self) -> None:
        # a gradient that the last update left behind is in every element: a coarse sample will do
        self._gradient_at_start = self.backend.gradient_size(self._first_sampled, SAMPLED_EVERY**2)

    def _gathered(self, description: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's description, by rank. Collective.

        Descriptions travel as JSON, which can only be read as values.
        """
        if not dist.is_initialized():
            return [description]
        text = bytearray(json.dumps(description).encode().ljust(_DESCRIPTION_BYTES))
        own_text = torch.frombuffer(text, dtype=torch.uint8).to(self.backend.device)
        texts = [torch.empty_like(own_text) for _ in range(dist.get_world_size())]
        dist.all_gather(texts, own_text)
        return [json.loads(bytes(rank_text.cpu().tolist())) for rank_text in texts]

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
        if objective.given:
            self._sum.check_advantages(
                objective.entered, objective.loss_advantages(), self._expected_advantages
            )
        if self._computed_with is not None and self._has_moved_from_old() and not statistics.moved:
            self._sum.check_unmoved(self._computed_with, self.backend.digest("old"))
        self._check_reference(statistics)
        gradient_check = LossGradient(self._sum, self._config, self._algorithm, self._policy)
        gradient_check.check(objective.given, self._expected_advantages, self._partial_head_group())

    def _check_reference(self, statistics: Statistics) -> None:
        """Checks that a reference which gives the policy's own log-probs has the policy's weights,
        and the weights that it was made with (I7).
        """
        reference = self._reference_state()
        if reference is None or self._policy is None:
            return
        if self._config.optimizer.learning_rate < _MIN_RATE:
            return
        if self._reference_digest is None:
            self._reference_digest = self.backend.digest("reference")
        if self._computed_with is not None and not statistics.apart and reference != self._policy:
            digest = self.backend.digest("reference")
            self._sum.check_apart(self._computed_with, digest, self._reference_digest)

    def _has_moved_from_old(self) -> bool:
        """Returns whether an update of this iteration lies between the policy and the old policy."""
        if self._policy is None or "old" not in self._models.computed:
            return False
        return self._policy.updates > 0

    def _gives_no_difference(self) -> bool:
        """Returns whether a frozen model of other weights gave the policy's own log-probs; always
        False on ranks that compute no log-probs.
        """
        if not self._objective.entered or not self.backend.place.is_last_stage:
            return False
        sums = self._objective.sums
        if self._has_moved_from_old() and not bool(sums.moved):
            return True
        reference = self._reference_state()
        has_other_weights = reference is not None and reference != self._policy
        return has_other_weights and not bool(sums.apart)

    def _partial_head_group(self) -> dist.ProcessGroup | None:
        """Returns the ranks over which the gradient of the LM head's input is summed later; None if
        each rank has all of it.
        """
        return self.backend.tensor_group

    def _over_replicas(self) -> tuple[Totals, Traffic]:
        own_numbers = [*astuple(self._objective.totals), *astuple(self._traffic)]
        values = torch.tensor(own_numbers, dtype=torch.int64, device=self.backend.device)
        numbers = [int(value) for value in self.backend.reductions.replicas(values).tolist()]
        split = len(astuple(Totals()))
        return Totals(*numbers[:split]), Traffic(*numbers[split:])

    def _update(
        self, totals: Totals, traffic: Traffic, normaliser: float, step: Step, step_s: float
    ) -> Update:
        reductions, device = self.backend.reductions, self.backend.device
        statistics = self._objective.sums.over_ranks(reductions)
        self._check(statistics)
        peak = self._platform.pop_memory_peak()
        own_seconds = torch.tensor(
            [self._wait_s, self._train_s + step_s, step_s], dtype=torch.float32, device=device
        )
        wait_s, train_s, step_s = (
            reductions.ranks(own_seconds) / self.backend.place.mesh.size
        ).tolist()
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
