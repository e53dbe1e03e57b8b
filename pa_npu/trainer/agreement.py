"""Invariant I5 on a trainer rank: engine and trainer log-probs agree, judged after every publish and after every iteration.

    version 0: probe       -> plausible?      tokens of iteration 0 -> plausible? -> the run's noise, kept in RUN/noise.json
    version v: first group -> within noise?   tokens of iteration v -> within noise?

The probe of version v is the first microbatch that each replica trains: a whole group's responses, compared before anything is
learned from them, at the cost of one look at the device. Requests of its own it has where no group serves: before the first
iteration, which may begin with another model altogether, after the last one, and where groups of older versions are trained.

What is compared with what, and how often it errs, is in algorithm/agreement.py. Numbers of iterations and of probes with requests
are equal on all ranks, so that all judge alike; of its first microbatch a replica judges alone. A resumed run goes on with the
noise that the run has learned; without that file it learns it from its first iteration.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pa_npu.algorithm.agreement import DifferenceSums, Dtype, Limits, Noise, learn_noise, limits, plausible
from pa_npu.algorithm.update_sums import ProbeResult
from pa_npu.checkpoints.directories import read_meta
from pa_npu.config.schema import Config
from pa_npu.control.messages import AgreementReport
from pa_npu.control.typed import read_fields
from pa_npu.errors import DataError, InvariantViolation
from pa_npu.telemetry.record_file import attempt

logger = logging.getLogger(__name__)

NOISE_FILE = "noise.json"
# A probe has a few tokens of a few responses; before the noise is known it can show no more than another model altogether.
_PROBE_FACTOR = 10.0


class Agreement:
    """writes: whether this rank keeps the file."""

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._publish = config.publish
        self._probes = config.data_parallel if config.probe_rides else 1
        # of what computes the log-probs of the version that generated: the old policy, where there is one
        self._dtype: Dtype = config.frozen_dtype if "old" in config.frozen_models else config.model.dtype
        self._probe_dtype: Dtype = config.model.dtype
        self._file = Path(config.run.dir) / NOISE_FILE
        self._writes = writes
        self._noise = read_noise(self._file) if self._file.is_file() else None
        first = read_meta(Path(config.checkpoint.load)).version if config.checkpoint.load else 0
        if self._noise is not None and self._noise.version >= first:
            self._noise = None  # an earlier attempt's, of iterations that are trained again

    def check_probe(self, version: int, probe: ProbeResult) -> None:
        """Raises InvariantViolation where engines that have just loaded `version` compute other log-probs than the trainers.

        probe: of its own requests, or of the first microbatch that came from them.
        """
        tolerance = self._publish.probe_tolerance
        what = f"the probe after publishing version {version}"
        if tolerance is not None and not probe.difference_max <= tolerance:
            raise _disagreement(
                what, f"difference of {probe.difference_max:.4g}, more than publish.probe_tolerance = {tolerance:g}"
            )
        # K3 says nothing about a few responses
        sums, bound = probe.differences, self._limits(probe.differences, self._probe_dtype)
        if bound is None:
            return
        factor = _PROBE_FACTOR if self._noise is None else 1.0
        self._judge(what, sums, Limits(factor * bound.absolute, float("inf")))

    def check_trained(self, version: int, sums: DifferenceSums) -> AgreementReport:
        """The same for all tokens of iteration `version`, from which the noise is learned where it is not known yet.

        Sums over no tokens, as for an iteration that older weights sampled, judge nothing: then the probe alone does.
        """
        if not sums.n:
            return AgreementReport()
        bound = self._limits(sums, self._dtype)
        if bound is None:
            return AgreementReport()
        self._judge(f"training iteration {version}", sums, bound)
        if self._noise is None:
            self._learn(version, sums)
        return AgreementReport(bound.absolute, bound.k3)

    def _limits(self, sums: DifferenceSums, dtype: Dtype) -> Limits | None:
        """What is judged by now; None where the run only records."""
        margin = self._publish.noise_margin
        if margin is None:
            return None
        if self._noise is None:
            return plausible(dtype)
        return limits(self._noise, sums, margin, self._publish.false_stop_rate, self._probes)

    def _judge(self, what: str, sums: DifferenceSums, bound: Limits) -> None:
        reason = bound.broken(sums)
        if reason is None:
            return
        noise = (
            "what rounding can be (nothing has been learned yet)"
            if self._noise is None
            else f"publish.noise_margin = {self._publish.noise_margin:g} times the noise of iteration {self._noise.version}, mean "
            f"|difference| = {self._noise.absolute:.3g}"
        )
        raise _disagreement(
            what, f"{reason} over {sums.n:.0f} tokens of {sums.responses:.0f} responses: beyond {noise}"
        )

    def _learn(self, version: int, sums: DifferenceSums) -> None:
        self._noise = learn_noise(version, sums, self._dtype)
        logger.info(
            "noise between engine and trainer log-probs, from %d responses: mean |difference| %.3g, K3 %.3g",
            self._noise.responses,
            self._noise.absolute,
            self._noise.k3,
        )
        if self._writes:
            # without it a resumed run learns the noise anew
            attempt(self._file, partial(_write, self._file, self._noise))


def _write(file: Path, noise: Noise) -> None:
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(json.dumps(asdict(noise), indent=1), encoding="utf-8")
    temporary.replace(file)


def read_noise(file: Path) -> Noise:
    """Raises DataError where the file is not what a run writes."""
    try:
        noise: Noise = read_fields(Noise, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: the run's noise cannot be read ({str(error).partition(chr(10))[0]}); remove the file, and it is learned anew"
        ) from error
    return noise


def _disagreement(what: str, reason: str) -> InvariantViolation:
    return InvariantViolation(
        f"I5 agreement: in {what} engine and trainer log-probs have {reason}; the engines hold other weights than the trainers, or "
        f"compute differently (look at the publishes in the logs, then at dtype, temperature and attention backend of both)"
    )
