"""EnginesHold: what the coordinator reports about a version once the engines hold it."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.publish.messages import Probe


@dataclass(frozen=True)
class EnginesHold:
    """Reports that the engines hold a version, and how it came there.

    Times are those of time.perf_counter.

    Args:
        probe: the engines' answers; None if no probe was due.
        ready_s: when the trainers were ready to send.
        loaded_s: when all engines had loaded the version.
        compared_s: when what they got had been compared with what was sent.
        done_s: when the publish was over.
        memory: the largest peak of an engine since the previous publish; None if no engine reports
            one.
        still_s: the longest time for which an engine stood still, counted from when it had nothing
            to generate and the trainers were ready.
    """

    probe: Probe | None
    ready_s: float
    loaded_s: float
    compared_s: float
    done_s: float
    memory: MemoryPeak | None = None
    still_s: float = 0.0
