"""The experts that tokens go to: a layer's router, replayed choices, and an update's figures."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.algorithm.update_sums import Reductions
from pa_npu.attention import PrefixLayout
from pa_npu.attention.context import RankRows
from pa_npu.attention.stems import PathRows
from pa_npu.backends.protocol import Routing
from pa_npu.config.mesh import Place
from pa_npu.errors import InvariantViolation
from pa_npu.families.shape import Experts
from pa_npu.samples.expert_choices import EXPERT_CHOICES
from pa_npu.samples.microbatch import Microbatch

if TYPE_CHECKING:
    from pa_npu.backends.megatron.layers import AttentionContext

logger = logging.getLogger(__name__)
# After so many updates each rank of a stage that publishes reports the experts that no token has
# taken.
_FIRST_UPDATES = 3
# Share of the tokens that a target follows from. Working engines lose none.
_MAX_MISSING = 0.05


@dataclass(frozen=True)
class Replay:
    """The expert choices of all packed tokens of a microbatch.

    ids: [tokens, layers with experts, experts per token]. For a token whose ids are no experts the
    router chooses.
    leads: bool [tokens], whether a target follows from the token. Other tokens, such as the last
    one of a response, need no experts.
    """

    ids: torch.Tensor
    leads: torch.Tensor

    def in_layer(
        self, rows: slice, layer: int, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int64 [rows, experts per token], the ids in a layer, and bool [rows, 1], whether
        they are experts. layer: its number among those with experts.
        """
        ids = self.ids[rows, layer].long()
        return ids, ((ids >= 0) & (ids < num_experts)).all(-1, keepdim=True)


def replay_of(microbatch: Microbatch) -> Replay:
    """Takes the column EXPERT_CHOICES of a microbatch that has it."""
    ids = microbatch.packed[EXPERT_CHOICES]
    # devices hardly compute with uint16; ids have 15 bits, so that none becomes negative
    if ids.dtype == torch.uint16:
        ids = ids.view(torch.int16)
    layout = microbatch.layout
    if not isinstance(layout, PathRows):
        return Replay(ids, _leads(layout, microbatch.rows))
    if microbatch.is_stem:
        return Replay(ids, torch.ones(len(ids), dtype=torch.bool, device=ids.device))
    return Replay(ids, _leads(layout.layout, microbatch.rows + layout.first)[layout.first :])


def _leads(layout: PrefixLayout, rows: torch.Tensor) -> torch.Tensor:
    """Returns bool [tokens]: whether one of `rows`, from which targets are predicted, is the token
    or descends from it.
    """
    predicts = torch.zeros(layout.total, dtype=torch.int64, device=rows.device)
    predicts[rows] = 1
    until = predicts.cumsum(0)
    lengths = torch.tensor(layout.lengths, device=rows.device)
    ends = torch.tensor(layout.subtree_ends, device=rows.device)
    last = (ends - 1).repeat_interleave(lengths)
    return until[last] - until + predicts > 0


class Router(MegatronModule):
    """Gives each token its experts, in fp32: the router's own choice or, if it replays, the
    engine's, weighted by the router's own probabilities.

    The weight is [experts, hidden_size]. number: number of the layer among those with experts.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, number: int) -> None:
        super().__init__(config)
        self.experts, self.number = experts, number
        shape = (experts.count, config.hidden_size)
        # redirected to the platform's device by prepare_megatron
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._noted: torch.Tensor | None = None

    def forward(
        self, rows: torch.Tensor, context: AttentionContext | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [n, hidden] -> (gate weights fp32 [n, k], experts int64 [n, k])."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        logits = torch.mm(rows.to(wide), self.weight.to(wide).t())
        probabilities = logits.softmax(-1)
        preferred = probabilities.detach().topk(self.experts.per_token, dim=-1).indices
        chosen = preferred
        first = 0
        if self.config.sequence_parallel:
            first = len(preferred) * parallel_state.get_tensor_model_parallel_group().rank()
        replay = None if context is None else context.replay
        if replay is not None:
            expert_choices, is_recorded = replay.in_layer(
                slice(first, first + len(preferred)), self.number, self.experts.count
            )
            chosen = torch.where(is_recorded, expert_choices, preferred)
        weights = probabilities.gather(-1, chosen)
        if self.experts.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        # a recomputed forward comes twice, of which one is without gradients
        if context is None or context.balance is None or not torch.is_grad_enabled():
            return weights, chosen
        tokens = context.layout.total - context.layout.padding
        filled = min(max(tokens - first, 0), len(chosen))
        counts = torch.bincount(chosen[:filled].flatten(), minlength=self.experts.count).to(
            probabilities.dtype
        )
        replayed = counts.new_zeros(4)
        if replay is not None:
            changed = is_recorded & (expert_choices[:, :, None] != preferred[:, None, :]).all(-1)
            leads = replay.leads[first : first + len(preferred)]
            sums = [
                changed.sum(),
                is_recorded.expand_as(expert_choices).sum(),
                (leads & ~is_recorded[:, 0]).sum(),
                leads.sum(),
            ]
            replayed = torch.stack(sums).to(counts.dtype)
        self._note(counts, probabilities[:filled].detach(), replayed)
        if context.balance:
            loss = self._imbalance(probabilities[:filled], counts, context.layout)
            weights = _WithLoss.apply(weights, context.balance * loss)
        return weights, chosen

    def pop_noted(self) -> torch.Tensor:
        """Returns the sums of the trained passes since the last call, and forgets them.

        fp32 [experts + 6]: this rank's tokens of each expert, their entropy, their number; replayed
        choices that are not the router's own, replayed choices, tokens that need a route and have
        none, tokens that need one.
        """
        noted = self._noted
        self._noted = None
        if noted is None:
            return self.weight.new_zeros(self.experts.count + 6, dtype=torch.float32)
        return noted

    def _note(
        self, counts: torch.Tensor, probabilities: torch.Tensor, replayed: torch.Tensor
    ) -> None:
        entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum()
        sums = torch.cat(
            [counts, entropy[None], counts.new_full((1,), len(probabilities)), replayed]
        ).float()
        self._noted = sums if self._noted is None else self._noted + sums

    def _imbalance(
        self,
        probabilities: torch.Tensor,
        counts: torch.Tensor,
        layout: PrefixLayout | RankRows | PathRows,
    ) -> torch.Tensor:
        """Returns experts x sum_i f_i P_i, where f_i is the number of the tokens' choices that are
        expert i, and P_i the tokens' mean probability of it.

        Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6, with k choices as
        transformers' load_balancing_loss_func. With a divided sequence each rank returns the part
        of the sum that its tokens have; the counts are those of all ranks.
        """
        tokens = layout.total - layout.padding
        if self.config.sequence_parallel:
            dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
        if isinstance(layout, RankRows):
            tokens = layout.division.num_rows
            layout.sum_over_ranks(counts)
        return self.experts.count / tokens**2 * (counts * probabilities.sum(0)).sum()


class _WithLoss(torch.autograd.Function):
    """Passes `values` on unchanged, and gives a loss beside them the gradient 1 in the backward,
    whatever gradient comes to the values.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], *ctx.saved_tensors


class RoutingWatch:
    """Collects the figures of the routers of a stage's policy, which note what they do in forward
    passes that are trained (Router.pop_noted).
    """

    def __init__(self, policy: torch.nn.Module, place: Place, experts: Experts) -> None:
        layers: Any = policy.get_submodule("decoder.layers")
        self._routers = {
            layer.layer_number - 1: layer.mlp.router
            for layer in layers
            if hasattr(layer.mlp, "router")
        }
        self._experts = experts
        self._place = place
        self._updates = 0
        self._seen: torch.Tensor | int = 0  # tokens of each expert, [layers, experts]

    def forget(self) -> None:
        """Begins another update and forgets what was noted of passes that no step followed."""
        for router in self._routers.values():
            router.pop_noted()

    def pop_routing(self, reductions: Reductions, device: torch.device) -> Routing:
        """Returns the figures of the update that has ended, over all layers and tokens, and forgets
        them. Collective.

        Raises InvariantViolation if too many tokens came without expert choices.
        """
        figures = torch.zeros(len(self._experts.layers) + 6, device=device)
        if self._routers:
            noted = reductions.gradients(
                torch.stack([router.pop_noted() for router in self._routers.values()])
            )
            counts, entropy, tokens = noted[:, :-6], noted[:, -6], noted[:, -5].clamp_min(1)
            self._seen = self._seen + counts
            places = [router.number for router in self._routers.values()]
            figures[places] = counts.amax(1) / counts.mean(1).clamp_min(1e-9)
            figures[-6:] = torch.stack(
                [(entropy / tokens).sum(), (self._seen == 0).sum(), *noted[:, -4:].sum(0)]
            )
            self._updates += 1
            if self._updates == _FIRST_UPDATES and self._place.publishes:
                self._report_untouched(self._seen == 0)
        *imbalance, entropies, untouched, changed, replayed, missing, needed = reductions.stages(
            figures
        ).tolist()
        layers = len(imbalance)
        by_layer = {
            str(layer): value for layer, value in zip(self._experts.layers, imbalance, strict=True)
        }
        routing = Routing(
            sum(imbalance) / layers, max(imbalance), by_layer, entropies / layers, round(untouched)
        )
        if not needed:
            return routing
        if missing > _MAX_MISSING * needed:
            raise InvariantViolation(
                f"algorithm.router_replay: {missing / needed:.1%} of the update's tokens came "
                f"without expert choices, more than {_MAX_MISSING:.0%}, and were routed by the "
                f"trainers; "
                "look at the engines' logs, or set router_replay to none"
            )
        return replace(
            routing,
            replay_changed=changed / max(1.0, replayed),
            expert_choices_missing=round(missing / layers),
        )

    def _report_untouched(self, untouched: torch.Tensor) -> None:
        """Warns of experts that no token has taken. untouched: bool [layers, experts]."""
        lines = []
        for layer, is_untouched in zip(self._routers, untouched, strict=True):
            experts = is_untouched.nonzero().flatten().tolist()
            if experts:
                lines.append(f"layer {layer}: {', '.join(map(str, experts))}")
        if lines:
            logger.warning(
                "no token of the first %d updates took these experts, whose weights no log-prob "
                "has compared yet: %s",
                _FIRST_UPDATES,
                "; ".join(lines),
            )
