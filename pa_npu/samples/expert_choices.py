"""The experts that engines chose for each token, layer by layer (algorithm.router_replay).

They are a column of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pa_npu.config.schema import Config
from pa_npu.families.shape import Experts
from pa_npu.families.spec import ModelSpec
from pa_npu.samples.columns import Column

EXPERT_CHOICES = "expert_choices"
NO_CHOICE = 2**16 - 1
"""Stands for the experts of a token without expert choices, as engines' clients see it (uint16)."""
# Numbers that a byte has for experts; its last one stands for choices that nobody recorded.
_NUM_EXPERTS_IN_A_BYTE = 255


@dataclass(frozen=True)
class ExpertChoices:
    """The expert choices of a run.

    column: [tokens, layers with experts, experts per token], experts by their numbers in the
    checkpoint. A token that nobody recorded has `elsewhere`, which is no expert, in all places.
    num_experts: experts of a layer. layers: the layers that have experts.
    """

    column: Column
    num_experts: int
    layers: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Config, spec: ModelSpec | None = None) -> ExpertChoices | None:
        """Returns the expert choices of a run that replays them, of a model with experts; or None.

        `spec`: the model's, if it has been read.
        """
        if config.algorithm.router_replay == "none":
            return None
        experts = (spec or ModelSpec.read(config.model.path)).experts
        return None if experts is None else cls.from_experts(experts)

    @classmethod
    def from_experts(cls, experts: Experts) -> ExpertChoices:
        """Returns the expert choices of a model with these experts."""
        dtype = "uint8" if experts.count <= _NUM_EXPERTS_IN_A_BYTE else "uint16"
        column = Column(
            EXPERT_CHOICES,
            dtype,
            (len(experts.layers), experts.per_token),
            filled_by="engine",
            read_by="algorithm.router_replay",
            tokens="context",
            elsewhere=int(np.iinfo(dtype).max),
        )
        return cls(column, experts.count, experts.layers)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The declaration that RunColumns.from_features collects."""
        return (self.column,)

    @property
    def max_bytes(self) -> int:
        """Largest number of bytes of a token in an answer: ids have two bytes there, and as text
        they are a third longer.
        """
        return 3 * int(np.prod(self.column.shape))
