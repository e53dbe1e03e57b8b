"""The column that says which of several teachers a token is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pa_npu.algorithm.distillation import TEACHER_COLUMN
from pa_npu.config.schema import Config
from pa_npu.samples.columns import Column
from pa_npu.samples.types import Sample

_COLUMN = Column(TEACHER_COLUMN, "uint8", filled_by="row", read_by="algorithm.distill_coef")


def teacher_column(config: Config) -> Column | None:
    """Returns the run's; None with one teacher or none."""
    return _COLUMN if len(config.teacher) > 1 else None


def with_teacher(samples: Sequence[Sample], number: int) -> list[Sample]:
    """Returns the samples for the teacher of this number."""
    return [
        replace(
            sample,
            columns={
                **sample.columns,
                _COLUMN: np.where(sample.component != 0, number, 0).astype(_COLUMN.type),
            },
        )
        for sample in samples
    ]
