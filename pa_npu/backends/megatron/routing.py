"""How evenly the routers of a mixture spread an update's tokens over experts, and which experts no token has taken yet."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from pa_npu.algorithm.update_sums import Reductions
from pa_npu.backends.megatron.experts import MixtureMLP
from pa_npu.backends.protocol import Routing
from pa_npu.config.mesh import Place
from pa_npu.errors import InvariantViolation
from pa_npu.families.shape import Experts

logger = logging.getLogger(__name__)
# After so many updates each rank of a stage that publishes says which experts no token has taken.
_FIRST_UPDATES = 3
# Of the tokens that a target follows from. Engines that work lose none.
_MOST_MISSING = 0.05


class RoutingWatch:
    """The routers of a stage's policy, which note what they do in forward passes that are trained (Router.noted)."""

    def __init__(self, policy: torch.nn.Module, place: Place, experts: Experts) -> None:
        layers: Any = policy.get_submodule("decoder.layers")
        self._routers = {
            layer.layer_number - 1: layer.mlp.router for layer in layers if isinstance(layer.mlp, MixtureMLP)
        }
        self._experts, self._place, self._updates = experts, place, 0
        self._seen: torch.Tensor | int = 0  # tokens of each expert, [layers, experts]

    def take(self, reductions: Reductions, device: torch.device) -> Routing:
        """Returns the figures of the update that has ended, of all layers and tokens, and forgets them. Collective."""
        own = torch.zeros(len(self._experts.layers) + 6, device=device)
        if self._routers:
            noted = reductions.gradients(torch.stack([router.take_noted() for router in self._routers.values()]))
            counts, entropy, tokens = noted[:, :-6], noted[:, -6], noted[:, -5].clamp_min(1)
            self._seen = self._seen + counts
            places = [router.number for router in self._routers.values()]
            own[places] = counts.amax(1) / counts.mean(1).clamp_min(1e-9)
            own[-6:] = torch.stack([(entropy / tokens).sum(), (self._seen == 0).sum(), *noted[:, -4:].sum(0)])
            self._updates += 1
            if self._updates == _FIRST_UPDATES and self._place.publishes:
                self._say_untouched(self._seen == 0)
        *imbalance, entropies, untouched, changed, replayed, missing, needed = reductions.stages(own).tolist()
        layers = len(imbalance)
        by_layer = {str(layer): value for layer, value in zip(self._experts.layers, imbalance, strict=True)}
        found = Routing(sum(imbalance) / layers, max(imbalance), by_layer, entropies / layers, round(untouched))
        if not needed:
            return found
        if missing > _MOST_MISSING * needed:
            raise InvariantViolation(
                f"algorithm.router_replay: {missing / needed:.1%} of the update's tokens came without routes, more than "
                f"{_MOST_MISSING:.0%}, and were routed by the trainers; look at the engines' logs, or set router_replay to none"
            )
        return replace(
            found,
            replay_changed=changed / max(1.0, replayed),
            routes_missing=round(missing / layers),
        )

    def _say_untouched(self, untouched: torch.Tensor) -> None:
        found = {layer: own.nonzero().flatten().tolist() for layer, own in zip(self._routers, untouched, strict=True)}
        lines = [f"layer {layer}: {', '.join(map(str, experts))}" for layer, experts in found.items() if experts]
        if lines:
            logger.warning(
                "no token of the first %d updates took these experts, whose weights no log-prob has compared yet: %s",
                _FIRST_UPDATES,
                "; ".join(lines),
            )
