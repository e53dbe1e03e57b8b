"""Teachers that engines compute: each group's samples get the log-probs of the group's teacher, as columns.

    samples ──the row's teacher──> an engine of its own, or a server    beside the rewards
                                   the engine that wrote the group      behind the prompt with its hint
            <──log-probs of the tokens, and of the teacher's most likely ones──

A group is scored as soon as its responses are there. Scores follow from the tokens and the teacher
alone, so that when they come, and from which engine, changes nothing. The kinds of teachers, and how
they are known, are in scoring_teachers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from pa_npu.config.schema import Config
from pa_npu.control.tasks import gather
from pa_npu.coordinator.inputs import RunInputs
from pa_npu.coordinator.scoring_teachers import (
    EngineTeacher,
    PolicyTeacher,
    ScoringTeacher,
    ServerTeacher,
    TaughtRun,
)
from pa_npu.coordinator.teacher_witness import Witnesses
from pa_npu.data.prompts import Prompt
from pa_npu.data.teachers import teacher_number
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.protocol import Scores, Scoring
from pa_npu.environments.protocol import EnvironmentFailed
from pa_npu.samples.columns import Column
from pa_npu.samples.teachers import score_columns, with_columns, without_scores
from pa_npu.samples.types import Sample


@dataclass(eq=False, repr=False)
class Teachers:
    """The teachers of a run that engines compute.

    by_number: in the order of `teacher`, from 1; those that trainers hold are left out.
    columns: what the samples get.
    """

    config: Config
    by_number: Mapping[int, ScoringTeacher]
    columns: tuple[Column, ...]
    _iteration: int | None = field(default=None, init=False)
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def teacher_of(self, prompt: Prompt) -> ScoringTeacher | None:
        """Returns the prompt's teacher; None if trainers hold it."""
        number = 1
        if self.config.data.teacher_column is not None:
            number = teacher_number(prompt, self.config)
        return self.by_number.get(number)

    def is_session_needed(self, prompt: Prompt) -> bool:
        """Returns whether the engine that writes the group scores it."""
        return isinstance(self.teacher_of(prompt), PolicyTeacher)

    async def score(
        self,
        prompt: Prompt,
        samples: Sequence[Sample],
        *,
        iteration: int,
        label: str,
        session: GroupSession | None = None,
    ) -> list[Sample]:
        """Returns the samples of a prompt with their teacher's columns."""
        await self._begin(iteration)
        teacher = self.teacher_of(prompt)
        if teacher is None:
            return without_scores(samples, self.columns)
        for sample in samples:
            if sample.placeholders:
                raise EnvironmentFailed(
                    f"{teacher.key}: a sample of prompt {prompt.prompt_id} shows images, which a "
                    "teacher is not asked about; use rows of text, or let trainers hold the teacher"
                )
        scored = await gather([teacher.score(prompt, sample, label, session) for sample in samples])
        return [
            self._with_scores(sample, scores)
            for sample, scores in zip(samples, scored, strict=True)
        ]

    async def _begin(self, iteration: int) -> None:
        async with self._checking:
            if self._iteration == iteration:
                return
            for teacher in self.by_number.values():
                await teacher.check(iteration)
            self._iteration = iteration

    def _with_scores(self, sample: Sample, scores: Scores) -> Sample:
        arrays = (scores.logprobs, scores.choices, scores.choice_logprobs)
        values = {}
        for column, array in zip(self.columns, arrays, strict=False):
            values[column] = column.blank(len(sample.tokens))
            values[column][sample.trained] = array[sample.trained]
        return with_columns(sample, values)


async def open_teachers(
    stack: AsyncExitStack, config: Config, inputs: RunInputs
) -> tuple[Teachers | None, list[EngineTeacher | ServerTeacher]]:
    """Makes the run's teachers that engines compute, and opens their connections on `stack`.

    Returns None without any; and those that must become ready.
    """
    if not config.scored_teachers:
        return None, []
    scoring = Scoring(config.rollout.temperature, config.scored_choices)
    run = TaughtRun(config, inputs, scoring, Witnesses(config.run.dir))
    by_number: dict[int, ScoringTeacher] = {}
    need_to_be_ready: list[EngineTeacher | ServerTeacher] = []
    for number, (name, teacher) in enumerate(config.teacher.items(), start=1):
        if teacher.place == "engines":
            need_to_be_ready.append(EngineTeacher(name, run))
            by_number[number] = need_to_be_ready[-1]
        elif teacher.place == "server":
            need_to_be_ready.append(ServerTeacher(name, run))
            by_number[number] = need_to_be_ready[-1]
        elif teacher.place == "policy":
            by_number[number] = PolicyTeacher(name, run)
    for teacher_with_server in need_to_be_ready:
        await teacher_with_server.open(stack)
    return Teachers(config, by_number, score_columns(config)), need_to_be_ready
