"""Invariant I5 on a trainer rank: engine and trainer log-probs agree.

    after every publish of v      first group            -> within the limits?
    after every iteration v       tokens of iteration v  -> within the limits?

Limits follow from a yardstick that no engine can move: the trainer's own rounding, measured over
the first responses of the first iteration and of every YARDSTICK_EVERY-th. Nothing is learned from
engines: a fault that is there from the start is not taken for noise, and a resumed run has nothing
to remember.

Each comparison leaves a line in RUN/agreement/ with its sums, its yardstick and its limits,
whatever the verdict, so that a stop can be judged afterwards. publish.only_logged names checks that
warn and record, and end no run.

The probe of version v is the first microbatch that each replica trains: a whole group's responses,
compared before anything is learned from them, at the cost of one read from the device. A probe has
requests of its own if no group can serve: before the first iteration, which may begin with another
model altogether, after the last one, and when groups of older versions are trained. Such a probe is
its own yardstick.

Tokens that were sampled by an older policy (schedule.max_staleness, or a later update without an
old policy) differ by more than rounding. They are judged by what a moving policy does not do
(algorithm/agreement.py), together with a probe of an equally old version.

The numbers of iterations and of probes with requests are equal on all ranks, so that all judge
alike. A replica judges its first microbatch alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pa_npu.algorithm.agreement import (
    AgreementLimits,
    aged_limits,
    limits,
)
from pa_npu.algorithm.agreement_sums import (
    DifferenceSums,
)
from pa_npu.algorithm.drawn_tokens import DrawnTokens
from pa_npu.algorithm.microbatch_agreement import NUM_STRETCHES
from pa_npu.config.schema import Config
from pa_npu.control.messages import AgreementReport
from pa_npu.errors import InvariantViolation
from pa_npu.families.spec import ModelSpec
from pa_npu.publish.probes import ProbePlan
from pa_npu.samples.microbatch import Microbatch
from pa_npu.telemetry.records import RecordFile, json_line
from pa_npu.trainer.comparison import LogprobComparison
from pa_npu.trainer.learner import Learner

logger = logging.getLogger(__name__)

DIRECTORY = "agreement"  # of a run, where every comparison is recorded

# Iterations. A forward pass in fp32 takes a device about 16 times as long as in bf16: with 1,024
# responses an iteration the yardstick costs 0.5% of the trainers' time.
YARDSTICK_EVERY = 32
YARDSTICK_RESPONSES = 32
# Chance per iteration that chance alone exceeds the limits at a margin of 1, which are the wider
# the fewer responses are compared.
FALSE_STOP_RATE = 1e-7
# Environments that train every token that was drawn: what others leave out they may have chosen by
# what was drawn.
_DRAWS_ALL = ("single_turn", "tools")
# Where a device has no type wider than fp32: 7 times what fp32 against fp64 shows on models of 0.5
# M parameters.
_FP32_ROUNDING = DifferenceSums(
    responses=64,
    independent=64,
    n=64.0,
    n_squared=64.0,
    odds=64e-6,
    odds_squared=64e-12,
    odds_times_n=64e-6,
    square=64e-12,
    square_squared=64e-24,
    square_times_n=64e-12,
    weight=64.0,
    weight_squared=64.0,
)


class Agreement:
    """Judges a rank's comparisons of log-probs, and records them."""

    def __init__(
        self, config: Config, learner: Learner | LogprobComparison, probes: ProbePlan
    ) -> None:
        self._config = config
        self._margin = config.publish.noise_margin if config.rollout.has_engines else None
        self._rate = FALSE_STOP_RATE
        self._learner = learner
        self.probes_ride = probes.rides
        """Whether the first microbatch of every replica is a probe."""
        self._probes = config.mesh.data if probes.rides else 1
        self._yardstick: DifferenceSums | None = None
        self._measured_at = 0
        responses = config.mesh.data * config.microbatch_responses
        self._measured = -(-YARDSTICK_RESPONSES // responses)
        self._aging: deque[tuple[int, Sequence[Microbatch]]] = deque()
        self._drawn = DrawnTokens()
        self._vocabulary: int | None = None
        self._file: RecordFile | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def measure(self, iteration: int, first: Callable[[int], list[Microbatch]]) -> None:
        """Measures the trainer's rounding if that is due. Collective.

        first: returns the given number of microbatches that are trained first.
        """
        due = self._yardstick is None or iteration - self._measured_at >= YARDSTICK_EVERY
        if self._margin is None or not due:
            return
        yardstick = self._rounding(self._enough(first))
        if not yardstick.n:
            return  # nothing is computed in this iteration; a later one measures it
        self._yardstick, self._measured_at = yardstick, iteration
        logger.info(
            "rounding of the trainer's log-probs, from %d responses: mean |difference| %.3g, of "
            "log-odds %.3g",
            self._yardstick.responses,
            self._yardstick.absolute_mean,
            self._yardstick.odds_mean,
        )

    def check_requests(self, version: int, microbatches: list[Microbatch]) -> DifferenceSums:
        """Judges a probe with requests of its own. Collective. Raises InvariantViolation."""
        probe = self.check_alone(version, microbatches)
        if self._config.schedule.max_staleness:
            self._aging.append((version, microbatches))
        return probe

    def check_alone(self, version: int, microbatches: list[Microbatch]) -> DifferenceSums:
        """Judges a probe of which nothing is kept. Collective. Raises InvariantViolation."""
        probe = self._learner.probe(microbatches)
        yardstick = None if self._margin is None else self._rounding(microbatches)
        self.check_probe(version, probe, yardstick)
        return probe

    def check_first(self, version: int, probe: DifferenceSums, where: str) -> None:
        """Judges the first microbatch that engines sampled with `version`, or a stretch of it, as a
        probe. Raises InvariantViolation. where: of a stretch, which tokens; "" for all.
        """
        self.check_probe(version, probe, where=where)

    def check_probe(
        self,
        version: int,
        probe: DifferenceSums,
        yardstick: DifferenceSums | None = None,
        where: str = "",
    ) -> None:
        """Raises InvariantViolation if engines that have just loaded `version` compute other
        log-probs than the trainers.

        probe: differences of the probe's requests, or of the first microbatch that engines sampled.
        yardstick: rounding of the probe's own tokens; None takes the last one that was measured.
        where: which tokens of the probe, in words; "" for all.
        """
        tolerance = self._config.publish.probe_tolerance
        subject = f"the probe after publishing version {version}"
        if where:
            subject += f", {where},"
        if tolerance is not None and not probe.largest <= tolerance:
            raise _disagreement(
                subject,
                f"difference of {probe.largest:.4g}, more than publish.probe_tolerance = "
                f"{tolerance:g}",
            )
        yardstick = yardstick or self._yardstick
        if self._margin is None or yardstick is None:
            return
        tests = self._probes * (NUM_STRETCHES if where else 1)
        bound = limits(yardstick, probe, self._margin, self._rate, tests)
        # a few responses say nothing about the tail of a square
        self._judge(subject, version, probe, replace(bound, square=float("inf")), yardstick)

    def check_trained(
        self,
        iteration: int,
        exact: DifferenceSums,
        aged: DifferenceSums,
        groups: tuple[int, int] | None = None,
    ) -> AgreementReport:
        """Raises InvariantViolation if log-probs of the tokens of `iteration` disagree, or if they
        were drawn from another distribution. Collective.

        exact: differences under the weights that sampled the tokens. aged: differences of tokens
        that an older policy sampled. groups: how many groups were computed, and of how many; None
        if nobody knows how they were chosen.
        """
        if self._margin is None:
            return AgreementReport()
        if aged.n:
            bound = aged_limits(
                self._reference(iteration), aged, self._margin, self._rate, self._probes
            )
            self._judge(
                f"the older tokens of training iteration {iteration}", iteration, aged, bound, None
            )
        report = AgreementReport()
        if exact.n and self._yardstick is not None:
            bound = limits(self._yardstick, exact, self._margin, self._rate, self._probes)
            self._judge(f"training iteration {iteration}", iteration, exact, bound, self._yardstick)
            report = AgreementReport(exact.odds_mean, bound.mean, abs(exact.slope), bound.slope)
        if groups is not None and exact.drawn and self._config.environment.name in _DRAWS_ALL:
            self._judge_drawn(iteration, DrawnTokens.from_sums(exact, *groups))
        return report

    def _judge_drawn(self, iteration: int, drawn: DrawnTokens) -> None:
        """Judges the tokens of an iteration alone, and with all before them in this process. Raises
        InvariantViolation.
        """
        self._drawn += drawn
        if self._vocabulary is None:
            self._vocabulary = ModelSpec.from_config(self._config).vocab_size
        for subject, sums in (
            (f"training iteration {iteration}", drawn),
            (f"the iterations up to {iteration}", self._drawn),
        ):
            limit = sums.limit(self._vocabulary, self._rate)
            is_broken = not abs(sums.surprise) <= limit
            line = {
                "subject": f"tokens drawn in {subject}",
                "version": iteration,
                "broken": ["drawn"] if is_broken else [],
                "sums": asdict(sums),
                "limits": {"drawn": limit},
            }
            self._write(line)
            if not is_broken:
                continue
            kind = "more" if sums.surprise > 0 else "less"
            error = InvariantViolation(
                f"I5 agreement: in {subject} the engines drew {kind} likely tokens than their "
                f"log-probs say: the sum of log-probs and entropies over {sums.n:.0f} tokens is "
                f"{sums.surprise:.4g}, beyond {limit:.4g}; they sample from another distribution "
                "than they report (another temperature, greedily, from the most likely tokens "
                "alone); to go on in spite of it, publish.only_logged=[drawn]"
            )
            if "drawn" not in self._config.publish.only_logged:
                raise error
            logger.warning("%s", error)

    def _rounding(self, microbatches: list[Microbatch]) -> DifferenceSums:
        return self._learner.rounding(microbatches) or _FP32_ROUNDING

    def _reference(self, iteration: int) -> DifferenceSums | None:
        """Returns the differences, under the current weights, of a probe that agreed when it was
        new and is as old as the oldest tokens of `iteration`; None if there is none.
        """
        oldest = iteration - self._config.schedule.max_staleness
        while len(self._aging) > 1 and self._aging[1][0] <= oldest:
            self._aging.popleft()
        if not self._aging or self._aging[0][0] >= iteration:
            return None
        return self._learner.probe(list(self._aging[0][1]))

    def _judge(
        self,
        subject: str,
        version: int,
        sums: DifferenceSums,
        bound: AgreementLimits,
        yardstick: DifferenceSums | None,
    ) -> None:
        """Records the comparison. Raises InvariantViolation for the first broken limit that ends a
        run.
        """
        broken = bound.broken(sums)
        self._record(subject, version, sums, bound, yardstick, list(broken))
        for check, reason in broken.items():
            text = f"{reason}, over {sums.n:.0f} tokens of {sums.responses:.0f} responses"
            if yardstick is not None:
                text += (
                    f"; publish.noise_margin = {self._margin:g} times the trainer's own rounding, "
                    f"mean |difference| of log-odds = {yardstick.odds_mean:.3g}, is allowed"
                )
            error = _disagreement(
                subject, f"{text}; to go on in spite of it, publish.only_logged=[{check}]"
            )
            if check not in self._config.publish.only_logged:
                raise error
            logger.warning("%s", error)

    def _enough(self, first: Callable[[int], list[Microbatch]]) -> list[Microbatch]:
        """Returns so many of the microbatches that are trained first that the yardstick is of
        enough responses. Where tokens bound them, how many that takes follows from the responses.
        """
        number = self._measured
        microbatches = first(number)
        if self._config.microbatch.tokens is None:
            return microbatches
        wanted = len(self._config.mesh.numbers_of(0, YARDSTICK_RESPONSES))
        while len(microbatches) == number and sum(m.num_samples for m in microbatches) < wanted:
            number *= 2
            microbatches = first(number)
        return microbatches

    def _record(
        self,
        subject: str,
        version: int,
        sums: DifferenceSums,
        bound: AgreementLimits,
        yardstick: DifferenceSums | None,
        broken: list[str],
    ) -> None:
        """Records a comparison. The line is there even if the run stops right afterwards."""
        line = {
            "subject": subject,
            "version": version,
            "broken": broken,
            "margin": self._margin,
            "sums": asdict(sums),
            "limits": {
                name: value if value < float("inf") else None
                for name, value in asdict(bound).items()
            },
            "yardstick": None if yardstick is None else asdict(yardstick),
        }
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        """Appends a line to this replica's file, if this rank computes log-probs."""
        place = self._learner.backend.place
        if not (place.is_last_stage and place.speaks_for_stage):
            return
        if self._file is None:
            self._file = RecordFile(
                Path(self._config.run.dir) / DIRECTORY / f"replica_{place.replica:05d}.jsonl"
            )
        self._file.write(json_line(line))


def _disagreement(subject: str, reason: str) -> InvariantViolation:
    return InvariantViolation(
        f"I5 agreement: in {subject} engine and trainer log-probs have {reason}; the engines hold "
        "other weights than the trainers, or compute differently (look at the publishes in the "
        "logs, then at dtype, temperature and attention backend of both)"
    )
