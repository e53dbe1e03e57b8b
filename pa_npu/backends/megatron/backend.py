"""TrainBackend on megatron-core: forward, backward and step over what the objective gives, weights, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from pa_npu.algorithm.choices import asked_models, chosen_tokens
from pa_npu.algorithm.model_outputs import Logprobs, Outputs, Weights
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient, Reductions
from pa_npu.attention import PrefixLayout
from pa_npu.attention.context import RankRows
from pa_npu.attention.stems import PathRows
from pa_npu.backends.context import Part, Parts, replica_links
from pa_npu.backends.in_step import Turn, Turns, largest, zero_for_fillers
from pa_npu.backends.logprob import MostLikely, RowScores
from pa_npu.backends.megatron import parallel
from pa_npu.backends.megatron.checkpoint import CheckpointContents, PlannedShards
from pa_npu.backends.megatron.frozen_passes import HeldMicrobatches
from pa_npu.backends.megatron.optimizer import (
    SteppedTensors,
    WatchedReduction,
    build_optimizer,
    copied_weights,
    gradient_size,
    set_rates,
    state_tensors,
)
from pa_npu.backends.megatron.passes import (
    Forward,
    Loss,
    run_pipelined,
    run_sequential,
    with_spans,
)
from pa_npu.backends.megatron.routing import Replay, RoutingWatch, replay_of
from pa_npu.backends.megatron.stage import ModelOutput, TriModel, data_parallel
from pa_npu.backends.megatron.weights.buckets import StageTensors, export_hf
from pa_npu.backends.optimizer import OffloadedState
from pa_npu.backends.protocol import (
    CopiedWeights,
    MicrobatchSource,
    Step,
    SteppedTensor,
    refuse_attachments,
)
from pa_npu.checkpoints.directories import CheckpointMeta
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.publish import senders_of
from pa_npu.platform.base import Platform
from pa_npu.samples.expert_choices import EXPERT_CHOICES
from pa_npu.samples.microbatch import Microbatch, filler
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.transport import HOST_BACKEND

# Gradients are reduced over replicas in buckets of this size, each as soon as the last backward of
# an update has made it.
_GRADIENT_BUCKET_MIB = 160.0


class MegatronBackend:
    """One rank. `stage` is this rank's TriModel stage with weights loaded."""

    software = f"megatron-core {megatron.core.__version__}"

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
        self._trainer_models = trainer_models(config)
        self._most_likely = {
            name: MostLikely(count, spec.vocab_size)
            for name, count in self._trainer_models.num_choices.items()
        }
        self._spec = spec
        self._platform = platform
        self.device = device
        self.place = parallel.place()
        self._timeline = timeline
        # the last slots of an iteration may hold groups that are trained by rule
        knows_last = (
            config.devices.reduces_in_buckets and not build_algorithm(config).trains_by_rule
        )
        self._ddp = data_parallel(
            stage,
            distributed_optimizer=config.trainer.distributed_optimizer,
            bucket_mib=_GRADIENT_BUCKET_MIB if knows_last else 0.0,
        )
        mesh = self.place.mesh
        has_experts = spec.experts is not None
        self._parts = Parts(parallel.context_group())
        reduces = mesh.data * mesh.context > 1 or (has_experts and mesh.expert_data > 1)
        self._watched = (
            WatchedReduction(self._ddp, self.place, platform.widest_dtype) if reduces else None
        )
        sharing = None
        if mesh.context > 1:
            sharing = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reduced_over = sharing
        if has_experts and mesh.tensor > 1:
            reduced_over = parallel.stage_group()
        self.reductions = Reductions(
            parallel_state.get_data_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            reduced_over,
            sharing,
        )
        self._routing = (
            None if spec.experts is None else RoutingWatch(stage.policy, self.place, spec.experts)
        )
        self._optimizer = build_optimizer(self._ddp, config)
        self._stepped = SteppedTensors(self._optimizer, self._ddp, self.place)
        self._updates = 0
        self._offloaded = OffloadedState(
            partial(state_tensors, self._optimizer), config, platform, device
        )
        stage.config.no_sync_func = self._ddp.no_sync
        stage.config.finalize_model_grads_func = self._finalize_gradients
        self._contents = CheckpointContents(stage, self._optimizer, config, platform)
        self.tensor_group = (
            parallel_state.get_tensor_model_parallel_group() if mesh.tensor > 1 else None
        )
        self._shard_group = (
            self.tensor_group if mesh.expert <= mesh.tensor else parallel.shard_group()
        )
        self._step_group = (
            parallel_state.get_expert_model_parallel_group() if mesh.expert > mesh.tensor else None
        )
        self.replica_links = replica_links(
            self.place, platform, device, config.deadlines.collective_timeout_s
        )

    def published_weights(
        self, bucket_bytes: int, late_from: str | None = None
    ) -> StageTensors | None:
        place = self.place
        # of host memory for a thread beside training; on all ranks, because making a group is
        # collective
        group = self._shard_group if late_from is None else parallel.shard_group(HOST_BACKEND)
        senders = senders_of(self._config)
        if not place.sends and not place.is_publisher(senders):
            return None
        model = self._stage.model(late_from or "policy")
        return StageTensors(
            model,
            self._spec,
            place,
            bucket_bytes,
            group,
            on_host=late_from is not None,
            senders=senders,
        )

    def name_policy(self, weights: Weights, name: str = "policy") -> None:
        self._stage.weights[name] = weights

    def copy_policy(self, name: str) -> None:
        self._stage.copy_policy_to(name)
        self._platform.synchronize()

    def accumulate(
        self, microbatches: MicrobatchSource, objective: Objective
    ) -> ReducedGradient | None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._routing is not None:
            self._routing.forget()
        if self._watched is not None:
            self._watched.first = objective.first_sampled
        num_microbatches = 0
        # which packs nothing: every piece of a group is a microbatch
        if self._config.trainer.pipeline_parallel > 1:
            num_microbatches = microbatches.settle() * self._config.microbatches_per_group
        held: HeldMicrobatches | None = None
        if self._stage.frozen and self._config.trainer.frozen_pass == "separate":
            held = HeldMicrobatches(
                microbatches, self._stage.frozen, partial(self._pass_alone, num_microbatches)
            )
        source = held or microbatches

        def forward(microbatch: Microbatch) -> Any:
            objective.begin()
            balance = None if microbatch.is_filler else objective.balance(microbatch)
            if microbatch.is_stem:  # routers count its tokens
                balance = 0.0
            beside = {} if held is None else held.scores(microbatch)
            output = self._forward(microbatch, objective.entropy_gradient, balance, beside)
            is_own = not isinstance(output, ModelOutput) and not microbatch.is_filler
            return objective.sent(microbatch, output) if is_own else output

        def loss(microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
            if held is not None:
                output = replace(output, frozen_scores=held.scores(microbatch))
            return objective.loss(microbatch, self._outputs(output))

        self._run(source, num_microbatches, forward, loss, lambda: source.is_last)
        self._platform.synchronize()
        return None if self._watched is None else self._watched.pop_reduced()

    def gradient_size(self, first: int = 0, every: int = SAMPLED_EVERY) -> torch.Tensor:
        return gradient_size(self._ddp, first, every)

    def scale_gradients(self, factor: float) -> None:
        self._ddp.scale_gradients(factor)

    def stepped(self) -> list[SteppedTensor]:
        return self._stepped()

    def copied(self) -> list[CopiedWeights]:
        if self.place.mesh.size == 1:
            return []
        return copied_weights(
            self._stage.policy, exactly=self._config.run.deterministic or self.device.type == "cpu"
        )

    def share_weights(self) -> None:
        if self._config.trainer.distributed_optimizer:
            self._ddp.start_param_sync(force_sync=True)

    def step(self) -> Step:
        self._updates += 1
        learning_rate = set_rates(self._optimizer, self._config, self._updates)
        with self._offloaded.on_device():
            succeeded, grad_norm, _ = self._optimizer.step()
        self._platform.synchronize()
        routing = (
            None
            if self._routing is None
            else self._routing.pop_routing(self.reductions, self.device)
        )
        norm = math.nan if not succeeded or grad_norm is None else float(grad_norm)
        return Step(norm, learning_rate, routing)

    def evaluate(
        self, microbatches: list[Microbatch], on_outputs: Callable[[Microbatch, Outputs], None]
    ) -> None:
        def loss(microbatch: Microbatch, output: ModelOutput) -> torch.Tensor:
            on_outputs(microbatch, self._outputs(output))
            return torch.zeros((), device=self.device)

        on_device = [microbatch.to(self.device) for microbatch in microbatches]
        self._run(
            on_device, len(microbatches), partial(self._forward, entropy_gradient=False), loss
        )

    def rounding(
        self,
        microbatches: list[Microbatch],
        on_logprobs: Callable[[Microbatch, torch.Tensor, torch.Tensor], None],
    ) -> bool:
        narrow_dtype = self._stage.config.params_dtype
        wide = self._platform.widest_dtype if narrow_dtype == torch.float32 else torch.float32
        if wide == narrow_dtype:
            return False
        on_device = [microbatch.to(self.device) for microbatch in microbatches]
        narrow: list[torch.Tensor] = []

        def keep(microbatch: Microbatch, scores: RowScores) -> torch.Tensor:
            narrow.append(scores.logprobs)
            return scores.logprobs.new_zeros(())

        def compare(microbatch: Microbatch, scores: RowScores) -> torch.Tensor:
            on_logprobs(microbatch, narrow.pop(0), scores.logprobs)
            return scores.logprobs.new_zeros(())

        self._pass_alone(
            len(on_device), "old" if "old" in self._stage.frozen else "policy", on_device, keep
        )
        self._pass_alone(len(on_device), "policy", on_device, compare, wide)
        return True

    def digest(self, name: str = "policy") -> str:
        return digest_of(self._stage.model(name).parameters())

    def computation(self) -> Computation:
        return self._stage.computation()

    def plan_save(self, directory: Path, with_reference: bool) -> PlannedShards:
        with self._offloaded.copied():
            return self._contents.plan(directory, self._updates, with_reference)

    def load(self, directory: Path) -> CheckpointMeta:
        with self._offloaded.on_device():
            meta = self._contents.load(directory)
        self._updates = meta.updates
        return meta

    def export(self, directory: Path) -> None:
        shards = self._shard_group
        export_hf(
            self._stage.policy, self._spec, directory, self.place, shards, config=self._config
        )

    def close(self) -> None:
        parallel.shutdown_parallel()

    def _run(
        self,
        microbatches: Iterable[Microbatch],
        num_microbatches: int,
        forward: Forward,
        loss: Loss,
        is_last: Callable[[], bool] | None = None,
    ) -> None:
        """One pass; num_microbatches is read only where pipeline stages have to agree on it in
        advance.

        is_last: whether the microbatch taken last is the pass's last one; None: forward only.
        """
        forward_only = is_last is None
        group = self._step_group
        # fillers take the places of groups that are trained by rule, too
        loss = zero_for_fillers(loss)
        if self._config.trainer.pipeline_parallel == 1:
            turns = Turns(microbatches, group, self._filler, is_last)
            with (
                closing(with_spans(turns, self._timeline)) as timed_turns,
                torch.set_grad_enabled(not forward_only),
            ):
                run_sequential(self._ddp, timed_turns, forward, loss, forward_only=forward_only)
            return
        if group is not None:
            total = largest(num_microbatches, group, self.device)
            fillers = (self._filler() for _ in range(total - num_microbatches))
            microbatches = chain(microbatches, fillers)
            num_microbatches = total
        every = (Turn("train", microbatch) for microbatch in microbatches)
        with (
            closing(with_spans(every, self._timeline)) as timed,
            torch.set_grad_enabled(not forward_only),
        ):
            run_pipelined(
                self._ddp,
                (turn.microbatch for turn in timed),
                num_microbatches,
                forward,
                loss,
                forward_only=forward_only,
            )

    def _filler(self) -> Microbatch:
        return filler(self._config.trainer.pad_multiple, self.device)

    def _forward(
        self,
        microbatch: Microbatch,
        entropy_gradient: bool,
        balance: float | None = None,
        scored: Mapping[str, RowScores] | None = None,
    ) -> Any:
        """scored: scores of the frozen models that have had passes of their own."""
        part = self._part(microbatch)

        def choose(frozen: Mapping[str, RowScores]) -> torch.Tensor | None:
            of_all = dict(scored or {})
            for name, scores in frozen.items():
                if scores.choices is not None:
                    of_all[name] = part.joined(scores)
            choices: dict[str, torch.Tensor] = {}
            for name, scores in of_all.items():
                if scores.choices is not None:
                    choices[name] = scores.choices
            of_teachers = chosen_tokens(
                self._trainer_models.teachers, microbatch.columns, choices, microbatch.targets
            )
            return part.of_targets(of_teachers)

        output = self._ddp(
            *_inputs(part),
            temperature=self._config.rollout.temperature,
            chunk=self._config.model.head_chunk_tokens,
            entropy_grad=entropy_gradient,
            balance=balance,
            replay=_replay(microbatch, part),
            most_likely=self._most_likely,
            choose=choose,
            asked=self._asked(microbatch),
            own_targets=part.own,
        )
        if not isinstance(output, ModelOutput):
            return output
        frozen = {name: part.joined(scores) for name, scores in output.frozen_scores.items()}
        return replace(output, policy=part.joined(output.policy), frozen_scores=frozen)

    def _asked(self, microbatch: Microbatch) -> Sequence[str] | None:
        """Returns the frozen models that a microbatch asks for; None: all, as where experts of
        models lie on ranks of several replicas, which compute together.
        """
        teachers = self._trainer_models.held
        if self._step_group is not None or all(model.targets is None for model in teachers):
            return None
        directories = self._trainer_models.directories
        copies = [name for name in self._stage.frozen if name not in directories]
        return (*copies, *asked_models(teachers, microbatch.columns))

    def _part(self, microbatch: Microbatch) -> Part:
        """This rank's part of a microbatch. Raises ConfigError for attachments."""
        refuse_attachments(microbatch, self._config)
        return self._parts.for_microbatch(microbatch)

    def _outputs(self, output: ModelOutput) -> Outputs:
        weights = self._stage.weights
        frozen = {
            name: Logprobs(scores.logprobs, weights.get(name), scores.choice_logprobs)
            for name, scores in output.frozen_scores.items()
        }
        policy = output.policy
        logprobs = Logprobs(policy.logprobs, weights.get("policy"), policy.choice_logprobs)
        return Outputs(logprobs, policy.entropy, frozen, output.head)

    def _pass_alone(
        self,
        num_microbatches: int,
        name: str,
        microbatches: Iterable[Microbatch],
        keep: Loss,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A forward pass of one model; `keep` gets its scores on the last stage. dtype: a wider
        type to compute in.
        """
        temperature, chunk = self._config.rollout.temperature, self._config.model.head_chunk_tokens

        def forward(microbatch: Microbatch) -> RowScores | torch.Tensor:
            part = self._part(microbatch)
            output = self._stage.pass_alone(
                name,
                *_inputs(part),
                temperature,
                chunk,
                dtype,
                _replay(microbatch, part),
                self._most_likely.get(name),
            )
            return part.joined(output) if isinstance(output, RowScores) else output

        with self._timeline.span(f"{name} pass"):
            self._run(microbatches, num_microbatches, forward, keep)

    def _finalize_gradients(
        self, models: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Sum the gradients over replicas, once, after the update's last microbatch."""
        with self._timeline.span("reduce gradients"):
            finalize_model_grads(models, None, **kwargs)


def _inputs(
    part: Part,
) -> tuple[torch.Tensor, PrefixLayout | RankRows | PathRows, torch.Tensor, torch.Tensor]:
    """Returns the inputs of a model for a part."""
    return part.tokens[None], part.layout, part.rows, part.targets


def _replay(microbatch: Microbatch, part: Part) -> Replay | None:
    """Returns the expert choices of a part's tokens. None where the run does not replay, or nobody
    recorded
    anything: of a probe, and of a filler.
    """
    if EXPERT_CHOICES not in microbatch.packed:
        return None
    replay = replay_of(microbatch)
    return Replay(ids=part.of_rows(replay.ids, -1), leads=part.of_rows(replay.leads, False))
