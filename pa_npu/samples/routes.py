"""Routes: the experts that engines sent each token to, layer by layer, as a column of the sample (algorithm.router_replay)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.families.shape import Experts
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.columns import Column

ROUTES = "routes"
NO_ROUTE = 2**16 - 1
"""Stands for the experts of a token without routes, as engines' clients see it (uint16)."""
# One value is for tokens whose routes nobody recorded.
_MOST_IN_A_BYTE = 255


@dataclass(frozen=True)
class Routes:
    """column: [tokens, layers with experts, experts per token], experts by their numbers in the
    checkpoint; `elsewhere`, which is none, stands in all places of a token that nobody recorded.
    num_experts: of a layer. layers: those that have experts."""

    column: Column
    num_experts: int
    layers: tuple[int, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The declaration that RunColumns.from_features looks for."""
        return (self.column,)

    @property
    def most_bytes(self) -> int:
        """Bytes of a token in an answer: ids have two bytes there, and a text is a third longer."""
        return 3 * int(np.prod(self.column.shape))


def routes_of(config: Config, spec: ModelSpec | None = None) -> Routes | None:
    """A run's, where its routers replay. spec: the model's, where it has been read."""
    if config.algorithm.router_replay == "none":
        return None
    experts = (spec or ModelSpec.read(config.model.path)).experts
    return None if experts is None else routes(experts)


def routes(experts: Experts) -> Routes:
    dtype = "uint8" if experts.count <= _MOST_IN_A_BYTE else "uint16"
    column = Column(
        ROUTES,
        dtype,
        (len(experts.layers), experts.per_token),
        filled_by="engine",
        read_by="algorithm.router_replay",
        tokens="context",
        elsewhere=int(np.iinfo(dtype).max),
    )
    return Routes(column, experts.count, experts.layers)
