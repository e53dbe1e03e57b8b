"""Router replay: a microbatch's tokens go to the experts that the engine sent them to (algorithm.router_replay=rollout)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pa_npu.attention import PrefixLayout
from pa_npu.samples.microbatch import Microbatch
from pa_npu.samples.routes import ROUTES


@dataclass(frozen=True)
class Replay:
    """A microbatch's routes in all its packed tokens.

    ids: [tokens, layers with experts, experts per token]; a token whose ids are no experts has none, and the router chooses.
    leads: bool [tokens], whether a target follows from the token. The others, such as a response's last one, need no route.
    """

    ids: torch.Tensor
    leads: torch.Tensor

    def of_rows(self, rows: slice, layer: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [rows, experts per token] in the layer with this number among those with experts, known bool [rows, 1])."""
        ids = self.ids[rows, layer].long()
        return ids, ((ids >= 0) & (ids < num_experts)).all(-1, keepdim=True)


def replay_of(microbatch: Microbatch) -> Replay:
    """Takes the column ROUTES of a microbatch that has it."""
    ids = microbatch.packed[ROUTES]
    if ids.dtype == torch.uint16:  # which devices hardly compute with; ids have 15 bits, and none becomes negative
        ids = ids.view(torch.int16)
    return Replay(ids, _leads(microbatch.layout, microbatch.rows))


def _leads(layout: PrefixLayout, rows: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: whether one of `rows`, from which targets are predicted, is the token or descends from it."""
    predicts = torch.zeros(layout.total, dtype=torch.int64, device=rows.device)
    predicts[rows] = 1
    until = predicts.cumsum(0)
    lengths, ends = (torch.tensor(values, device=rows.device) for values in (layout.lengths, layout.subtree_ends))
    last = (ends - 1).repeat_interleave(lengths)
    return until[last] - until + predicts > 0
