"""Invariant I5 on a trainer rank: engine and trainer log-probs agree, judged after every publish and after every iteration.

    version v: first group -> within the limits?   tokens of iteration v -> within the limits?

Limits follow from a yardstick that no engine can move: the trainer's own rounding, measured over the first responses of the first
iteration and of every YARDSTICK_EVERY-th. Nothing is learned from engines: a fault that is there from the start is not taken for
noise, and a resumed run has nothing to remember.

The probe of version v is the first microbatch that each replica trains: a whole group's responses, compared before anything is
learned from them, at the cost of one look at the device. Requests of its own it has where no group serves: before the first
iteration, which may begin with another model altogether, after the last one, and where groups of older versions are trained. Such a
probe is its own yardstick.

Tokens of which the policy has moved on (schedule.max_staleness, or a later update without an old policy) differ by more than
rounding. They are judged by what a moving policy does not do (algorithm/agreement.py), beside a probe of an equally old version.

Numbers of iterations and of probes with requests are equal on all ranks, so that all judge alike; of its first microbatch a replica
judges alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from pa_npu.algorithm.agreement import DifferenceSums, Limits, aged_limits, limits
from pa_npu.config.schema import Config
from pa_npu.control.messages import AgreementReport
from pa_npu.errors import InvariantViolation
from pa_npu.samples.microbatch import Microbatch
from pa_npu.trainer.learner import Learner

logger = logging.getLogger(__name__)

# Iterations. A forward pass in fp32 takes a device about 16 times as long as in bf16: with 1,024 responses an iteration the
# yardstick costs 0.5% of the trainers' time.
YARDSTICK_EVERY = 32
YARDSTICK_RESPONSES = 32
# Chance per iteration that chance alone exceeds the limits at a margin of 1, which are the wider the fewer responses are compared.
FALSE_STOP_RATE = 1e-7
# Mean |d| and K3, where a device has no type wider than fp32: 7 times what fp32 against fp64 shows on models of 0.5 M parameters.
_FP32_ROUNDING = DifferenceSums(responses=64, n=64.0, nn=64.0, a=64e-6, aa=64e-12, an=64e-6, k=64e-12, kk=64e-24)


class Agreement:
    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._margin, self._rate = config.publish.noise_margin, FALSE_STOP_RATE
        self._learner = learner
        self._probes = config.mesh.data if config.probe_rides else 1
        self._yardstick: DifferenceSums | None = None
        self._measured_at = 0
        responses = config.mesh.data * config.microbatch_responses
        self._measured = -(-YARDSTICK_RESPONSES // responses)
        self._aging: deque[tuple[int, Sequence[Microbatch]]] = deque()

    def measure(self, iteration: int, first: Callable[[int], list[Microbatch]]) -> None:
        """Measure the trainer's rounding where that is due. Collective. first: gives the microbatches that are trained first."""
        due = self._yardstick is None or iteration - self._measured_at >= YARDSTICK_EVERY
        if self._margin is None or not due:
            return
        self._yardstick, self._measured_at = self._rounding(first(self._measured)), iteration
        logger.info(
            "rounding of the trainer's log-probs, from %d responses: mean |difference| %.3g, K3 %.3g",
            self._yardstick.responses,
            self._yardstick.absolute_mean,
            self._yardstick.k3_mean,
        )

    def check_requests(self, version: int, microbatches: list[Microbatch]) -> DifferenceSums:
        """Compare a probe of requests of its own. Collective. Raises InvariantViolation."""
        probe = self._learner.probe(microbatches)
        self.check_probe(version, probe, None if self._margin is None else self._rounding(microbatches))
        if self._config.schedule.max_staleness:
            self._aging.append((version, microbatches))
        return probe

    def check_probe(self, version: int, probe: DifferenceSums, yardstick: DifferenceSums | None = None) -> None:
        """Raises InvariantViolation where engines that have just loaded `version` compute other log-probs than the trainers.

        probe: of its own requests, or of the first microbatch that came from them. yardstick: of the probe's own tokens.
        """
        tolerance = self._config.publish.probe_tolerance
        what = f"the probe after publishing version {version}"
        if tolerance is not None and not probe.largest <= tolerance:
            raise _disagreement(
                what, f"difference of {probe.largest:.4g}, more than publish.probe_tolerance = {tolerance:g}"
            )
        yardstick = yardstick or self._yardstick
        if self._margin is None or yardstick is None:
            return
        bound = limits(yardstick, probe, self._margin, self._rate, self._probes)
        # K3 says nothing about a few responses
        self._judge(what, probe, Limits(bound.absolute, slope=bound.slope, strays=bound.strays), yardstick)

    def check_trained(self, iteration: int, exact: DifferenceSums, aged: DifferenceSums) -> AgreementReport:
        """The same for all tokens of `iteration`. Collective.

        exact: of tokens compared under the weights that sampled them. aged: of tokens of which the policy has moved on.
        """
        if self._margin is None:
            return AgreementReport()
        if aged.n:
            bound = aged_limits(self._reference(iteration), aged, self._margin, self._rate, self._probes)
            self._judge(f"the older tokens of training iteration {iteration}", aged, bound, None)
        if not exact.n or self._yardstick is None:
            return AgreementReport()
        bound = limits(self._yardstick, exact, self._margin, self._rate, self._probes)
        self._judge(f"training iteration {iteration}", exact, bound, self._yardstick)
        return AgreementReport(bound.absolute, bound.k3)

    def _rounding(self, microbatches: list[Microbatch]) -> DifferenceSums:
        return self._learner.rounding(microbatches) or _FP32_ROUNDING

    def _reference(self, iteration: int) -> DifferenceSums | None:
        """A probe that agreed when it was new, as old as the oldest tokens of `iteration`, under the weights of now."""
        oldest = iteration - self._config.schedule.max_staleness
        while len(self._aging) > 1 and self._aging[1][0] <= oldest:
            self._aging.popleft()
        if not self._aging or self._aging[0][0] >= iteration:
            return None
        return self._learner.probe(list(self._aging[0][1]))

    def _judge(self, what: str, sums: DifferenceSums, bound: Limits, yardstick: DifferenceSums | None) -> None:
        reason = bound.broken(sums)
        if reason is None:
            return
        beyond = (
            ""
            if yardstick is None
            else f"; publish.noise_margin = {self._margin:g} times the trainer's own rounding, "
            f"mean |difference| = {yardstick.absolute_mean:.3g}, is allowed"
        )
        raise _disagreement(what, f"{reason}, over {sums.n:.0f} tokens of {sums.responses:.0f} responses{beyond}")


def _disagreement(what: str, reason: str) -> InvariantViolation:
    return InvariantViolation(
        f"I5 agreement: in {what} engine and trainer log-probs have {reason}; the engines hold other weights than the trainers, or "
        f"compute differently (look at the publishes in the logs, then at dtype, temperature and attention backend of both)"
    )
