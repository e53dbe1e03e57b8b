"""Routers of a mixture of experts: which experts a token takes, how much each counts, and what a pass says of it.

A router is computed in fp32. Its gate weights are always those of its own logits, also where `Routing.routes` says which experts to
take (router replay), so that its gradient is that of a model forced to these experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from pa_npu.backends.megatron import parallel
from pa_npu.families.shape import Experts


@dataclass(eq=False)
class Routing:
    """One model's pass over one microbatch. It travels with the microbatch, because layers are computed again in the backward of
    recomputation, when another one is under way.

    num_tokens: of the packed sequence, without the padding behind it.
    loads: by layer, tokens that each expert was given, fp32 [experts]. entropies: by layer, the sum over tokens of the entropy of
    the router's distribution. A layer that is computed again overwrites its own.
    """

    num_tokens: int
    loads: dict[int, torch.Tensor] = field(default_factory=dict)
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)


class Router(MegatronModule):
    """Gives each token its experts. The weight is [experts, hidden_size]."""

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__(config)
        self.experts = experts
        shape = (experts.count, config.hidden_size)
        device = torch.cuda.current_device()  # redirected to the platform's device by prepare_megatron
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)

    def forward(self, rows: torch.Tensor, routing: Routing, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [n, hidden] -> (gate weights fp32 [n, k], experts int64 [n, k])."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        logits = torch.mm(rows.to(wide), self.weight.to(wide).t())
        probabilities = logits.softmax(-1)
        chosen = probabilities.detach().topk(self.experts.per_token, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if self.experts.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        self._note(routing, layer, probabilities.detach(), chosen)
        return weights, chosen

    def _note(self, routing: Routing, layer: int, probabilities: torch.Tensor, chosen: torch.Tensor) -> None:
        """Note loads and entropies of the tokens that are no padding."""
        real = self._first_rows(routing.num_tokens, len(chosen))
        loads = torch.bincount(chosen[:real].flatten(), minlength=self.experts.count)
        routing.loads[layer] = loads.float()
        routing.entropies[layer] = torch.special.entr(probabilities[:real]).sum()

    def _first_rows(self, num_tokens: int, rows: int) -> int:
        """How many of this rank's rows, a part of the sequence under sequence parallelism, are tokens."""
        if not self.config.sequence_parallel:
            return num_tokens
        return max(0, min(rows, num_tokens - rows * parallel.place().tensor))
