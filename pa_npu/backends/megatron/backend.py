"""TrainBackend on megatron-core: forward, loss and backward, the normaliser at the step, probe, publish, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from pa_npu.algorithm.agreement import DifferenceSums
from pa_npu.algorithm.batch import TokenBatch, normaliser, token_weights
from pa_npu.algorithm.losses import loss_sums, metric_names
from pa_npu.algorithm.policy_losses import find_policy_loss
from pa_npu.attention import PrefixLayout
from pa_npu.backends.megatron import parallel
from pa_npu.backends.megatron.checkpoint.shards import PlannedShards
from pa_npu.backends.megatron.checkpoint.state import CheckpointContents
from pa_npu.backends.megatron.frozen_passes import HeldMicrobatches
from pa_npu.backends.megatron.optimizer import build_optimizer, build_scheduler
from pa_npu.backends.megatron.schedule import Forward, Loss, run_pipelined, run_sequential, with_spans
from pa_npu.backends.megatron.stage import ModelOutput, TriModel, data_parallel
from pa_npu.backends.megatron.statistics import (
    Differences,
    IterationTotals,
    MetricSums,
    StepNumbers,
    trained_responses,
    update_report,
)
from pa_npu.backends.megatron.weights.buckets import StageTensors
from pa_npu.backends.megatron.weights.hf_directory import export_hf
from pa_npu.backends.protocol import MicrobatchSource, ProbeResult, TrainedResponse, Update
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.publish.messages import PublishMembers
from pa_npu.publish.publisher import Publisher, PublishStats
from pa_npu.publish.version_gate import VersionGate
from pa_npu.samples.group_source import Traffic
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import ReplicaLinks
from pa_npu.telemetry.sample_store import TrainerLogprobs
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.digest import digest_of


class MegatronBackend:
    """One rank. `stage` is this rank's TriModel stage with weights loaded."""

    def __init__(
        self,
        stage: TriModel,
        config: Config,
        spec: ModelSpec,
        platform: Platform,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._stage = stage
        self._config = config
        self._spec = spec
        self._platform = platform
        self._device = device
        self._publisher: Publisher | None = None
        self._timeline = timeline
        self._ddp = data_parallel(
            stage,
            distributed_optimizer=config.trainer.distributed_optimizer,
            # with a budget of tokens nobody knows which microbatch is the last one while it goes through the model
            bucket_mib=0.0 if config.schedule.tokens_per_update else config.trainer.gradient_bucket_mib,
        )
        self._optimizer = build_optimizer(self._ddp, config)
        self._scheduler = build_scheduler(self._optimizer, config)
        stage.config.no_sync_func = self._ddp.no_sync
        stage.config.finalize_model_grads_func = self._finalize_gradients
        self._policy_loss = find_policy_loss(config.algorithm.loss)
        self._metric_names = metric_names(config.algorithm, stale=config.schedule.max_staleness > 0)
        self._freshness = Freshness(config.schedule.max_staleness)
        self._gate = VersionGate(config.border_timeout_s)
        self._policy_version: int | None = None  # of the weights in the policy; unknown until the first publish
        self._reference_version = 0  # the policy's that the reference was last made equal to; 0 is the HF model
        self._contents = CheckpointContents(stage, self._optimizer, self._scheduler, config, platform)
        self._kept: TrainerLogprobs | None = None
        self._judge_first: Callable[[ProbeResult], None] | None = None
        self._links = parallel.replica_links(platform, device, config.collective_timeout_s)
        self._traffic: Callable[[], Traffic] = Traffic  # of the update that is accumulated
        self._reset_sums()
        platform.take_memory_peak()  # what loading took is no iteration's

    @property
    def place(self) -> Place:
        return parallel.place()

    @property
    def software(self) -> str:
        return f"megatron-core {megatron.core.__version__}"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return parallel.tensor_group() if self.place.mesh.tensor > 1 else None

    @property
    def replica_links(self) -> ReplicaLinks | None:
        return self._links

    @property
    def gate(self) -> VersionGate:
        return self._gate

    def published_weights(self, bucket_bytes: int, *, late: bool = False) -> StageTensors | None:
        place, group = self.place, self.tensor_group
        if late and group is not None:  # on all ranks: making a group is collective
            group = parallel.side_tensor_group()
        if not place.sends:
            return None
        model = self._stage.published_version() if late else self._stage.policy
        return StageTensors(model, self._spec, place, bucket_bytes, group)

    def attach(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def keep_logprobs(self, kept: TrainerLogprobs) -> None:
        self._kept = kept

    def accumulate(
        self, microbatches: MicrobatchSource, judge_first: Callable[[ProbeResult], None] | None = None
    ) -> list[TrainedResponse]:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._reset_sums()
        self._judge_first = judge_first
        start = time.perf_counter()
        waited_s, traffic = microbatches.waited_s, microbatches.traffic
        num_microbatches = 0
        if self._config.trainer.pipeline_parallel > 1:  # which packs nothing: every piece of a group is a microbatch
            num_microbatches = microbatches.settle() * self._config.microbatches_per_group
        self._traffic = lambda: microbatches.traffic.since(traffic)
        source: MicrobatchSource | HeldMicrobatches = microbatches
        loss = self._training_loss
        if self._stage.frozen and self._config.trainer.frozen_pass == "separate":
            source = held = HeldMicrobatches(
                microbatches, self._stage.frozen, partial(self._frozen_pass, num_microbatches)
            )

            def loss(microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
                return self._training_loss(microbatch, replace(output, frozen=held.logprobs(microbatch)))

        self._run(source, num_microbatches, self._forward, loss, lambda: source.is_last)
        self._platform.synchronize()
        self._wait_s = microbatches.waited_s - waited_s
        self._train_s = time.perf_counter() - start - self._wait_s
        if self._kept is not None:
            self._kept.write()
        return self._trained

    def step(self) -> Update:
        start = time.perf_counter()
        with self._timeline.span("step"):
            if self._stage.published_version() is self._stage.policy:
                self._gate.close()
            self._scheduler.step(increment=1)
            learning_rate = self._optimizer.param_groups[0]["lr"]
            succeeded, grad_norm, _ = self._optimizer.step()
            self._platform.synchronize()
        if not succeeded or grad_norm is None or not math.isfinite(grad_norm):
            raise InvariantViolation(
                f"gradient norm is {grad_norm}: the update would destroy the weights; lower optimizer.learning_rate, or look at "
                f"the rewards and log-prob differences of the last iterations in metrics.jsonl"
            )
        if self._policy_version is not None:
            self._policy_version += 1
        return self._update(float(grad_norm), float(learning_rate), time.perf_counter() - start)

    def probe(self, microbatches: list[Microbatch]) -> ProbeResult:
        self._reset_sums()
        self._run([one.to(self._device) for one in microbatches], len(microbatches), self._forward, self._probe_loss)
        return self._metrics.over_ranks(self._device).all

    def publish(self, version: int, members: PublishMembers | None = None) -> PublishStats | None:
        if members is not None and members.delayed:
            self._begin(version)
            self._gate.offer(version, self._keep_published)
        else:
            self._gate.close()
            self._begin(version)
            if self._stage.keeps_published:
                self._keep_published()
            self._gate.open(version)
        if self._publisher is None or members is None:
            return None
        return self._publisher.publish(version, members)

    def skip_publish(self, version: int) -> None:
        self._begin(version)

    def engines_swapped(self) -> None:
        self._gate.take_offer()

    def _keep_published(self) -> None:
        """On any thread: the policy is the version that engines have."""
        self._stage.copy_policy_to("published")
        self._platform.synchronize()

    def _begin(self, version: int) -> None:
        """The policy is that of `version`: the old policy and the reference follow it where they are due."""
        self._policy_version = version
        if "old" in self._stage.frozen:
            self._stage.copy_policy_to("old")
        refresh = self._config.algorithm.reference_refresh_every
        if refresh and version and version % refresh == 0:
            self._stage.copy_policy_to("reference")
            self._reference_version = version

    def policy_digest(self) -> str:
        return digest_of(self._stage.policy.parameters())

    def plan_save(self, directory: Path) -> PlannedShards:
        return self._contents.plan(directory, self._reference_version)

    def load(self, directory: Path) -> int:
        meta = self._contents.load(directory)
        self._reference_version = meta.reference["version"] if meta.reference else 0
        return meta.version

    def export(self, directory: Path) -> None:
        export_hf(self._stage.policy, self._spec, directory, self.place, self.tensor_group)

    def close(self) -> None:
        parallel.shutdown_parallel()

    def _reset_sums(self) -> None:
        self._totals = IterationTotals()
        self._trained: list[TrainedResponse] = []
        self._metrics = MetricSums(self._metric_names)

    def _run(
        self,
        microbatches: Iterable[Microbatch],
        num_microbatches: int,
        forward: Forward,
        loss: Loss,
        is_last: Callable[[], bool] | None = None,
    ) -> None:
        """One pass; num_microbatches is read only where pipeline stages have to agree on it in advance.

        is_last: whether the microbatch taken last is the pass's last one; None: forward only.
        """
        forward_only = is_last is None
        with closing(with_spans(microbatches, self._timeline)) as timed, torch.set_grad_enabled(not forward_only):
            if self._config.trainer.pipeline_parallel == 1:
                run_sequential(self._ddp, timed, forward, loss, is_last)
            else:
                run_pipelined(self._ddp, timed, num_microbatches, forward, loss, forward_only=forward_only)

    def _forward(self, microbatch: Microbatch) -> Any:
        self._totals.add(microbatch)
        self._trained += trained_responses(microbatch)
        return self._ddp(
            *_inputs(microbatch),
            temperature=self._config.rollout.temperature,
            chunk=self._config.model.head_chunk_tokens,
            entropy_grad=self._config.algorithm.entropy_coef > 0,
        )

    def _frozen_pass(self, num_microbatches: int, name: str, microbatches: Iterable[Microbatch], keep: Loss) -> None:
        temperature, chunk = self._config.rollout.temperature, self._config.model.head_chunk_tokens

        def forward(microbatch: Microbatch) -> torch.Tensor:
            return self._stage.frozen_pass(name, *_inputs(microbatch), temperature, chunk)

        with self._timeline.span(f"{name} pass"):
            self._run(microbatches, num_microbatches, forward, keep)

    def _training_loss(self, microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
        old_logprobs = self._old_logprobs(microbatch, output)
        if self._kept is not None:
            self._kept.add(microbatch.iteration, microbatch.sources, microbatch.response_lengths, old_logprobs)
        batch = TokenBatch(
            logprobs=output.logprobs,
            entropy=output.entropy,
            old_logprobs=old_logprobs,
            reference_logprobs=output.frozen.get("reference"),
            engine_logprobs=microbatch.engine_logprobs,
            advantages=microbatch.advantages,
            weights=token_weights(microbatch.response_lengths, self._config.algorithm.aggregation, self._device),
            response_index=microbatch.response_index,
            num_responses=microbatch.num_samples,
            group_size=self._config.rollout.responses_per_prompt,
            ages=microbatch.ages if self._config.schedule.max_staleness else None,
        )
        sums = loss_sums(batch, self._config.algorithm, self._policy_loss)
        self._add_metrics(microbatch, output.frozen.get("old", output.logprobs), sums.metrics)
        return sums.loss

    def _add_metrics(self, microbatch: Microbatch, logprobs: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        """logprobs: of the iteration's weight version, as the trainer computes them."""
        difference = logprobs.detach() - microbatch.engine_logprobs
        differences = Differences.of(difference, microbatch.response_index, microbatch.num_samples)
        self._metrics.add(metrics, differences, microbatch.ages.max())
        if self._judge_first is not None:
            judge, self._judge_first = self._judge_first, None
            judge(differences.read())

    def _old_logprobs(self, microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
        """Of the policy that ratios are taken against.

        The proximal one is the policy at the iteration's beginning; with one update per iteration the policy itself: ratio 1.
        """
        if self._config.ratio == "sampling":
            return microbatch.engine_logprobs
        if "old" in output.frozen:
            return output.frozen["old"]
        if self._policy_version is not None:
            what = f"a microbatch of groups {microbatch.group_indices}"
            self._freshness.check(self._policy_version, microbatch.versions, what)
        return output.logprobs.detach()

    def _probe_loss(self, microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
        zero = torch.zeros((), device=self._device)
        self._add_metrics(microbatch, output.logprobs, {name: zero for name in self._metric_names})
        return zero

    def _finalize_gradients(self, models: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reduce the summed gradients over replicas and divide them, once, by the update's normaliser (invariant I3)."""
        with self._timeline.span("reduce gradients"):
            finalize_model_grads(models, None, **kwargs)
        self._totals.traffic = self._traffic()
        self._totals = self._totals.over_replicas(self._device)
        self._normaliser = normaliser(
            self._config.algorithm.aggregation,
            self._totals.tokens_response,
            self._totals.num_responses,
            self._config.rollout.max_response_tokens,
        )
        if self._config.algorithm.loss == "dpo":  # the mean over pairs, which only the last stage has counted
            self._normaliser = max(1.0, self._metrics.total("preference_pairs", self._device))
        for model in models:
            model.scale_gradients(1.0 / self._normaliser)

    def _update(self, grad_norm: float, learning_rate: float, step_s: float) -> Update:
        statistics = self._metrics.over_ranks(self._device)
        step = StepNumbers(
            self._normaliser,
            grad_norm,
            learning_rate,
            wait_s=self._wait_s,
            train_s=self._train_s + step_s,
            step_s=step_s,
            memory_peak=self._platform.take_memory_peak(),
        )
        # tokens that older weights sampled differ by the updates since, which is no disagreement
        one_version = "old" in self._stage.frozen or self._config.schedule.updates_per_iteration == 1
        differences = statistics.all.differences if one_version and not statistics.age_max else DifferenceSums()
        return Update(update_report(statistics, self._totals, step, self._device), differences, statistics.first)


def _inputs(microbatch: Microbatch) -> tuple[torch.Tensor, PrefixLayout, torch.Tensor, torch.Tensor]:
    return microbatch.tokens[None], microbatch.layout, microbatch.rows, microbatch.targets
