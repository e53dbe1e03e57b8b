"""Gradients of sharded weights: their counted sum over shards (invariant I7), their norm over all ranks, and AdamW in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pa_npu.algorithm.update_sums import SAMPLED_EVERY, ReducedGradient
from pa_npu.backends.optimizer import learning_rate
from pa_npu.backends.protocol import StepOptions, SteppedTensor
from pa_npu.config.schema import Config

_MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_MIXTURES = (".experts.", ".gate.", ".router.")  # of which a part may get no token
# of a group's samples, kept on the device until they are summed up
_MAX_KEPT_ELEMENTS = 2**20
# How a reduction is looked at (CountedReduceScatter): so many runs of so many elements, a cache
# line in fp32, of a chunk that is at least SAMPLED_EVERY times as large; and every so manieth
# reduction of an update in single elements.
_RUNS = 64
_RUN = 16
_FINE_EVERY = 16
# By this share of the distance between them the runs move from reduction to reduction, so that they
# never come back to the same place: the golden section.
_MOVE = (5**0.5 - 1) / 2
# named so from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ShardedAdamW:
    """The optimizer of one rank. Weights of one dimension, norms and biases, are not decayed.

    summed_in: type in which squares are summed for the norm; HCCL sums no fp64.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], config: Config, summed_in: torch.dtype
    ) -> None:
        options = config.optimizer
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config = config
        self._summed_in = summed_in
        self.updates = 0
        groups = [
            {
                "params": [p for p in self._parameters if p.dim() > 1],
                "weight_decay": options.weight_decay,
            },
            {"params": [p for p in self._parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.epsilon,
            foreach=True,
        )
        # made now, so that every checkpoint holds it and every one can be loaded
        for parameter in self._parameters:
            moments = {name: torch.zeros_like(parameter.detach()) for name in _MOMENTS}
            self.adamw.state[parameter] = {"step": torch.zeros(()), **moments}

    @torch.no_grad()
    def moments(self) -> list[torch.Tensor]:
        """This rank's shards of them."""
        return [local(state[name]) for state in self.adamw.state.values() for name in _MOMENTS]

    def resume(self, updates: int) -> None:
        """Go on after so many updates; the moments are loaded elsewhere."""
        self.updates = updates
        for state in self.adamw.state.values():
            state["step"].fill_(updates)

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def gradient_size(self, first: int = 0, every: int = SAMPLED_EVERY) -> torch.Tensor:
        """Returns the norm of a sample of this rank's shards of the gradient; 0 where there is
        none.
        """
        samples = [gradient.flatten()[first::every] for gradient in self._gradients()]
        return torch.nn.utils.get_total_norm([sample for sample in samples if len(sample)])

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    @torch.no_grad()
    def step(
        self, shard_group: dist.ProcessGroup | None, options: StepOptions | None = None
    ) -> tuple[float, float]:
        """Clip and apply; shard_group: ranks whose shards make the whole. options: of this step
        alone; None takes the configuration's.

        Returns (gradient norm before clipping, learning rate).
        """
        if options is not None:
            self.resume(options.updates)
            for group in self.adamw.param_groups:
                group["betas"] = options.betas
                group["eps"] = options.epsilon
                group["weight_decay"] = options.weight_decay
        squares = [gradient.to(self._summed_in).square().sum() for gradient in self._gradients()]
        total = torch.stack(squares).sum()
        if shard_group is not None:
            dist.all_reduce(total, group=shard_group)
        norm = math.sqrt(float(total.item()))
        largest = self._config.optimizer.clip_grad if options is None else options.clip_norm
        if largest and largest / (norm + 1e-6) < 1.0:
            self.scale_gradients(largest / (norm + 1e-6))
        self.updates += 1
        rate = learning_rate(self._config, self.updates)
        if options is not None:
            rate = options.learning_rate
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            self.adamw.step()
        return norm, rate

    @torch.no_grad()
    def stepped(
        self, names: Mapping[torch.Tensor, str], has_experts: bool, copies: int
    ) -> list[SteppedTensor]:
        """See TrainBackend.stepped. names: of all parameters. copies: of the shards."""
        settings = {
            parameter: group for group in self.adamw.param_groups for parameter in group["params"]
        }
        tensors = []
        for parameter in self._parameters:
            state, name = self.adamw.state[parameter], names[parameter]
            gradient = None if parameter.grad is None else local(parameter.grad).flatten()
            tensors.append(
                SteppedTensor(
                    name=name,
                    dimensions=parameter.dim(),
                    weights=local(parameter).flatten().detach(),
                    model=None,
                    gradient=gradient,
                    mean=local(state["exp_avg"]).flatten(),
                    square=local(state["exp_avg_sq"]).flatten(),
                    settings=settings[parameter],
                    may_be_zero=has_experts and any(part in name for part in _OF_MIXTURES),
                    share=1 / copies,
                )
            )
        return tensors

    def _gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self._parameters if p.grad is not None]


class CountedReduceScatter:
    """FSDP2's reduce-scatter of one group of parameters; torch's `ReduceScatter` interface. Until
    `restart` it counts a sample of what every rank brings to the sum and of what is left.

    copies: replicas of the shards, over which FSDP2 sums what was scattered. `on_reduced` is its
    hook behind both. summed_in: the type of the counts.

    The hook runs for every group of every microbatch, when no cache holds its memory or its code
    any more, so that what it costs is the number of cache lines that it touches. Every reduction is
    looked at in short runs, which begin elsewhere each time; the update's first one, and every
    _FINE_EVERY-th from there on, in one element of SAMPLED_EVERY, between which no neighbours are
    lost. Elements are copied, and summed up at the update's end, or earlier where they are many.
    """

    def __init__(self, copies: int, summed_in: torch.dtype = torch.float32) -> None:
        self._copies, self._summed_in = copies, summed_in
        self.first = 0
        """The first element of a sample."""
        self._input: torch.Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Begin another update."""
        self._num_reductions = 0
        self._samples: list[torch.Tensor] = []
        self._num_kept_elements = 0
        self._counts: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for the input, then for the output."""
        memory = torch.empty(*size, dtype=dtype, device=device)
        self._input = memory if self._input is None else self._input
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        _reduce_scatter(output_tensor, input_tensor, group=group, op=op)

    def on_reduced(self, reduced: torch.Tensor) -> None:
        brought, self._input = self._input, None
        assert brought is not None, "its memory was allocated here"
        chunk = len(reduced)
        num_chunks = brought.numel() // chunk
        first, runs, distance, length = self._next_runs(chunk)
        # of every rank's chunk the elements that this rank looks at in its own, once it is reduced
        before = brought.as_strided(
            (num_chunks, runs, length), (chunk, distance, 1), brought.storage_offset() + first
        )
        after = reduced.as_strided(
            (1, runs, length), (chunk, distance, 1), reduced.storage_offset() + first
        )
        sample = torch.cat((before, after))
        self._samples.append(sample)
        self._num_kept_elements += sample.numel()
        if self._num_kept_elements > _MAX_KEPT_ELEMENTS:
            self._sum_up()

    def _next_runs(self, chunk: int) -> tuple[int, int, int, int]:
        """Returns the next sample of a chunk: the first element, the number of runs, the distance
        from run to run, and the elements of each.
        """
        number = self._num_reductions
        self._num_reductions += 1
        if number % _FINE_EVERY == 0 or chunk < _RUNS * _RUN * SAMPLED_EVERY:
            num_sampled = max(0, -(-(chunk - self.first) // SAMPLED_EVERY))
            return self.first, num_sampled, SAMPLED_EVERY, 1
        distance = chunk // _RUNS
        share = (self.first + number) * _MOVE % 1.0
        return int(share * (distance - _RUN + 1)), _RUNS, distance, _RUN

    def _sum_up(self) -> None:
        """Adds the samples that are kept to the counts, and forgets them."""
        flat = [sample.flatten(start_dim=1) for sample in self._samples]
        elements = torch.cat(flat, dim=1).to(self._summed_in)
        before, after = elements[:-1], elements[-1]
        counts = torch.stack([before.sum(), before.square().sum(), after.sum() / self._copies])
        self._counts = counts if self._counts is None else self._counts + counts
        self._samples, self._num_kept_elements = [], 0

    def counts(self) -> torch.Tensor:
        """[3]: the update's sums, squares and reduced of ReducedGradient; NaN where nothing was
        reduced.
        """
        if self._samples:
            self._sum_up()
        if self._counts is None:
            return torch.full((3,), torch.nan, dtype=self._summed_in)
        return self._counts


def counted(reductions: Sequence[CountedReduceScatter], device: torch.device) -> ReducedGradient:
    """Returns the update's counts, a bucket for each group of parameters."""
    columns = torch.stack([reduction.counts().to(device) for reduction in reductions], dim=1)
    return ReducedGradient(*columns)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
