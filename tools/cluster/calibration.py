"""Costs of one configuration, and of others by what published figures say of both; without a run, these figures alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.prediction.costs import (
    Costs,
    EngineCost,
    TrainerCost,
    typical_engine,
    typical_trainer,
)
from pa_npu.planning.prediction.workload import Origin
from pa_npu.platform.typical import TypicalSpeed

# Of times by published or assumed figures: up to three times as long, or a third
# (docs/results/plan.md, Plausibility).
ESTIMATED_ERROR = 2.0


@dataclass(frozen=True)
class Calibration(Costs):
    """Costs of one configuration. delivery_s: from a group's end until trainers can take it.
    *_error: relative, of the costs.

    typical: the device that config ran on, or is thought to run on.
    """

    config: Config
    spec: ModelSpec
    typical: TypicalSpeed
    engine: EngineCost
    trainer: TrainerCost
    delivery_s: float = field()  # without the default that it has in Costs
    engine_error: float
    trainer_error: float
    origin: Origin

    def engine_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> EngineCost:
        """Cost of an engine of another configuration, model and device: changed as published
        figures are.
        """
        measured = self.engine
        over = typical_engine(self.config, self.spec, self.typical)
        wanted = typical_engine(config, spec, typical)
        return EngineCost(
            measured.step_s * wanted.step_s / over.step_s,
            measured.sequence_s * wanted.sequence_s / over.sequence_s,
            measured.context_s * wanted.context_s / over.context_s,
            measured.prompt_token_s * wanted.prompt_token_s / over.prompt_token_s,
            wanted.prefix_block,
        )

    def trainer_for(self, config: Config, spec: ModelSpec, typical: TypicalSpeed) -> TrainerCost:
        """Cost of the trainers of another configuration, model and device: changed as published
        figures are.
        """
        measured = self.trainer
        over = typical_trainer(self.config, self.spec, self.typical)
        wanted = typical_trainer(config, spec, typical)
        border_s = measured.border_s * wanted.border_s / over.border_s
        if (
            measured.border_s > over.border_s
        ):  # what it takes beyond bytes and messages goes by neither
            border_s = measured.border_s + wanted.border_s - over.border_s
        return TrainerCost(
            measured.microbatch_s * wanted.microbatch_s / over.microbatch_s,
            measured.operation_s * wanted.operation_s / over.operation_s,
            measured.step_s * wanted.step_s / over.step_s,
            max(border_s, 0.0),
        )


def published(config: Config, spec: ModelSpec, typical: TypicalSpeed) -> Calibration:
    """Without a run: all by published and assumed figures."""
    return Calibration(
        config,
        spec,
        typical,
        typical_engine(config, spec, typical),
        typical_trainer(config, spec, typical),
        0.0,
        ESTIMATED_ERROR,
        ESTIMATED_ERROR,
        "estimated",
    )
