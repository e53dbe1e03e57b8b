"""The loss of held-out rows on a trainer rank: a forward pass over each set, at a border.

Every replica computes its share of a set's microbatches, equally many, of which the last may repeat
one that another replica counts. The coordinator cuts a set into them, by the keys that cut training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from pa_npu.algorithm.agreement_sums import (
    NUM_MAXIMA,
    NUM_SUMS,
)
from pa_npu.algorithm.model_outputs import Outputs, Targets, token_batch
from pa_npu.algorithm.registry import build_algorithm
from pa_npu.algorithm.update_sums import MetricSums
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.held_out import (
    HELD_OUT_LOSS,
    HELD_OUT_SETS,
    HeldOutLoss,
    HeldOutSet,
    get_group,
)
from pa_npu.control.milestones import Milestones
from pa_npu.samples.microbatch import Microbatch, pack
from pa_npu.samples.rollout_buffer import trained_columns
from pa_npu.samples.wire import from_bytes
from pa_npu.telemetry.timeline import Timeline
from pa_npu.trainer.learner import Learner


@dataclass(frozen=True)
class _Share:
    """This replica's microbatches of a set. counted: how many of them belong to its sum."""

    held_out: HeldOutSet
    microbatches: list[Microbatch]
    counted: int


@dataclass(eq=False, repr=False)
class HeldOutRows:
    """One rank's part of the held-out losses. Every call is collective."""

    config: Config
    learner: Learner
    channel: StoreChannel
    timeline: Timeline
    milestones: Milestones
    _shares: list[_Share] | None = field(default=None, init=False)

    def at_border(self, version: int) -> None:
        """Computes the losses of all sets if they are due, and reports them to the coordinator."""
        if not self.milestones.is_measured(version):
            return
        start_s = time.perf_counter()
        with self.timeline.span("evaluate", version=version):
            if self._shares is None:
                self._shares = self._read()
            means = {share.held_out.name: self._means(share) for share in self._shares}
        if self.learner.backend.place.rank == 0:
            losses = HeldOutLoss(means, time.perf_counter() - start_s)
            HELD_OUT_LOSS.put(self.channel, losses, version=version)

    def _read(self) -> list[_Share]:
        sets = HELD_OUT_SETS.wait(self.channel, self.config.run.startup_timeout_s).sets
        return [self._share(held_out) for held_out in sets]

    def _share(self, held_out: HeldOutSet) -> _Share:
        mesh, replica = self.config.mesh, self.learner.backend.place.replica
        numbers = list(mesh.numbers_of(replica, len(held_out.microbatches)))
        counted = len(numbers)
        # All replicas compute equally many, since a pass is collective: the first one has the most.
        num_collective = len(mesh.numbers_of(0, len(held_out.microbatches)))
        numbers += [0] * (num_collective - counted)
        microbatches = [self._microbatch(held_out, number) for number in numbers]
        return _Share(held_out, microbatches, counted)

    def _microbatch(self, held_out: HeldOutSet, number: int) -> Microbatch:
        """Returns microbatch `number` of the set, of the groups that the coordinator put into it."""
        first = sum(held_out.microbatches[:number])
        columns = trained_columns(self.config)
        groups = [
            from_bytes(get_group(self.channel, held_out.name, index), columns)
            for index in range(first, first + held_out.microbatches[number])
        ]
        return pack(groups, self.config.attention.shared_prompt, self.config.trainer.pad_multiple)

    def _means(self, share: _Share) -> dict[str, float]:
        backend, held_out = self.learner.backend, share.held_out
        algorithm = build_algorithm(self.config)
        sums = MetricSums(backend.device, algorithm.held_out_names)
        no_differences = torch.zeros(NUM_SUMS + NUM_MAXIMA, device=backend.device)
        num_done = 0

        def add(microbatch: Targets, outputs: Outputs) -> None:
            nonlocal num_done
            counts = float(num_done < share.counted)
            num_done += 1
            batch = token_batch(
                microbatch,
                outputs,
                old_logprobs=outputs.policy.values,
                weights=torch.ones_like(outputs.policy.values),
                group_size=self.config.rollout.responses_per_prompt,
            )
            named = algorithm.held_out_sums(batch)
            counted = {name: value * counts for name, value in named.items()}
            sums.add(counted, no_differences, microbatch.ages.max())

        backend.evaluate(share.microbatches, add)
        totals = sums.over_ranks(backend.reductions).sums
        count = algorithm.held_out_count(rows=held_out.rows, tokens=held_out.tokens)
        return {name: total / count for name, total in totals.items()}
