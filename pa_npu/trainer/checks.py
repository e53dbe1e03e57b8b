"""Checks a trainer rank's iteration before its weights go anywhere: I2, I7 (its normalisers) and I5."""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.algorithm.agreement import DifferenceSums
from pa_npu.algorithm.objective import TrainedResponse
from pa_npu.algorithm.update_sums import ProbeResult
from pa_npu.config.schema import Config
from pa_npu.control.channel import StoreChannel
from pa_npu.control.messages import DISPATCHED, UPDATE_SIZE, AgreementReport
from pa_npu.samples.iterator import MicrobatchIterator
from pa_npu.trainer.agreement import Agreement
from pa_npu.trainer.exactly_once import check_dispatched, check_trained
from pa_npu.trainer.gradient_sum import check_normalisers


class IterationChecks:
    """replica: this rank's data-parallel replica."""

    def __init__(self, config: Config, channel: StoreChannel, agreement: Agreement, replica: int) -> None:
        self._config = config
        self._channel = channel
        self._agreement = agreement
        self._replica = replica

    def measure(self, iteration: int, microbatches: MicrobatchIterator) -> None:
        """Before anything of `iteration` is trained: what rounding can do, where that is to be measured."""
        self._agreement.measure(iteration, microbatches.first)

    def check_first(self, iteration: int, first: ProbeResult) -> None:
        """first: of this replica's first microbatch, where that is the probe of the version. Raises InvariantViolation."""
        self._agreement.check_probe(iteration, first)

    def __call__(
        self,
        iteration: int,
        trained: Sequence[TrainedResponse],
        normalisers: Sequence[float],
        exact: DifferenceSums,
        aged: DifferenceSums,
    ) -> AgreementReport:
        """trained: by this replica. normalisers: of the iteration's updates. exact, aged: Agreement.check_trained, of all
        replicas' tokens.

        Raises InvariantViolation.
        """
        # put when the last group was, so this waits for as long as the store takes
        dispatched = DISPATCHED.wait(self._channel, self._config.wait_timeout_s, iteration=iteration)
        size = self._config.groups_per_replica
        if self._config.trained_groups is None:
            size = UPDATE_SIZE.wait(self._channel, self._config.wait_timeout_s, iteration=iteration).groups
        unequal = self._config.unequal_groups and self._config.streams(iteration)
        check_dispatched(dispatched, iteration, self._config.mesh.data, size, unequal=unequal)
        check_trained(dispatched, self._replica, trained)
        check_normalisers(dispatched, normalisers, self._config)
        return self._agreement.check_trained(iteration, exact, aged)
