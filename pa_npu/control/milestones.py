"""Milestones: which weight versions are saved and which are evaluated, in numbers on which all processes agree."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.sections.operation import CheckpointConfig, ScheduleConfig


@dataclass(frozen=True)
class Milestones:
    """The versions of a run at which something is due.

    last: the version that the run ends with. save_every, evaluate_every: in versions; 0: never.
    """

    last: int
    save_every: int = 0
    evaluate_every: int = 0

    @classmethod
    def from_sections(
        cls, *, schedule: ScheduleConfig, checkpoint: CheckpointConfig, has_held_out: bool
    ) -> Milestones:
        """Returns the milestones of a run. has_held_out: whether there is anything to evaluate on."""
        return cls(
            last=schedule.iterations,
            save_every=checkpoint.every,
            evaluate_every=schedule.evaluate_every if has_held_out else 0,
        )

    def is_saved(self, version: int) -> bool:
        """Returns whether a checkpoint of `version` is due by checkpoint.every."""
        return self.save_every > 0 and version % self.save_every == 0

    def is_evaluated(self, version: int) -> bool:
        """Returns whether an evaluation of `version` is due by schedule.evaluate_every."""
        return self.evaluate_every > 0 and version % self.evaluate_every == 0

    def is_measured(self, version: int) -> bool:
        """Returns whether `version` is evaluated where there is anything to evaluate on: when it is
        due, and always as the first or the last one of a run.
        """
        return version in (0, self.last) or self.is_evaluated(version)
