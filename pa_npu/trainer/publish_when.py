"""Whether a version is published at all (publish.divergence): engines keep theirs while it is near the trainers' policy.

    publish of version e ──> probe: responses that e sampled, and their log-probs
    border of version v  ──> KL(e || v) over the probe, by K3, under the weights that train now
                             below publish.divergence: engines keep e, the trainers go on

Published in any case: the first and the last version, one that is evaluated or saved (so that a run that continues from it does
what the one that was not interrupted does), and one without which tokens would be older than schedule.max_staleness. Not
published in any other case: one by which nothing is generated any more. All ranks decide alike, and from numbers that do not
depend on time or on which engines serve.

The idea is that of adaptive actor policy synchronisation: ClusterEnv, arXiv 2507.10990.
"""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.config.schema import Config
from pa_npu.control.freshness import Freshness
from pa_npu.control.messages import DivergenceReport
from pa_npu.samples.microbatch import Microbatch
from pa_npu.trainer.learner import Learner


class PublishWhen:
    """One rank's. Every public method is called by all ranks in the same order; `decide` is collective."""

    def __init__(self, config: Config, learner: Learner) -> None:
        self._config = config
        self._learner = learner
        self._freshness = Freshness.of(config)
        self._published: int | None = None  # by this process
        self._probe: Sequence[Microbatch] = ()

    def published(self, version: int, probe: Sequence[Microbatch]) -> None:
        """Engines hold `version`, and have sampled `probe` by it."""
        self._published, self._probe = version, probe

    def decide(self, version: int) -> DivergenceReport:
        """Decides whether to publish `version`, which the policy holds now. An empty report if every version is published."""
        if self._config.publish.divergence is None:
            return DivergenceReport()
        kl = self._learner.probe(list(self._probe)).differences.k3_mean if self._probe else None
        return DivergenceReport(kl, self._skips(version, kl))

    def _skips(self, version: int, kl: float | None) -> bool:
        if self._published is None or kl is None or self._config.always_publishes(version):
            return False
        if version + self._freshness.iterations_ahead >= self._config.schedule.iterations:
            return True  # nothing is left to generate
        near = kl < (self._config.publish.divergence or 0.0)
        return near and self._freshness.may_skip(version, self._published)
