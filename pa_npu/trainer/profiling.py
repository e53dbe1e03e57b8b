"""Profiles of chosen iterations (telemetry.profile_iterations), of one rank of each pipeline stage, under RUN/profile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.platform.base import Platform

DIRECTORY = "profile"


class IterationProfiler:
    """`profiler(iteration)` is a context around the training of one iteration; it records where that was asked for."""

    def __init__(self, config: Config, platform: Platform, rank: int) -> None:
        telemetry = config.telemetry
        self._iterations = telemetry.profile_iterations if config.mesh.place(rank).publishes else ()
        self._directory = Path(config.run.dir) / DIRECTORY
        self._platform = platform
        self._rank = rank

    def __call__(self, iteration: int) -> AbstractContextManager[Any]:
        if iteration not in self._iterations:
            return nullcontext()
        return self._platform.profile(self._directory, f"iteration_{iteration:06d}_rank{self._rank}")
