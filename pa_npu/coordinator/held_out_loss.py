"""Evaluation of a run without engines: the trainers compute the loss of held-out rows, the coordinator records it."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pa_npu.algorithm.registry import build_algorithm
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.held_out import (
    HELD_OUT_LOSS,
    HELD_OUT_SETS,
    HeldOutSet,
    HeldOutSets,
    put_group,
)
from pa_npu.control.milestones import Milestones
from pa_npu.coordinator.evaluate import Evaluations
from pa_npu.coordinator.record import RunRecords
from pa_npu.coordinator.row_groups import group_of
from pa_npu.data.trained_sets import AnySet, groups_of_set
from pa_npu.samples.microbatch import filled, num_packed_tokens
from pa_npu.samples.rollout_buffer import run_columns
from pa_npu.samples.wire import to_bytes
from pa_npu.telemetry.timeline import Timeline


@dataclass(eq=False, repr=False)
class HeldOutLosses(Evaluations):
    """Evaluates by the loss of held-out rows. sets: by name, at least one."""

    config: Config
    channel: StoreChannel
    sets: Mapping[str, AnySet]
    records: RunRecords
    timeline: Timeline
    milestones: Milestones

    @property
    def _is_cross_entropy(self) -> bool:
        """Returns whether a set's loss is the mean surprise of a token, which has a perplexity."""
        return build_algorithm(self.config).row_is == "sequence"

    def send(self) -> None:
        """Puts all sets where the trainers find them, once."""
        known = [self._send(name, held_out) for name, held_out in self.sets.items()]
        self._known = {held_out.name: held_out for held_out in known}
        HELD_OUT_SETS.put(self.channel, HeldOutSets(tuple(known)))

    async def before_producing(
        self, version: int, recorded: Callable[[], Awaitable[None]]
    ) -> dict[str, Any] | None:
        """Waits for the trainers, which evaluate before they train; returns the record."""
        if not self.milestones.is_measured(version):
            return None
        await recorded()
        with self.timeline.span("evaluate", version=version):
            losses = await HELD_OUT_LOSS.wait_async(
                self.channel, self.config.deadlines.wait_timeout_s, version=version
            )
        sets: dict[str, dict[str, Any]] = {}
        for name, means in losses.means.items():
            known = self._known[name]
            values = dict(means)
            if self._is_cross_entropy:
                values["perplexity"] = _perplexity(means["loss"])
            sets[name] = {
                **values,
                "rows": known.rows,
                "tokens": known.tokens,
                "metrics": {metric: {"value": value} for metric, value in values.items()},
            }
        first = next(iter(sets.values()))
        record = {
            "version": version,
            **{metric: first[metric] for metric in first["metrics"]},
            "seconds": losses.seconds,
            "best_by": -self._chosen(sets),
            "sets": sets,
            "time": time.time(),
        }
        self.records.write_held_out_loss(record)
        return record

    def _chosen(self, sets: Mapping[str, Mapping[str, Any]]) -> float:
        """Returns the loss that checkpoint.keep_best goes by: of the set that evaluate.metric
        names, or the first.
        """
        name = (self.config.evaluate.metric or "").partition("/")[0]
        chosen = sets.get(name) or next(iter(sets.values()))
        return float(chosen["loss"])

    def _send(self, name: str, held_out: AnySet) -> HeldOutSet:
        algorithm = build_algorithm(self.config)
        columns = run_columns(self.config)
        # rows are packed one by one where tokens bound a microbatch
        size = self.config.microbatch_responses if self.config.microbatch.tokens is None else 1
        groups = groups_of_set(held_out, size)
        config = self.config
        sizes: list[int] = []
        for number, prompt in enumerate(groups):
            group = group_of(prompt, algorithm).group(config.run.seed, 0, number, algorithm.credit)
            put_group(self.channel, name, number, to_bytes(group, columns))
            sizes.append(num_packed_tokens(group, config.attention.shared_prompt))
        microbatches = filled(sizes, config.microbatch.budget, config.trainer.pad_multiple)
        tokens = sum(row.num_trained for row in held_out.rows)
        return HeldOutSet(name, tuple(microbatches), len(held_out.rows), tokens)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, math.log(1e300)))
