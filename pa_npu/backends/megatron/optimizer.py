"""The optimizer of a model stage: Megatron's mixed-precision (distributed) AdamW, and sums of the gradients that it gets (I7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, overload

import torch

from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient
from pa_npu.backends.optimizer import learning_rate
from pa_npu.backends.protocol import CopiedWeights, HeldTensor, SteppedTensor
from pa_npu.config.mesh import Place
from pa_npu.config.schema import Config

_OF_MIXTURES = (".experts.", ".router.")  # of which a part may get no token


def build_optimizer(ddp: Any, config: Config) -> Any:
    """AdamW with fp32 master weights.

    The gradient norm is computed always; clip_grad=0 only never scales by it.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bf16 = config.model.dtype == "bf16"
    options = config.optimizer
    megatron_config = OptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate,
        min_lr=options.min_learning_rate,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.epsilon,
        clip_grad=options.clip_grad or math.inf,
        bf16=bf16,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
    )
    return get_megatron_optimizer(megatron_config, [ddp])


def set_rates(optimizer: Any, config: Config, update: int) -> float:
    """Give every parameter group its learning rate in an update, which is returned, and weight
    decay where it belongs (not on norms and biases)."""
    rate = learning_rate(config, update)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = (
            rate,
            config.optimizer.weight_decay * group.get("wd_mult", 1.0),
        )
    return rate


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that nothing but a step reads: moments, and weights in fp32 where the
    model has another type.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            for group in getattr(part, name, ()):
                yield from group
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim())


class WatchedReduction:
    """Notes sums of each bucket of a rank's DistributedDataParallel, right before its reduction
    begins and after it ends.
    """

    def __init__(self, ddp: Any, place: Place, summed_in: torch.dtype) -> None:
        """summed_in: the type of the sums."""
        mesh = place.mesh
        self._summed_in = summed_in
        self.first = 0
        """The first element of a sample."""
        self._groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        # Megatron reduces gradients over replicas and context groups at once, in rank order
        sharing = place.group("context", "data")
        replicas = (len(sharing), sharing.index(place.rank))
        copies = (mesh.expert_data, place.coordinate("expert_data"))
        self._shares = {id(group): replicas for group in ddp.bucket_groups}
        self._shares |= {id(group): copies for group in ddp.expert_parallel_bucket_groups}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._after: dict[int, torch.Tensor] = {}
        for group in self._groups:
            self._watch(group, group.start_grad_sync, group.finish_grad_sync)

    def pop_reduced(self) -> ReducedGradient:
        """Returns the sums of the reduction that has ended, and forgets them."""
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        none = torch.full((), torch.nan, dtype=self._summed_in, device=buckets[0].grad_data.device)
        before = [self._before.get(id(bucket), (none, none)) for bucket in buckets]
        reduced = [self._after.get(id(bucket), none) for bucket in buckets]
        self._before, self._after = {}, {}
        sums, squares = zip(*before, strict=True)
        return ReducedGradient(torch.stack(sums), torch.stack(squares), torch.stack(reduced))

    def _watch(self, group: Any, start: Callable[..., None], finish: Callable[..., None]) -> None:
        def noted_start(*args: Any, **kwargs: Any) -> None:
            self._note_own(group)
            start(*args, **kwargs)

        def noted_finish(*args: Any, **kwargs: Any) -> None:
            finish(*args, **kwargs)
            self._note_reduced(group)

        group.start_grad_sync, group.finish_grad_sync = noted_start, noted_finish

    def _note_own(self, group: Any) -> None:
        for bucket in group.buckets:
            sample = bucket.grad_data[self.first :: SAMPLED_EVERY].to(self._summed_in)
            self._before[id(bucket)] = sample.sum(), sample.square().sum()

    def _note_reduced(self, group: Any) -> None:
        """A rank's share is the part that the distributed optimizer would step on it."""
        for bucket in group.buckets:
            gradient = bucket.grad_data
            ranks, rank = self._shares[id(group)]
            size = -(-gradient.numel() // ranks)
            start = size * rank
            first = start + (self.first - start) % SAMPLED_EVERY
            share = gradient[first : start + size : SAMPLED_EVERY]
            self._after[id(bucket)] = share.sum(dtype=self._summed_in)


def gradient_size(ddp: Any, first: int, every: int) -> torch.Tensor:
    """Returns the norm of a sample of what this rank's gradient buffers hold."""
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    sizes = [torch.linalg.vector_norm(buffer.grad_data[first::every]) for buffer in buffers]
    return torch.stack(sizes).norm()


class SteppedTensors:
    """Finds what this rank steps of each parameter; see TrainBackend.stepped.

    Megatron keeps weights and gradients in the same memory from step to step, so that they are
    looked up again only where its optimizer has other groups, as after a checkpoint was loaded.
    """

    def __init__(self, optimizer: Any, ddp: Any, place: Place) -> None:
        self._optimizer = optimizer
        self._ddp = ddp
        self._place = place
        self._groups: list[Any] = []
        self._parts: list[_SteppedPart] = []

    def __call__(self) -> list[SteppedTensor]:
        groups = self._optimizer.param_groups
        is_known = len(groups) == len(self._groups) and all(map(is_, groups, self._groups))
        if not is_known or not self._parts:
            self._groups, self._parts = list(groups), self._looked_up()
        return [part.tensor() for part in self._parts]

    def _looked_up(self) -> list[_SteppedPart]:
        stepped, is_sharded = {}, False
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if part.optimizer is not None:
                stepped.update(_memory_of(part))
                is_sharded = is_sharded or hasattr(part, "model_float16_groups")
        return [
            _SteppedPart(
                name=name,
                dimensions=parameter.dim(),
                memory=stepped.get(parameter) or _Memory.empty(parameter),
                may_be_zero=self._may_be_zero(name),
                share=self._share(parameter, is_sharded),
            )
            for name, parameter in self._ddp.module.named_parameters()
            if parameter.requires_grad
        ]

    def _may_be_zero(self, name: str) -> bool:
        is_shard_of_rows = self._place.mesh.tensor > 1 and "word_embeddings" in name
        return is_shard_of_rows or any(part in name for part in _OF_MIXTURES)

    def _share(self, parameter: torch.Tensor, is_sharded: bool) -> float:
        mesh = self._place.mesh
        if mesh.pipeline > 1 and getattr(parameter, "shared_embedding", False):
            return 0.0  # the first stage's and the last one's must be equal
        is_expert = not getattr(parameter, "allreduce", True)
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        copies = 1 if is_expert or is_cut else mesh.tensor
        if not is_sharded:
            copies *= mesh.expert_data if is_expert else mesh.data * mesh.context
        return 1 / copies


def copied_weights(policy: torch.nn.Module, *, exactly: bool) -> list[CopiedWeights]:
    """See TrainBackend.copied.

    exactly: whether kernels are deterministic. Where they are not, tensor ranks compute the
    gradients of norms each for itself, with another rounding.
    """
    from megatron.core import parallel_state

    replicas: list[HeldTensor] = []
    of_experts: list[HeldTensor] = []
    whole: list[HeldTensor] = []
    embeddings: list[HeldTensor] = []
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        tensor = HeldTensor(name, _flat(parameter))
        if not getattr(parameter, "allreduce", True):
            of_experts.append(tensor)
            continue
        replicas.append(tensor)
        if not getattr(parameter, "tensor_model_parallel", False):
            whole.append(tensor)
        if getattr(parameter, "shared_embedding", False):
            embeddings.append(tensor)
    replica_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    copies = [CopiedWeights(replica_group, "replicas", replicas)]
    if of_experts:
        group = parallel_state.get_expert_data_parallel_group()
        copies.append(CopiedWeights(group, "copies of experts", of_experts))
    if exactly:
        group = parallel_state.get_tensor_model_parallel_group()
        copies.append(CopiedWeights(group, "tensor-parallel ranks", whole))
    if embeddings:
        group = parallel_state.get_embedding_group()
        copies.append(CopiedWeights(group, "first and last stages", embeddings))
    return [part for part in copies if part.tensors and part.group.size() > 1]


@dataclass(frozen=True, eq=False)
class _Memory:
    """The part of a parameter that this rank steps, as Megatron keeps it. owner: the optimizer of
    torch that has its moments.
    """

    weights: torch.Tensor
    model: torch.Tensor | None
    gradient: torch.Tensor
    owner: Any
    settings: Mapping[str, Any]

    @classmethod
    def empty(cls, parameter: torch.Tensor) -> _Memory:
        nothing = parameter.new_empty(0, dtype=torch.float32)
        return cls(nothing, None, nothing, None, {"lr": math.nan, "weight_decay": math.nan})


@dataclass(frozen=True, eq=False)
class _SteppedPart:
    """A parameter and its memory; the rest is as SteppedTensor's."""

    name: str
    dimensions: int
    memory: _Memory
    may_be_zero: bool
    share: float

    def tensor(self) -> SteppedTensor:
        memory = self.memory
        state = {} if memory.owner is None else memory.owner.state.get(memory.weights, {})
        return SteppedTensor(
            name=self.name,
            dimensions=self.dimensions,
            weights=_flat(memory.weights),
            model=_flat(memory.model),
            gradient=memory.gradient,
            mean=_flat(state.get("exp_avg")),
            square=_flat(state.get("exp_avg_sq")),
            settings=memory.settings,
            may_be_zero=self.may_be_zero,
            share=self.share,
        )


def _memory_of(part: Any) -> dict[torch.Tensor, _Memory]:
    """Returns the memory of each parameter in one of Megatron's optimizers: the distributed one, or
    one of whole parameters in bf16 or fp32.
    """
    settings = {
        id(weights): group for group in part.optimizer.param_groups for weights in group["params"]
    }
    whole: Iterable[tuple[torch.Tensor, torch.Tensor]]
    is_sharded = hasattr(part, "model_float16_groups")
    if is_sharded:
        narrow = (
            part.model_float16_groups,
            part.shard_float16_groups,
            part.shard_fp32_from_float16_groups,
        )
        whole = zip(chain(*part.model_fp32_groups), chain(*part.shard_fp32_groups), strict=True)
    elif hasattr(part, "float16_groups"):
        narrow = (part.float16_groups, part.float16_groups, part.fp32_from_float16_groups)
        whole = ((parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups))
    else:
        narrow = ((), (), ())
        whole = (
            (parameter, parameter)
            for group in part.optimizer.param_groups
            for parameter in group["params"]
        )
    rows = [*zip(*(chain(*groups) for groups in narrow), strict=True)]
    rows += [(parameter, None, weights) for parameter, weights in whole]
    memory = {}
    for parameter, model, weights in rows:
        gradient = parameter.main_grad.view(-1)
        if is_sharded:
            place = part._get_model_param_range_map(parameter)["param"]
            gradient = gradient[place.start : place.end]
        memory[parameter] = _Memory(weights, model, gradient, part.optimizer, settings[id(weights)])
    return memory


@overload
def _flat(tensor: torch.Tensor) -> torch.Tensor: ...


@overload
def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None: ...


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the same memory in one dimension, without gradient; shards mostly are that already."""
    if tensor is None or (tensor.dim() == 1 and not tensor.requires_grad):
        return tensor
    return tensor.detach().view(-1)
