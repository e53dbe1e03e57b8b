"""ToyBackend: a transformers model, torch's AdamW on fp32 masters, and one sum over replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu.algorithm.model_outputs import Logprobs, Outputs, PolicyState
from pa_npu.algorithm.objective import Objective
from pa_npu.algorithm.trainer_models import trainer_models
from pa_npu.algorithm.update_sums import ReducedGradient, Reductions
from pa_npu.backends.optimizer import learning_rate
from pa_npu.backends.protocol import (
    CopiedWeights,
    HeldTensor,
    MicrobatchSource,
    Step,
    SteppedTensor,
    refuse_attachments,
)
from pa_npu.checkpoints.directories import CheckpointMeta, read_meta
from pa_npu.config.mesh import Mesh, Place
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.platform.base import Platform
from pa_npu.samples.microbatch import Microbatch
from pa_npu.weight_transfer.computation import Computation
from pa_npu.weight_transfer.contents import OrderedContents
from pa_npu.weight_transfer.digest import digest_of
from pa_npu.weight_transfer.manifest import Bucket, Manifest, Segment
from pa_npu.weight_transfer.transport import Deadline

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FILE = "toy.pt"


def sum_over_replicas(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


class ToyBackend:
    tensor_group = replica_links = None
    software = f"torch {torch.__version__}"

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        platform: Platform,
        store: dist.Store,
        rank: int,
        local_rank: int,
    ) -> None:
        world = config.trainer.devices
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        self._config, self._spec, self._platform = config, spec, platform
        self.place: Place = Mesh(data=world).place(rank)
        self.device = platform.device(local_rank)
        self.reductions = Reductions(dist.group.WORLD)
        names = ("policy", *trainer_models(config).copies)
        self._models = {name: self._load(name) for name in names}
        self._weights: dict[str, PolicyState] = {}
        self._parameters = list(self._models["policy"].parameters())
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._gradient = torch.zeros(
            sum(master.numel() for master in self._masters), device=self.device
        )
        parts = self._gradient.split([master.numel() for master in self._masters])
        for master, part in zip(self._masters, parts, strict=True):
            master.grad = part.view_as(master)
        options = config.optimizer
        groups = [
            {
                "params": [m for m in self._masters if m.ndim > 1],
                "weight_decay": options.weight_decay,
            },
            {"params": [m for m in self._masters if m.ndim <= 1], "weight_decay": 0.0},
        ]
        self._updates = 0
        self._optimizer = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=options.betas, eps=options.epsilon
        )

    def _load(self, name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            self._config.model.path,
            dtype=_DTYPES[self._config.model.dtype],
            attn_implementation="eager",
        ).to(self.device)
        return model.eval().requires_grad_(name == "policy")

    def published_weights(
        self, bucket_bytes: int, late_from: str | None = None
    ) -> PublishedTensors | None:
        if not self.place.publishes:
            return None
        return PublishedTensors(self._models[late_from or "policy"], self._spec, bucket_bytes)

    def name_policy(self, weights: PolicyState, name: str = "policy") -> None:
        self._weights[name] = weights

    @torch.no_grad()
    def copy_policy(self, name: str) -> None:
        for target, source in zip(self._models[name].parameters(), self._parameters, strict=True):
            target.copy_(source)
        if "policy" in self._weights:
            self._weights[name] = self._weights["policy"]

    def accumulate(
        self, microbatches: MicrobatchSource, objective: Objective
    ) -> ReducedGradient | None:
        self._gradient.zero_()
        for microbatch in microbatches:
            objective.loss(
                microbatch, self._outputs(microbatch, objective.entropy_gradient)
            ).backward()
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if parameter.grad is not None and master.grad is not None:
                    master.grad += parameter.grad
                parameter.grad = None
        replicas = self.place.mesh.data
        if replicas == 1:
            return None
        own, squares = self._gradient.sum()[None], self._gradient.square().sum()[None]
        sum_over_replicas(self._gradient)
        return ReducedGradient(
            own, squares, self._gradient.chunk(replicas)[self.place.replica].sum()[None]
        )

    def gradient_size(self, first: int = 0, every: int = 1) -> torch.Tensor:
        return self._gradient.norm()

    def scale_gradients(self, factor: float) -> None:
        self._gradient *= factor

    def stepped(self) -> list[SteppedTensor]:
        settings = {
            id(master): group
            for group in self._optimizer.param_groups
            for master in group["params"]
        }
        names = [name for name, _ in self._models["policy"].named_parameters()]
        tensors = []
        for name, parameter, master in zip(names, self._parameters, self._masters, strict=True):
            state, group = self._optimizer.state.get(master, {}), settings[id(master)]
            moments = [state.get(moment) for moment in ("exp_avg", "exp_avg_sq")]
            mean, square = (None if moment is None else moment.view(-1) for moment in moments)
            assert master.grad is not None, "it is a part of one buffer"
            weights, gradient = master.view(-1), master.grad.view(-1)
            own = SteppedTensor(
                name,
                master.ndim,
                weights,
                parameter.detach().view(-1),
                gradient,
                mean,
                square,
                settings=group,
                share=1 / self.place.mesh.data,
            )
            tensors.append(own)
        return tensors

    def copied(self) -> list[CopiedWeights]:
        named = self._models["policy"].named_parameters()
        tensors = [HeldTensor(name, parameter.detach().view(-1)) for name, parameter in named]
        group = dist.group.WORLD
        return [] if group is None else [CopiedWeights(group, "replicas", tensors)]

    def share_weights(self) -> None: ...

    def step(self) -> Step:
        norm, limit = float(self._gradient.norm()), self._config.optimizer.clip_grad
        if limit and norm > limit:
            self._gradient *= limit / (norm + 1e-6)
        self._updates += 1
        rate = learning_rate(self._config, self._updates)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
        return Step(norm, rate)

    @torch.no_grad()
    def evaluate(
        self, microbatches: list[Microbatch], on_outputs: Callable[[Microbatch, Outputs], None]
    ) -> None:
        for microbatch in microbatches:
            here = microbatch.to(self.device)
            on_outputs(here, self._outputs(here, False))

    def rounding(
        self,
        microbatches: list[Microbatch],
        on_logprobs: Callable[[Microbatch, torch.Tensor, torch.Tensor], None],
    ) -> bool:
        return False  # it computes in one type only

    def _outputs(self, microbatch: Microbatch, entropy_gradient: bool) -> Outputs:
        logprobs, entropy = self._logprobs("policy", microbatch)
        with torch.no_grad():
            frozen = {
                name: self._logprobs(name, microbatch)[0]
                for name in trainer_models(self._config).computed
            }
        return Outputs(logprobs, entropy if entropy_gradient else entropy.detach(), frozen)

    def _logprobs(self, name: str, microbatch: Microbatch) -> tuple[Logprobs, torch.Tensor]:
        refuse_attachments(microbatch, self._config)
        model, layout = self._models[name], microbatch.layout
        hidden = torch.full(
            (layout.total, layout.total), torch.finfo(model.dtype).min, dtype=model.dtype
        )
        mask = hidden.masked_fill(layout.dense_mask().cpu(), 0.0).to(self.device)
        logits = model(
            input_ids=microbatch.tokens[None],
            position_ids=layout.position_ids(self.device)[None],
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0]
        table = (logits[microbatch.rows].float() / self._config.rollout.temperature).log_softmax(-1)
        values = table.gather(-1, microbatch.targets[:, None])[:, 0]
        return Logprobs(values, self._weights.get(name)), -(table.exp() * table).sum(-1)

    def digest(self, name: str = "policy") -> str:
        return digest_of(self._models[name].parameters())

    def computation(self) -> Computation:
        return Computation()

    def plan_save(self, directory: Path, with_reference: bool) -> PlannedFile:
        state = {"masters": self._masters, "optimizer": self._optimizer.state_dict()}
        if with_reference:
            state["reference"] = list(self._models["reference"].parameters())
        return PlannedFile(
            state if self.place.rank == 0 else None, directory / _FILE, {"updates": self._updates}
        )

    @torch.no_grad()
    def load(self, directory: Path) -> CheckpointMeta:
        state = torch.load(directory / _FILE, weights_only=True)
        _copy(self._masters, state["masters"])
        _copy(self._parameters, self._masters)
        self._optimizer.load_state_dict(state["optimizer"])
        if "reference" in state:
            _copy(self._models["reference"].parameters(), state["reference"])
        meta = read_meta(directory)
        self._updates = meta.updates
        return meta

    def export(self, directory: Path) -> None:
        if self.place.rank == 0:
            self._models["policy"].save_pretrained(directory)

    def close(self) -> None:
        dist.destroy_process_group()


class PublishedTensors:
    """WeightSource of a whole model: rows of tensors, one run of them per bucket."""

    is_leader = True

    def __init__(self, model: torch.nn.Module, spec: ModelSpec, bucket_bytes: int) -> None:
        self._model = model
        self._tensors = dict(model.named_parameters())
        self._runs: list[tuple[str, int, int]] = []
        for name, tensor in self._tensors.items():
            row = tensor[0].numel()
            run = max(1, bucket_bytes // (row * tensor.element_size())) * row
            self._runs += [
                (name, start, min(run, tensor.numel() - start))
                for start in range(0, tensor.numel(), run)
            ]
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        buckets = tuple(Bucket(dtype, (Segment(*run),)) for run in self._runs)
        self.manifest = Manifest(0, spec.wire_sizes(), shapes, buckets)

    def contents(self) -> dict[str, str]:
        contents = OrderedContents()
        for name, parameter in self._model.named_parameters():
            contents.add(name, parameter)
        return contents.read()

    def buckets(self, deadline: Deadline, *, whole: bool = True) -> Iterator[torch.Tensor]:
        for name, start, size in self._runs:
            yield self._tensors[name].detach().view(-1)[start : start + size]


class PlannedFile:
    """PlannedSave of one file, by rank 0."""

    def __init__(
        self, state: dict[str, Any] | None, file: Path, description: dict[str, Any]
    ) -> None:
        self.description = description
        self._state, self._file = state, file

    def write(self) -> list[str]:
        if self._state is None:
            return []
        torch.save(self._state, self._file)
        return [self._file.name]

    def release(self) -> None:
        self._state = None

    def complete(self) -> None: ...


def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@torch.no_grad()
def export_checkpoint(checkpoint: Path, output: Path, model: str | None) -> None:
    config = read_meta(checkpoint).config
    made = AutoModelForCausalLM.from_pretrained(model or config["model"]["path"])
    _copy(made.parameters(), torch.load(checkpoint / _FILE, weights_only=True)["masters"])
    made.save_pretrained(output)
