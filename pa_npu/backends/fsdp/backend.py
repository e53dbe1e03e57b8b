"""TrainBackend on FSDP2: every rank is a replica that reads groups of its own and holds a shard of each model.

Gathering a layer is a collective, so all ranks go through the same number of microbatches: before
each one they agree whether any of them has another, and who has none passes one token whose loss
counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pa_npu.algorithm.choices import asked_models, chosen_tokens
from pa_npu.algorithm.loss_gradient import HeadGradient
from pa_npu.algorithm.model_outputs import Logprobs, Outputs, Weights
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient, Reductions
from pa_npu.attention.stems import of_model
from pa_npu.backends.context import Part, Parts, new_context_group, new_group_of, replica_links
from pa_npu.backends.fsdp.checkpoint import PlannedShards, load_state, state_of
from pa_npu.backends.fsdp.lora import Adapted
from pa_npu.backends.fsdp.lora_weights import Merged, base_of, write_adapters
from pa_npu.backends.fsdp.model import ScoredModel, count_reductions, plain_experts
from pa_npu.backends.fsdp.optimizer import ShardedAdamW, counted, local
from pa_npu.backends.fsdp.vision import PackedImages, pack_images
from pa_npu.backends.fsdp.weights import ShardedWeights
from pa_npu.backends.hf_directory import BUCKET_BYTES, write_hf
from pa_npu.backends.in_step import Turn, Turns
from pa_npu.backends.logprob import MostLikely, RowScores
from pa_npu.backends.optimizer import OffloadedState
from pa_npu.backends.protocol import (
    DTYPES,
    CopiedWeights,
    HeldTensor,
    MicrobatchSource,
    Step,
    StepOptions,
    SteppedTensor,
    refuse_attachments,
)
from pa_npu.backends.widened import widened
from pa_npu.checkpoints.directories import CheckpointMeta, read_meta
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config
from pa_npu.config.sections.operation import Senders
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.publish import senders_of, sends_tower_once
from pa_npu.platform.base import Platform
from pa_npu.samples.microbatch import Microbatch, filler
from pa_npu.telemetry.timeline import Timeline, now
from pa_npu.vision.family import TOWER
from pa_npu.vision.processor import ImageProcessor
from pa_npu.weight_transfer.computation import Computation, computation_of
from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.transport import HOST_BACKEND as HOST


class FsdpBackend:
    """One rank. models: "policy", the frozen ones that the algorithm needs, and "published" where
    that is kept.
    """

    software = f"FSDP2 of torch {torch.__version__}"
    tensor_group = None

    def __init__(
        self,
        models: Mapping[str, ScoredModel | Adapted],
        mesh: DeviceMesh,
        config: Config,
        spec: ModelSpec,
        platform: Platform,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._models = models
        self._policy = models["policy"]
        self._module = self._policy.model if isinstance(self._policy, Adapted) else self._policy
        self._config = config
        self._processor: ImageProcessor | None = None
        if self._module.reads_images:
            bound = config.data.max_image_pixels
            self._processor = ImageProcessor.from_directory(config.model.path, bound)
        self._trainer_models = trainer_models(config)
        self._frozen = self._trainer_models.computed
        self._spec = spec
        self._platform = platform
        self.device = device
        self.place: Place = config.mesh.place(dist.get_rank())
        timeout_s = config.deadlines.collective_timeout_s
        context = new_context_group(self.place, 1, platform.group_timeout_s(timeout_s))
        self._parts = Parts(context)
        self.replica_links = replica_links(self.place, platform, device, timeout_s)
        self.reductions = self._reductions_over(platform.group_timeout_s(timeout_s))
        self._nothing = filler(1, device)
        self._timeline = timeline
        self._weights: dict[str, Weights] = {}
        self._copies = mesh.size() // mesh.size(mesh.ndim - 1)
        self._copies_group = mesh.get_group(0) if mesh.ndim > 1 else None
        self._shard_group = None if dist.get_world_size() == 1 else mesh.get_group(mesh.ndim - 1)
        self._reductions = (
            []
            if self._shard_group is None
            else count_reductions(self._module, self._copies, platform.widest_dtype)
        )
        self._optimizer = ShardedAdamW(self._policy.parameters(), config, platform.widest_dtype)
        self._names = {weight: name for name, weight in self._policy.named_weights().items()}
        self._offloaded = OffloadedState(self._optimizer.moments, config, platform, device)

    def _reductions_over(self, timeout_s: float) -> Reductions:
        """Sums over replicas, and of gradients over all ranks, which share every weight."""
        mesh = self.place.mesh
        world = None if mesh.size == 1 else dist.group.WORLD
        if mesh.context == 1:
            return Reductions(world)
        replicas = None if mesh.data == 1 else new_group_of(self.place, timeout_s, "data")
        return Reductions(replicas, gradient_group=world, sharing_group=world)

    def published_weights(
        self, bucket_bytes: int, late_from: str | None = None
    ) -> ShardedWeights | None:
        group = self._shard_group
        # on all ranks: making a group is collective
        if late_from is not None and group is not None:
            groups = {
                ranks: dist.new_group(list(ranks), backend=HOST)
                for ranks in self.place.mesh.shard_groups()
            }
            group = groups[self.place.shard_group]
        senders = senders_of(self._config)
        if not self.place.sends and not self.place.is_publisher(senders):
            return None
        model, dtype = self._models[late_from or "policy"], DTYPES[self._config.model.dtype]
        if not isinstance(model, Adapted) or self._config.publish.lora == "merged":
            return self._whole(
                model,
                bucket_bytes,
                group,
                sent_once=TOWER if sends_tower_once(self._config, self._spec) else "",
                on_host=late_from is not None,
                senders=senders,
            )
        base = base_of(model, self._config.model.path, dtype) if self.place.publishes else None
        return ShardedWeights(
            model,
            self._spec,
            self.place,
            bucket_bytes,
            torch.float32,
            group,
            base=base,
            on_host=late_from is not None,
            senders=senders,
        )

    def name_policy(self, weights: Weights, name: str = "policy") -> None:
        self._weights[name] = weights

    @torch.no_grad()
    def copy_policy(self, name: str) -> None:
        for target, source in zip(
            self._models[name].parameters(), self._policy.parameters(), strict=True
        ):
            local(target).copy_(local(source))
        if "policy" in self._weights:
            self._weights[name] = self._weights["policy"]
        self._platform.synchronize()

    def accumulate(
        self, microbatches: MicrobatchSource, objective: Objective
    ) -> ReducedGradient | None:
        self._optimizer.zero_grad()
        for reduction in self._reductions:
            reduction.restart()
            reduction.first = objective.first_sampled
        has_computed = False
        opened: list[Outputs] = []
        compares = self._trainer_models.compares_distributions
        is_watched = not (objective.entropy_gradient or compares)
        with closing(self._turns(microbatches)) as turns:
            for turn in turns:
                start_s = now()
                has_computed = True
                if turn.kind == "close":
                    _backward_of_nothing(opened.pop())
                else:
                    objective.begin()
                    microbatch = turn.microbatch
                    outputs = self._pass(microbatch, objective.entropy_gradient, is_watched)
                    if turn.kind == "open":
                        opened.append(outputs)
                    elif microbatch.is_filler:
                        _backward_of_nothing(outputs)
                    else:
                        objective.loss(microbatch, outputs).backward()
                if turn.microbatch.group_indices:
                    self._timeline.complete(
                        turn.label, start_s, now(), lane="microbatches", turn=turn.kind
                    )
        if not has_computed:
            # all is trained by rule, on every rank: the step is that of a gradient of 0
            _backward_of_nothing(self._pass(self._nothing, False))
        self._platform.synchronize()
        return counted(self._reductions, self.device) if self._reductions else None

    def gradient_size(self, first: int = 0, every: int = SAMPLED_EVERY) -> torch.Tensor:
        return self._optimizer.gradient_size(first, every)

    def scale_gradients(self, factor: float) -> None:
        self._optimizer.scale_gradients(factor)

    def stepped(self) -> list[SteppedTensor]:
        return self._optimizer.stepped(self._names, self._spec.experts is not None, self._copies)

    def copied(self) -> list[CopiedWeights]:
        if self._copies == 1 or self._copies_group is None:
            return []
        shards = [
            HeldTensor(name, local(weight).detach().flatten())
            for weight, name in self._names.items()
            if weight.requires_grad
        ]
        return [CopiedWeights(self._copies_group, "replicas", shards)]

    def share_weights(self) -> None:
        """Nothing to do: every pass gathers the shards."""

    def step(self, options: StepOptions | None = None) -> Step:
        """See TrainBackend. options: of this step alone; None takes the configuration's."""
        with self._offloaded.on_device():
            grad_norm, learning_rate = self._optimizer.step(self._shard_group, options)
        self._platform.synchronize()
        return Step(grad_norm if math.isfinite(grad_norm) else math.nan, learning_rate)

    def evaluate(
        self, microbatches: list[Microbatch], on_outputs: Callable[[Microbatch, Outputs], None]
    ) -> None:
        with torch.no_grad():
            for turn in self._turns(iter(microbatches)):
                on_device = turn.microbatch.to(self.device)
                outputs = self._pass(on_device, False)
                if not on_device.is_filler:
                    on_outputs(on_device, outputs)

    @torch.no_grad()
    def rounding(
        self,
        microbatches: list[Microbatch],
        on_logprobs: Callable[[Microbatch, torch.Tensor, torch.Tensor], None],
    ) -> bool:
        narrow_dtype = DTYPES[self._config.model.dtype]
        wide = self._platform.widest_dtype if narrow_dtype == torch.float32 else torch.float32
        if wide == narrow_dtype:
            return False
        on_device = [microbatch.to(self.device) for microbatch in microbatches]
        narrow = self._logprobs("old" if "old" in self._frozen else "policy", on_device)
        with plain_experts(self._module.causal), widened(self._module, wide):
            widest = self._logprobs("policy", on_device)
        for microbatch, less, more in zip(on_device, narrow, widest, strict=True):
            on_logprobs(microbatch, less, more)
        return True

    def digest(self, name: str = "policy") -> str:
        return digest_of(local(parameter) for parameter in self._models[name].parameters())

    def computation(self) -> Computation:
        return computation_of(self._module.modules())

    def plan_save(self, directory: Path, with_reference: bool) -> PlannedShards:
        base = (
            self._policy.base_digest(self._shard_group)
            if isinstance(self._policy, Adapted)
            else None
        )
        description = {"base": base, "updates": self._optimizer.updates}
        with self._offloaded.copied():
            return PlannedShards(self._state(with_reference), directory, description)

    def load(self, directory: Path) -> CheckpointMeta:
        meta = read_meta(directory)
        if isinstance(self._policy, Adapted):
            self._policy.check_base(meta.base, directory, self._shard_group)
        saved = "reference" in self._models and bool(meta.reference and meta.reference["saved"])
        with torch.no_grad(), self._offloaded.on_device():
            load_state(self._state(saved), directory)
        self._optimizer.resume(meta.updates)
        return meta

    def export(self, directory: Path) -> None:
        if isinstance(self._policy, Adapted) and self._config.checkpoint.export_hf != "merged":
            write_adapters(
                self._policy, self._config, self._spec, directory, self.place, self._shard_group
            )
            return
        source = (
            self._whole(self._policy, BUCKET_BYTES, self._shard_group) if self.place.sends else None
        )
        write_hf(source, self._spec, directory, self.place, self.device, config=self._config)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _whole(
        self,
        model: ScoredModel | Adapted,
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        *,
        sent_once: str = "",
        on_host: bool = False,
        senders: Senders = "leader",
    ) -> ShardedWeights:
        """Returns a model's weights, adapters merged into them."""
        source, dtype = (
            Merged(model) if isinstance(model, Adapted) else model,
            DTYPES[self._config.model.dtype],
        )
        return ShardedWeights(
            source,
            self._spec,
            self.place,
            bucket_bytes,
            dtype,
            group,
            sent_once=sent_once,
            on_host=on_host,
            senders=senders,
        )

    def _logprobs(self, name: str, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """One model's, of each microbatch."""
        logprobs = []
        for turn in self._turns(iter(microbatches)):
            microbatch = turn.microbatch
            part = self._parts.for_microbatch(microbatch)
            images = self._images(microbatch)
            scores = part.joined(self._score(name, microbatch, part, images, entropy=False))
            if not microbatch.is_filler:
                logprobs.append(scores.logprobs)
        return logprobs

    def _state(self, with_reference: bool) -> dict[str, torch.Tensor]:
        return state_of(
            self._policy, self._optimizer, self._models["reference"] if with_reference else None
        )

    def _turns(self, microbatches: Iterator[Microbatch]) -> Generator[Turn, None, None]:
        """Yields this rank's turns, in step with all others."""
        group = None if self._shard_group is None else dist.group.WORLD
        yield from Turns(microbatches, group, lambda: self._nothing, None)

    def _pass(
        self,
        microbatch: Microbatch,
        entropy_gradient: bool,
        is_watched: bool = False,
    ) -> Outputs:
        """Returns all models over a microbatch, the frozen ones first. is_watched: whether to watch
        the gradient that meets the LM head.
        """
        part = self._parts.for_microbatch(microbatch)
        images = self._images(microbatch)
        frozen: dict[str, Logprobs] = {}
        choices: dict[str, torch.Tensor] = {}
        asked, computed = self._asked(microbatch)
        with torch.no_grad():
            for name in computed:
                most_likely = None
                if (count := self._trainer_models.num_choices.get(name)) is not None:
                    most_likely = MostLikely(count, self._spec.vocab_size)
                is_asked = name in asked
                subject = microbatch if is_asked else self._nothing
                scores = self._score(
                    name,
                    subject,
                    part if is_asked else self._parts.for_microbatch(subject),
                    images if is_asked else self._images(subject),
                    entropy=False,
                    most_likely=most_likely,
                )
                if not is_asked:
                    continue
                scores = part.joined(scores)
                frozen[name] = Logprobs(
                    scores.logprobs, self._weights.get(name), scores.choice_logprobs
                )
                if scores.choices is not None:
                    choices[name] = scores.choices
        head = HeadGradient(part.own) if is_watched else None
        of_teachers = chosen_tokens(
            self._trainer_models.teachers, microbatch.columns, choices, microbatch.targets
        )
        scores = part.joined(
            self._score(
                "policy",
                microbatch,
                part,
                images,
                entropy_grad=entropy_gradient,
                head_gradient=head,
                choices=part.of_targets(of_teachers),
            )
        )
        policy = Logprobs(scores.logprobs, self._weights.get("policy"), scores.choice_logprobs)
        return Outputs(policy, scores.entropy, frozen, head)

    def _asked(self, microbatch: Microbatch) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the frozen models that a microbatch asks for, and those that this rank computes,
        beside others whose microbatches ask for them: gathering their layers is a collective.
        """
        teachers = self._trainer_models.held
        if all(model.targets is None for model in teachers):
            return self._frozen, self._frozen
        names = asked_models(teachers, microbatch.columns)
        others = [name for name in self._frozen if name not in self._trainer_models.directories]
        wanted = torch.tensor(
            [model.name in names for model in teachers], dtype=torch.int32, device=self.device
        )
        if self._shard_group is not None:
            dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        of_any = [
            model.name
            for model, is_wanted in zip(teachers, wanted.tolist(), strict=True)
            if is_wanted
        ]
        return (*others, *names), (*others, *of_any)

    def _score(
        self,
        name: str,
        microbatch: Microbatch,
        part: Part,
        images: PackedImages | None,
        **options: Any,
    ) -> RowScores:
        """One model's scores of the targets of this rank's part of a microbatch.

        Raises ConfigError for images and a model that reads none.
        """
        model = self._models[name]
        module = model.model if isinstance(model, Adapted) else model
        reads_images = {"images": images} if module.reads_images else {}
        if not reads_images:
            refuse_attachments(microbatch, self._config)
        return model(
            part.tokens,
            of_model(part.layout, name),
            part.rows,
            part.targets,
            self._config.rollout.temperature,
            self._config.model.head_chunk_tokens,
            **reads_images,
            **options,
        )

    def _images(self, microbatch: Microbatch) -> PackedImages | None:
        """Packs a microbatch's images once for all models; None for a policy that reads none."""
        if self._processor is None:
            return None
        fill = self._config.model.vision == "trained"
        return pack_images(microbatch, self._processor, fill=fill)


def _backward_of_nothing(outputs: Outputs) -> None:
    """Runs the backward of a filler, whose gradient is 0 and comes to every weight."""
    nothing = outputs.policy.values.sum() + outputs.entropy.sum()
    if outputs.policy.choices is not None:
        nothing = nothing + outputs.policy.choices.sum()
    (nothing * 0.0).backward()
