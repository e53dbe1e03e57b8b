"""Which experts tokens go to: a layer's router, replayed routes (algorithm.router_replay=rollout), an update's figures."""

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
from pa_npu.backends.protocol import Routing
from pa_npu.config.mesh import Place
from pa_npu.errors import InvariantViolation
from pa_npu.families.shape import Experts
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.routes import ROUTES

if TYPE_CHECKING:
    from pa_npu.backends.megatron.layers import AttentionContext

logger = logging.getLogger(__name__)
# After so many updates each rank of a stage that publishes says which experts no token has taken.
_FIRST_UPDATES = 3
# Of the tokens that a target follows from. Engines that work lose none.
_MOST_MISSING = 0.05


@dataclass(frozen=True)
class Replay:
    """A microbatch's routes in all its packed tokens.

    ids: [tokens, layers with experts, experts per token]; a token whose ids are no experts has
    none, and the router chooses.
    leads: bool [tokens], whether a target follows from the token. The others, such as a response's
    last one, need no route.
    """

    ids: torch.Tensor
    leads: torch.Tensor

    def of_rows(
        self, rows: slice, layer: int, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [rows, experts per token] in the layer with this number among those with
        experts, known bool [rows, 1]).
        """
        ids = self.ids[rows, layer].long()
        return ids, ((ids >= 0) & (ids < num_experts)).all(-1, keepdim=True)


def replay_of(microbatch: Microbatch) -> Replay:
    """Takes the column ROUTES of a microbatch that has it."""
    ids = microbatch.packed[ROUTES]
    # which devices hardly compute with; ids have 15 bits, and none becomes negative
    if ids.dtype == torch.uint16:
        ids = ids.view(torch.int16)
    return Replay(ids, _leads(microbatch.layout, microbatch.rows))


def _leads(layout: PrefixLayout, rows: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: whether one of `rows`, from which targets are predicted, is the token or
    descends from it.
    """
    predicts = torch.zeros(layout.total, dtype=torch.int64, device=rows.device)
    predicts[rows] = 1
    until = predicts.cumsum(0)
    lengths, ends = (
        torch.tensor(values, device=rows.device) for values in (layout.lengths, layout.subtree_ends)
    )
    last = (ends - 1).repeat_interleave(lengths)
    return until[last] - until + predicts > 0


class Router(MegatronModule):
    """Gives each token its experts, in fp32: its own choice, or where it replays the engine's,
    weighted by its own probabilities.

    The weight is [experts, hidden_size]. number: of its layer among those with experts.
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
        own = chosen = probabilities.detach().topk(self.experts.per_token, dim=-1).indices
        first = (
            len(own) * parallel_state.get_tensor_model_parallel_group().rank()
            if self.config.sequence_parallel
            else 0
        )
        replay = None if context is None else context.replay
        if replay is not None:
            taken, known = replay.of_rows(
                slice(first, first + len(own)), self.number, self.experts.count
            )
            chosen = torch.where(known, taken, own)
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
            changed = known & (taken[:, :, None] != own[:, None, :]).all(-1)
            leads = replay.leads[first : first + len(own)]
            found = changed, known.expand_as(taken), leads & ~known[:, 0], leads
            replayed = torch.stack([one.sum() for one in found]).to(counts.dtype)
        self._note(counts, probabilities[:filled].detach(), replayed)
        if context.balance:
            loss = self._imbalance(probabilities[:filled], counts, tokens)
            weights = _WithLoss.apply(weights, context.balance * loss)
        return weights, chosen

    def take_noted(self) -> torch.Tensor:
        """Returns the sums of the trained passes since the last call, and forgets them, [experts +
        6]: this rank's tokens of each expert, their entropy, how many they are; replayed choices
        that are not the router's own, replayed choices, tokens that need a route and have none,
        tokens that need one."""
        noted, self._noted = self._noted, None
        return (
            self.weight.new_zeros(self.experts.count + 6, dtype=torch.float32)
            if noted is None
            else noted
        )

    def _note(
        self, counts: torch.Tensor, probabilities: torch.Tensor, replayed: torch.Tensor
    ) -> None:
        entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum()
        found = torch.cat(
            [counts, entropy[None], counts.new_full((1,), len(probabilities)), replayed]
        ).float()
        self._noted = found if self._noted is None else self._noted + found

    def _imbalance(
        self, probabilities: torch.Tensor, counts: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """experts x sum_i f_i P_i, where f_i is how many of its tokens' choices are expert i, and
        P_i their mean probability of it.

        Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6, with k choices as
        transformers' load_balancing_loss_func. With a divided sequence a rank's is its tokens' part
        of the sum; the counts are everyone's.
        """
        if self.config.sequence_parallel:
            dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
        return self.experts.count / tokens**2 * (counts * probabilities.sum(0)).sum()


class _WithLoss(torch.autograd.Function):
    """`values` as they are, and a loss beside them: in the backward it gets a gradient of 1,
    whatever comes to the values.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], *ctx.saved_tensors


class RoutingWatch:
    """The routers of a stage's policy, which note what they do in forward passes that are trained
    (Router.noted).
    """

    def __init__(self, policy: torch.nn.Module, place: Place, experts: Experts) -> None:
        layers: Any = policy.get_submodule("decoder.layers")
        self._routers = {
            layer.layer_number - 1: layer.mlp.router
            for layer in layers
            if hasattr(layer.mlp, "router")
        }
        self._experts, self._place, self._updates = experts, place, 0
        self._seen: torch.Tensor | int = 0  # tokens of each expert, [layers, experts]

    def forget(self) -> None:
        """Begins another update: what was noted before is of passes that were not stepped."""
        for router in self._routers.values():
            router.take_noted()

    def take(self, reductions: Reductions, device: torch.device) -> Routing:
        """Returns the figures of the update that has ended, of all layers and tokens, and forgets
        them. Collective.
        """
        own = torch.zeros(len(self._experts.layers) + 6, device=device)
        if self._routers:
            noted = reductions.gradients(
                torch.stack([router.take_noted() for router in self._routers.values()])
            )
            counts, entropy, tokens = noted[:, :-6], noted[:, -6], noted[:, -5].clamp_min(1)
            self._seen = self._seen + counts
            places = [router.number for router in self._routers.values()]
            own[places] = counts.amax(1) / counts.mean(1).clamp_min(1e-9)
            own[-6:] = torch.stack(
                [(entropy / tokens).sum(), (self._seen == 0).sum(), *noted[:, -4:].sum(0)]
            )
            self._updates += 1
            if self._updates == _FIRST_UPDATES and self._place.publishes:
                self._say_untouched(self._seen == 0)
        *imbalance, entropies, untouched, changed, replayed, missing, needed = reductions.stages(
            own
        ).tolist()
        layers = len(imbalance)
        by_layer = {
            str(layer): value for layer, value in zip(self._experts.layers, imbalance, strict=True)
        }
        found = Routing(
            sum(imbalance) / layers, max(imbalance), by_layer, entropies / layers, round(untouched)
        )
        if not needed:
            return found
        if missing > _MOST_MISSING * needed:
            raise InvariantViolation(
                f"algorithm.router_replay: {missing / needed:.1%} of the update's tokens came "
                f"without routes, more than {_MOST_MISSING:.0%}, and were routed by the trainers; "
                "look at the engines' logs, or set router_replay to none"
            )
        return replace(
            found,
            replay_changed=changed / max(1.0, replayed),
            routes_missing=round(missing / layers),
        )

    def _say_untouched(self, untouched: torch.Tensor) -> None:
        found = {
            layer: own.nonzero().flatten().tolist()
            for layer, own in zip(self._routers, untouched, strict=True)
        }
        lines = [
            f"layer {layer}: {', '.join(map(str, experts))}"
            for layer, experts in found.items()
            if experts
        ]
        if lines:
            logger.warning(
                "no token of the first %d updates took these experts, whose weights no log-prob "
                "has compared yet: %s",
                _FIRST_UPDATES,
                "; ".join(lines),
            )
