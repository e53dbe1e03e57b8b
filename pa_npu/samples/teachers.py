"""The columns of teachers: which of several a token is for, and what those that engines compute say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pa_npu.algorithm.choices import CHOICE_LOGPROBS_COLUMN, CHOICES_COLUMN, SCORES_COLUMN
from pa_npu.algorithm.distillation import TEACHER_COLUMN
from pa_npu.config.schema import Config
from pa_npu.samples.columns import Column
from pa_npu.samples.types import Sample

_READ_BY = "algorithm.distill_coef"
_COLUMN = Column(TEACHER_COLUMN, "uint8", filled_by="row", read_by=_READ_BY)
_SCORES = Column(SCORES_COLUMN, "float32", filled_by="teacher", read_by=_READ_BY)


def teacher_column(config: Config) -> Column | None:
    """Returns the run's; None with one teacher or none."""
    return _COLUMN if len(config.teacher) > 1 else None


def score_columns(config: Config) -> tuple[Column, ...]:
    """Returns the columns of teachers that engines compute; none in a run without such teachers."""
    if not config.scored_teachers:
        return ()
    if config.algorithm.distill_divergence == "sampled":
        return (_SCORES,)
    count = config.algorithm.distill_top_k
    choices = Column(
        CHOICES_COLUMN, "int32", (count,), filled_by="teacher", read_by=_READ_BY, elsewhere=-1
    )
    logprobs = Column(
        CHOICE_LOGPROBS_COLUMN, "float32", (count + 1,), filled_by="teacher", read_by=_READ_BY
    )
    return (_SCORES, choices, logprobs)


def teacher_columns(config: Config) -> tuple[Column, ...]:
    """Returns all columns of the run's teachers."""
    number = teacher_column(config)
    return score_columns(config) if number is None else (number, *score_columns(config))


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


def with_columns(sample: Sample, values: Mapping[Column, npt.NDArray[np.generic]]) -> Sample:
    """Returns the sample with further columns, [T, *shape] each."""
    return replace(sample, columns={**sample.columns, **values})


def without_scores(samples: Sequence[Sample], columns: Sequence[Column]) -> list[Sample]:
    """Returns the samples with blank values of those of `columns` that they lack: no teacher is
    asked for them.
    """
    filled = []
    for sample in samples:
        blank = {
            column: column.blank(len(sample.tokens))
            for column in columns
            if column not in sample.columns
        }
        filled.append(with_columns(sample, blank) if blank else sample)
    return filled
