"""The experts of a layer, and how tokens come to them and back over the ranks that share them (expert parallelism).

    tokens [n, h] --router--> k experts each --dispatch--> rows sorted by expert --gated layers-->
    rows --combine--> tokens [n, h]

A rank holds experts.count / EP whole experts, stacked: gate and up [local, 2 x ffn, hidden], down
[local, hidden, ffn]. They are multiplied in one grouped product where the platform has it
(FusedOps.grouped_linear), else one after another. Each token's rows go to the ranks of its experts,
and their results come back.

Ranks of an expert group run through the same layers at the same time: all of them compute a
microbatch, or none does. With tensor parallelism the sequence must be divided over its ranks
(sequence_parallel), so that each token is dispatched once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.backends.megatron import parallel
from pa_npu.backends.megatron.routing import Router
from pa_npu.families.shape import Experts
from pa_npu.platform.base import FusedOps

if TYPE_CHECKING:
    from pa_npu.backends.megatron.layers import AttentionContext


class ExpertWeights(MegatronModule):
    """This rank's experts.

    Their gradients are summed over the ranks that hold the same ones, not over replicas.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, ops: FusedOps) -> None:
        super().__init__(config)
        self.ops = ops
        self.num_local = experts.count // parallel.place().mesh.expert
        self.gate_up = self._parameter(self.num_local, 2 * experts.ffn_size, config.hidden_size)
        self.down = self._parameter(self.num_local, config.hidden_size, experts.ffn_size)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """rows [n, hidden], sorted by expert, counts[i] of them for expert i -> [n, hidden]."""
        inner = self.ops.swiglu(self.ops.grouped_linear(rows, self.gate_up, counts))
        return self.ops.grouped_linear(inner, self.down, counts)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Experts in order along the first dimension, so that another number of ranks finds its
        own.
        """
        place = parallel.place()
        part = len(sharded_offsets), place.coordinate("expert"), place.mesh.expert
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                part,
                replica_id=(0, 0, place.coordinate("expert_data")),
                prepend_axis_num=len(sharded_offsets),
            )
            for name, weight in self.state_dict(keep_vars=True).items()
        }

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight: Any = torch.nn.Parameter(
            torch.empty(shape, dtype=self.config.params_dtype, device=device)
        )
        weight.allreduce = False  # Megatron's word for: of expert parallelism
        # no tensor-parallel rank holds a copy, so that the gradient norm counts all
        weight.tensor_model_parallel = True
        return weight


class MixtureMLP(MegatronModule):
    """The module in the place of a layer's feed-forward part."""

    def __init__(
        self, config: TransformerConfig, experts: Experts, number: int, ops: FusedOps
    ) -> None:
        """number: of its layer among those with experts."""
        super().__init__(config)
        self.router = Router(config, experts, number)
        self.experts = ExpertWeights(config, experts, ops)
        self._dispatch = _all_to_all if parallel.place().mesh.expert > 1 else _local
        self.context: AttentionContext | None = None

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        rows = hidden_states.squeeze(1)
        weights, chosen = self.router(rows, self.context)
        return self._dispatch(rows, weights, chosen, self.experts).unsqueeze(1), None


def _local(
    rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Returns the output of the experts, all of which are on this rank."""
    order, counts = _by_expert(chosen.flatten(), experts.num_local)
    results = experts(_Spread.apply(rows, order, chosen.shape[1]), counts.tolist())
    return _combine(results, weights, order)


def _all_to_all(
    rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    group, ranks = parallel_state.get_expert_model_parallel_group(), parallel.place().mesh.expert
    order, counts = _by_expert(chosen.flatten(), ranks * experts.num_local)
    sent = counts.view(ranks, experts.num_local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_rows, received_rows = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = all_to_all(
        group, _Spread.apply(rows, order, chosen.shape[1]), received_rows, sent_rows
    )
    # rank after rank, and within a rank's expert after expert
    owners = (
        torch.arange(experts.num_local, device=rows.device)
        .repeat(ranks)
        .repeat_interleave(received.flatten())
    )
    local_order, local_counts = _by_expert(owners, experts.num_local)
    results = experts(_Spread.apply(arrived, local_order, 1), local_counts.tolist())
    back = all_to_all(
        group, _Spread.apply(results, _inverse(local_order), 1), sent_rows, received_rows
    )
    return _combine(back, weights, order)


def _by_expert(owners: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the order that sorts entries by owner, how many each of `num` owners has)."""
    return owners.argsort(stable=True), torch.bincount(owners, minlength=num)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _combine(results: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """results [n * k, hidden] in the order of dispatch, weights [n, k] -> [n, hidden], summed in
    the weights' type.
    """
    by_token = _Spread.apply(results, _inverse(order), 1).view(*weights.shape, -1)
    return torch.mul(by_token, weights.unsqueeze(-1)).sum(1).to(results.dtype)


class _Spread(torch.autograd.Function):
    """Row order[i] // copies of the rows, for every i.

    Its backward gathers too, so that sums have one order.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return rows.index_select(
            0, torch.div(order, copies, rounding_mode="floor") if copies > 1 else order
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        gathered = grads[0].index_select(0, _inverse(order))
        return (
            gathered.view(-1, ctx.copies, gathered.shape[-1]).sum(1)
            if ctx.copies > 1
            else gathered,
            None,
            None,
        )
