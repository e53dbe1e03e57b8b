"""Context parallelism in a backend: a microbatch's part on this rank, and what models give for it joined again.

    part = parts.for_microbatch(microbatch)     this rank's rows, and the targets predicted from them
    scores = model(part.tokens, part.layout, part.rows, part.targets, ...)
    scores = part.joined(scores)                of all targets, on every rank of the context group

The objective sees all targets of the replica's microbatch on every rank of its context group, and
computes the same loss there. The gradient of a target's log-prob goes on only on the rank that
computed it, so that the weights' gradients of the group's ranks add up to that of one loss. They
are summed over context groups where they are summed over replicas.

With one rank a part is the microbatch as it is.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pa_npu.attention import PrefixLayout
from pa_npu.attention.context import ContextGroup, RankRows
from pa_npu.attention.stems import PathRows
from pa_npu.backends.logprob import RowScores
from pa_npu.config.mesh import Axis, Place
from pa_npu.platform.base import Platform
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.replica_feed import ReplicaLinks


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a microbatch that one rank computes.

    tokens: int64 [T], this rank's; its padding has token 0.
    layout: of these tokens.
    rows, targets: int64 [N], of the targets that are predicted from this rank's rows.
    own: int64 [N], which of the microbatch's targets these are; None: all of them, in order.
    num_targets: of the microbatch.
    group: None for a rank that computes whole microbatches.
    """

    tokens: torch.Tensor
    layout: PrefixLayout | RankRows | PathRows
    rows: torch.Tensor
    targets: torch.Tensor
    own: torch.Tensor | None
    num_targets: int
    group: ContextGroup | None

    def joined(self, scores: RowScores) -> RowScores:
        """Returns the scores of all targets of the microbatch. Collective over the context group."""
        if self.own is None:
            return scores
        choices = None
        if scores.choices is not None:
            choices = self._joined(scores.choices)
        choice_logprobs = None
        if scores.choice_logprobs is not None:
            choice_logprobs = self._joined(scores.choice_logprobs)
        return RowScores(
            logprobs=self._joined(scores.logprobs),
            entropy=self._joined(scores.entropy),
            choices=choices,
            choice_logprobs=choice_logprobs,
        )

    def of_targets(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the values, [N, ...] of all targets, of this rank's."""
        if values is None or self.own is None:
            return values
        return values.index_select(0, self.own)

    def of_rows(self, values: torch.Tensor, blank: float) -> torch.Tensor:
        """Returns the values, [T, ...] of the microbatch's tokens, of this rank's rows; padding has
        `blank`.
        """
        if not isinstance(self.layout, RankRows):
            return values
        rows = self.layout.row_numbers(values.device)
        of_rank = values.index_select(0, rows.clamp(max=len(values) - 1))
        of_rank[self.layout.total - self.layout.padding :] = blank
        return of_rank

    def _joined(self, values: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = _Joined.apply(values, self)
        return whole


class _Joined(torch.autograd.Function):
    """[N of this rank, ...] -> [N, ...]. Every other rank adds zeros, so that no value changes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, part: Part) -> torch.Tensor:
        assert part.own is not None and part.group is not None, "the part of a rank of several"
        ctx.own = part.own
        whole = values.new_zeros(part.num_targets, *values.shape[1:])
        whole[part.own] = values
        part.group.sum_over_ranks(whole)
        if not values.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.own), None


class Parts:
    """Makes the parts of microbatches on one rank. group: None for a rank that has none."""

    def __init__(self, group: ContextGroup | None) -> None:
        self._group = group
        self._last: tuple[Microbatch, Part] | None = None

    def for_microbatch(self, microbatch: Microbatch) -> Part:
        """Returns this rank's part; several models take the same one."""
        if self._last is not None and self._last[0] is microbatch:
            return self._last[1]
        part = self._made(microbatch)
        self._last = (microbatch, part)
        return part

    def _made(self, microbatch: Microbatch) -> Part:
        num_targets = len(microbatch.targets)
        if self._group is None:
            return Part(
                tokens=microbatch.tokens,
                layout=microbatch.layout,
                rows=microbatch.rows,
                targets=microbatch.targets,
                own=None,
                num_targets=num_targets,
                group=None,
            )
        layout = self._group.rows_of(microbatch.whole_layout)
        device = microbatch.tokens.device
        row_numbers = layout.row_numbers(device)
        tokens = microbatch.tokens.index_select(
            0, row_numbers.clamp(max=len(microbatch.tokens) - 1)
        )
        tokens[layout.total - layout.padding :] = 0
        places = layout.places(device).index_select(0, microbatch.rows)
        own = (places >= 0).nonzero().squeeze(1)
        return Part(
            tokens=tokens,
            layout=layout,
            rows=places.index_select(0, own),
            targets=microbatch.targets.index_select(0, own),
            own=own,
            num_targets=num_targets,
            group=self._group,
        )


def new_context_group(here: Place, multiple: int, timeout_s: float) -> ContextGroup | None:
    """Returns this rank's context group; None where that is one rank. A collective of all ranks.

    multiple: as ContextGroup's. timeout_s: of the group's collectives.
    """
    if here.mesh.context == 1:
        return None
    return ContextGroup(new_group_of(here, timeout_s, "context"), multiple)


def new_group_of(here: Place, timeout_s: float, *axes: Axis) -> dist.ProcessGroup:
    """Returns a new group of the ranks that differ from this one along `axes` alone. A collective
    of all ranks.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = {
        ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in here.mesh.groups(*axes)
    }
    return groups[here.group(*axes)]


def replica_links(
    here: Place, platform: Platform, device: torch.device, timeout_s: float
) -> ReplicaLinks | None:
    """Returns this rank's ReplicaLinks; None where a replica is one rank. A collective of all ranks.

    timeout_s: of the groups' collectives.
    """
    mesh = here.mesh
    if mesh.replica_size == 1:
        return None
    group_s = platform.group_timeout_s(timeout_s)
    replica = new_group_of(here, group_s, "tensor", "context", "pipeline")
    in_step = None
    if mesh.tensor * mesh.context > 1:
        in_step = new_group_of(here, group_s, "tensor", "context")
    # a communicator comes into being with its first collective: here, on all ranks, not beside
    # training's first ones
    dist.all_reduce(torch.zeros(1, device=device), group=replica)
    return ReplicaLinks(replica, in_step, mesh, platform.detached_stream)
