"""Findings of the checks of a run; a plan forgives what is merely not on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pa_npu.errors import UserError
from pa_npu.families.spec import ModelSpec
from pa_npu.launcher.placement import Placement
from pa_npu.platform.base import Platform

T = TypeVar("T")


@dataclass
class Findings:
    """The findings of the checks so far.

    spec: the model's shape.
    platform: None where the configured kind of device is not on this machine.
    placement: of this machine, if the run is on it alone.
    placements: of all nodes.
    device_bytes: memory of a device; None where it is not known.
    own_memory: whether devices have memory of their own; otherwise (cpu) it is the host's.
    num_rows: rows of data.train, where samples are rows; None where they were not read.
    rows: tokens of the first prompts of each dataset of data.train.
    counts: lines about what the run will train, with which a run begins.
    notes: faults that do not end a run, or that a plan forgives because they depend on this
    machine.
    """

    spec: ModelSpec | None = None
    platform: Platform | None = None
    placement: Placement | None = None
    placements: list[Placement] = field(default_factory=list)
    device_bytes: int | None = None
    own_memory: bool = True
    num_rows: int | None = None
    rows: list[npt.NDArray[np.int32]] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LocalChecks:
    """Runs checks that depend on this machine.

    forgive: what is merely absent from this machine becomes a note, as for a plan.
    """

    findings: Findings
    forgive: bool

    def run(self, check: Callable[[], T], *files: str | None) -> T | None:
        """Returns what `check` returns, or None where it failed and that is forgiven.

        files: what the check reads. If all of them are here, its failure is no absence, and is not
            forgiven.

        Raises UserError.
        """
        try:
            return check()
        except UserError as error:
            is_absence = not files or any(not Path(file).exists() for file in files if file)
            if not (self.forgive and is_absence):
                raise
            note = str(error)
            if note not in self.findings.notes:  # as of engines of several kinds
                self.findings.notes.append(note)
            return None
