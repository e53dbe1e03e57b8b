"""How far the trainers' log-probs are from the engines', and from their own in a wider type (I5)."""

from __future__ import annotations

import torch

from pa_npu.algorithm.agreement_sums import DifferenceSums
from pa_npu.algorithm.microbatch_agreement import measure
from pa_npu.algorithm.model_outputs import Outputs, Targets
from pa_npu.algorithm.update_sums import MetricSums
from pa_npu.backends.protocol import TrainBackend
from pa_npu.config.schema import Config
from pa_npu.samples.microbatch import Microbatch


class LogprobComparison:
    """The policy that one rank's backend holds. Every method is collective, and changes nothing."""

    def __init__(self, config: Config, backend: TrainBackend) -> None:
        self._config = config
        self.backend = backend

    def probe(self, microbatches: list[Microbatch]) -> DifferenceSums:
        """Returns the differences between the current policy's log-probs and the engines' for the
        same tokens, over all ranks.
        """
        sums = MetricSums(self.backend.device)

        def compare(microbatch: Targets, outputs: Outputs) -> None:
            sums.add(
                {},
                measure(microbatch, outputs.policy.values, outputs.entropy, self._config),
                microbatch.ages.max(),
            )

        self.backend.evaluate(microbatches, compare)
        return sums.over_ranks(self.backend.reductions).all

    def rounding(self, microbatches: list[Microbatch]) -> DifferenceSums | None:
        """Returns how far the trainers' log-probs are from those in a wider type, over all ranks;
        None if the device has no wider type.
        """
        sums = MetricSums(self.backend.device)
        entropies: list[torch.Tensor] = []

        def keep_entropy(microbatch: Targets, outputs: Outputs) -> None:
            entropies.append(outputs.entropy)

        def compare(microbatch: Targets, narrow: torch.Tensor, wide: torch.Tensor) -> None:
            differences = measure(microbatch, narrow, entropies.pop(0), self._config, wide)
            sums.add({}, differences, microbatch.ages.max())

        self.backend.evaluate(microbatches, keep_entropy)
        if not self.backend.rounding(microbatches, compare):
            return None
        return sums.over_ranks(self.backend.reductions).all
