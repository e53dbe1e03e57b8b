"""How far the iteration at hand is, for the bars of a terminal: read from the timelines that coordinator and trainers write."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.launcher.process.log_tail import MarkedLines
from pa_npu.telemetry.bars import Bar
from pa_npu.telemetry.progress import format_duration
from pa_npu.telemetry.timeline import DIRECTORY

_COORDINATOR, _TRAINER = "coordinator", "trainer-0"


class RunProgress:
    """Follows RUN/timeline; without timelines (telemetry.timeline=false) only the iterations are known, none of them."""

    def __init__(self, config: Config) -> None:
        directory = Path(config.run.dir) / DIRECTORY
        self._events = {name: MarkedLines(directory / f"{name}.jsonl", "{") for name in (_COORDINATOR, _TRAINER)}
        self._iterations = config.schedule.iterations
        self._groups = config.generated_groups
        # rank 0 trains its replica's share, in microbatches
        self._microbatches = config.groups_per_replica * config.microbatches_per_group
        self._packs = config.microbatch.max_tokens is not None
        self._began_s = time.monotonic()
        self._first: int | None = None
        self._iteration: int | None = None
        self._generated = 0
        self._trained = 0

    def bars(self) -> Sequence[Bar]:
        """Iterations, and of the one at hand what is generated and what is trained; nothing before the first group."""
        for event in self._new(_COORDINATOR):
            self._coordinator(event)
        for event in self._new(_TRAINER):
            self._trainer(event)
        if self._iteration is None or self._first is None:
            return ()
        done = self._iteration - self._first
        left = "-"
        if done:
            left = format_duration((time.monotonic() - self._began_s) / done * (self._iterations - self._iteration))
        generated = f"{self._generated}{f' of {self._groups}' if self._groups else ''} groups"
        trained = f"{self._trained}{'' if self._packs else f' of {self._microbatches}'} microbatches"
        return (
            Bar(
                "iterations", self._iteration, self._iterations, f"{self._iteration} of {self._iterations}, {left} left"
            ),
            Bar("  generation", self._generated, self._groups, generated),
            Bar("  training", self._trained, None if self._packs else self._microbatches, trained),
        )

    def _new(self, name: str) -> list[dict[str, Any]]:
        found = []
        for line in self._events[name].new():
            try:
                event = json.loads("{" + line)
            except ValueError:  # the process was killed in the middle of it
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def _coordinator(self, event: dict[str, Any]) -> None:
        lane, iteration = str(event.get("lane", "")), (event.get("args") or {}).get("iteration")
        if not lane.startswith("engine ") or not isinstance(iteration, int):
            return
        if self._iteration != iteration:
            if self._first is None:
                self._first, self._began_s = iteration, time.monotonic()
            self._iteration, self._generated = iteration, 0
        self._generated += 1

    def _trainer(self, event: dict[str, Any]) -> None:
        if event.get("lane") == "microbatches":
            self._trained += 1
        elif event.get("name") in ("iteration", "probe"):  # a probe after a publish is a microbatch too
            self._trained = 0
