"""Devices, software and kernels of a run, as trainers and engines say them themselves, once, at the start.

Fallbacks are no errors, but nobody should have to guess: the coordinator prints these lines and keeps them in RUN/runs_on.json.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pa_npu.control.typed import Topic


@dataclass(frozen=True)
class TrainersRunOn:
    """Rank 0's. device: its kind. collectives: their backend. backend: training backend with its version.

    kernel, merge: of attention (attention/runs_on.py); fallback: why the merge is not the platform's fast one, or empty.
    """

    ranks: int
    device: str
    collectives: str
    python: str
    torch: str
    backend: str
    dtype: str
    attention: str
    kernel: str
    merge: str
    fallback: str

    def line(self) -> str:
        text = (
            f"trainers: {self.ranks} x {self.device} ({self.collectives}), {self.backend}, torch {self.torch}, "
            f"Python {self.python}, {self.dtype}; attention {self.attention} on {self.kernel}, merged by {self.merge}"
        )
        return f"{text} (fallback: {self.fallback})" if self.fallback else text


TRAINERS_RUN_ON = Topic("trainers/run_on", TrainersRunOn, "trainers: rank 0 to say what they run with")


@dataclass(frozen=True)
class EngineRunsOn:
    """One engine. name: its URL. kind: rollout.backend; version: of its software, None where it does not say. device: as
    rollout.engine_settings has it, None where that says nothing."""

    name: str
    kind: str
    version: str | None
    device: str | None = None


@dataclass(frozen=True)
class RunsOn:
    """RUN/runs_on.json."""

    trainers: TrainersRunOn
    engines: tuple[EngineRunsOn, ...]

    def lines(self) -> list[str]:
        """One of the trainers, one of each kind of engine and device."""
        kinds = Counter(
            f"{engine.kind} {engine.version or '(version unknown)'}{f' on {engine.device}' if engine.device else ''}"
            for engine in self.engines
        )
        return [self.trainers.line(), *(f"engines: {count} x {kind}" for kind, count in kinds.items())]
