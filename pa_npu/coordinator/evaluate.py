"""Evaluation through the engines, clients, environment and rewards of training: greedy answers and samples on named sets.

    all questions, in an order of their own ──admit──> environment on an engine ──samples──> rewards ──> Judged responses
                                     (window per engine)

What a question samples follows from the run's seed and the question, not from the weights' version,
so that two checkpoints meet the same chance. A run's evaluation either has the engines for itself
or, overlapped, gets them when an iteration has been generated, until the next weights are
published: then it ends with the questions before the first one that has no answer yet. Their order
is drawn once, so these are a random choice that does not depend on how long answers are, but for
the last few.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.control.milestones import Milestones
from pa_npu.control.tasks import TaskScope, cancel
from pa_npu.coordinator.episode import GroupGenerate, run_episode, score
from pa_npu.coordinator.record import RunRecords
from pa_npu.data.prompts import Prompt
from pa_npu.data.records import CHOICE_COLUMN
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.pool import EnginePool, Lease
from pa_npu.engines.protocol import Sampling
from pa_npu.environments.protocol import Environment, EnvironmentFailed
from pa_npu.errors import InvariantViolation, PaNpuError
from pa_npu.evaluation.results import GREEDY, SAMPLE, Judged, summarise
from pa_npu.rewards.answers import chosen_letter, extract_answer
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.seeds import group_seed
from pa_npu.samples.types import Sample
from pa_npu.telemetry.timeline import Timeline, now

# Beside all iterations of training, whose groups have seeds of their own.
_SEED_ITERATION = 2**62


@dataclass(frozen=True)
class Evaluation:
    """Answers to `planned` questions at a weight version. responses: those of complete questions.

    names: of all sets, in the configuration's order.
    """

    version: int
    responses: tuple[Judged, ...]
    questions: int
    planned: int
    seconds: float
    names: tuple[str, ...]

    def record(self, metric: str | None) -> dict[str, Any]:
        """Returns what evaluations.jsonl holds of it.

        metric: SET/NAME, whose value is `best_by`; that of `accuracy` if there is no such metric.
        `accuracy` is that of the first set, greedy where it has that.
        """
        summaries = summarise(self.responses)
        sets = {name: summaries[name] for name in self.names if name in summaries}
        first = next(iter(sets.values()))
        accuracy = next(iter(first.metrics.values())).value
        best_by = accuracy
        set_name, _, metric_name = (metric or "").partition("/")
        if set_name in sets and metric_name in sets[set_name].metrics:
            best_by = sets[set_name].metrics[metric_name].value
        return {
            "version": self.version,
            "accuracy": accuracy,
            "questions": self.questions,
            "planned": self.planned,
            "seconds": self.seconds,
            "best_by": best_by,
            "sets": {name: dataclasses.asdict(summary) for name, summary in sets.items()},
        }


@dataclass(eq=False, repr=False)
class Evaluator:
    """Evaluates versions, one at a time. sets: by name, at least one prompt each. sampling: as in
    training.
    """

    config: Config
    sets: Mapping[str, Sequence[Prompt]]
    pool: EnginePool
    environment: Environment
    rewards: RewardPool
    sampling: Sampling

    def __post_init__(self) -> None:
        if not self.sets or not all(self.sets.values()):
            raise PaNpuError(
                "evaluation: there are no held-out prompts; set data.test or evaluate.sets, or "
                "leave it out"
            )
        wishes = self.config.evaluate
        length = wishes.max_response_tokens or self.sampling.max_tokens
        plain = dataclasses.replace(
            self.sampling, logprobs=False, expert_choices=None, max_tokens=length
        )
        self._kinds = [(GREEDY, 1, dataclasses.replace(plain, temperature=0.0))]
        if wishes.samples:
            drawn = dataclasses.replace(plain, temperature=wishes.temperature, top_p=wishes.top_p)
            self._kinds.append((SAMPLE, wishes.samples, drawn))
        self._questions: list[tuple[str, int, Prompt]] = []
        for name, prompts in self.sets.items():
            order = random.Random(name).sample(range(len(prompts)), len(prompts))
            self._questions += [(name, number, prompts[number]) for number in order]
        if wishes.overlap:  # what is cut short then holds something of every set
            random.Random(len(self._questions)).shuffle(self._questions)
        self._answers: dict[int, list[Judged]] = {}
        self._start_s = 0.0

    async def evaluate(self, version: int) -> Evaluation:
        """Asks all questions, on the version that the engines hold."""
        self._answers = {}
        self._start_s = time.perf_counter()
        async with TaskScope() as scope:
            for place, (name, number, prompt) in enumerate(self._questions):
                responses = sum(count for _, count, _ in self._kinds)
                longest = max(sampling.max_tokens for _, _, sampling in self._kinds)
                lease = await self.pool.admit(
                    responses,
                    responses * (len(prompt.tokens) + longest),
                    self._window,
                    self.config.deadlines.engine_wait_s,
                )
                scope.start(
                    self._answer(place, name, number, prompt, lease, version),
                    f"evaluate {name} {number}",
                )
        return self.so_far(version)

    def so_far(self, version: int) -> Evaluation:
        """Returns what an evaluation that was begun has so far.

        It has the questions before the first that is not complete: among later ones the short
        answers, which end sooner, would be too many.
        """
        complete = next(
            (n for n in range(len(self._questions)) if n not in self._answers), len(self._questions)
        )
        responses: list[Judged] = []
        for place in range(complete):
            responses += self._answers[place]
        seconds = time.perf_counter() - self._start_s
        return Evaluation(
            version, tuple(responses), complete, len(self._questions), seconds, tuple(self.sets)
        )

    def _window(self, _: str) -> int:
        return self.config.rollout.max_num_seqs

    async def _answer(
        self, place: int, name: str, number: int, prompt: Prompt, lease: Lease, version: int
    ) -> None:
        config = self.config
        answered = []
        seed = group_seed(config.run.seed, _SEED_ITERATION, number)
        with GroupSession(
            self.pool,
            lease,
            self._window,
            deadline_s=config.rollout.request_timeout_s,
            again_deadline_s=config.deadlines.engine_wait_s,
            label=f"question {number} of {name} at version {version}",
        ) as session:
            for kind, count, sampling in self._kinds:
                generate = GroupGenerate(session, seed, sampling, prompt=prompt)
                max_tokens = config.rollout.max_response_tokens  # what engines are made for
                samples = await run_episode(
                    config, self.environment, prompt, count, generate, max_tokens
                )
                if len(samples) < count:
                    raise EnvironmentFailed(
                        f"question {number} of {name}: the environment made {len(samples)} "
                        f"samples, but {count} are evaluated; make at least as many as rollout "
                        "asks for, or evaluate fewer (evaluate.samples)"
                    )
                check_versions(samples, version, f"question {number} of {name}")
                answered.append((kind, samples))
        judged = []
        for kind, samples in answered:
            result = (await score(self.rewards, prompt, samples)).result
            assert result is not None, "a run that evaluates has rewards"
            judged += [
                Judged(
                    name=name,
                    question=prompt.prompt_id,
                    prompt=prompt.text,
                    answer=prompt.answer,
                    kind=kind,
                    number=index,
                    text=sample.text,
                    final=final_answer(sample.text, prompt),
                    correct=bool(result.correct[index]),
                    reward=float(result.total[index]),
                    tokens=sample.num_trained,
                    finished=sample.finished,
                )
                for index, sample in enumerate(samples)
            ]
        self._answers[place] = judged


def check_versions(samples: Sequence[Sample], version: int, subject: str) -> None:
    """Raises InvariantViolation where other weights than those that are evaluated wrote a token."""
    for sample in samples:
        written = sample.versions[sample.written]
        if (written != version).any():
            raise InvariantViolation(
                f"{subject}: version {int(written.max())} answered, version {version} is evaluated"
            )


def final_answer(text: str, prompt: Prompt) -> str | None:
    """Returns the answer that a response ends with, for votes; None if it has none."""
    if letters := prompt.row.get(CHOICE_COLUMN):
        return chosen_letter(text, str(letters), prompt.text)
    answer = extract_answer(text, prompt.answer, prompt.text)
    return answer.strip() if answer and answer.strip() else None


class Evaluations:
    """The points at which a run's evaluations take part in an iteration. This one evaluates
    nothing.

    Their other points are those of a guest on the engines (publication.EngineGuest).
    """

    async def before_producing(
        self, version: int, recorded: Callable[[], Awaitable[None]]
    ) -> dict[str, Any] | None:
        """Evaluates `version`, which engines hold, before anything is produced by it.

        Returns the evaluation's record; None where none is due here. recorded: waits for the record
        of the iteration before, which comes first.
        """
        return None

    def after_producing(self, version: int) -> None:
        """Engines have generated all that is due by `version`."""

    @property
    def is_running(self) -> bool:
        """Returns whether an evaluation in the background may have requests in flight."""
        return False

    async def make_way(self, version: int) -> None:
        """Ends an evaluation in the background, because `version` is about to come."""

    def engines_hold(self, version: int) -> None:
        """Nothing waits for `version`: the loop says when it is evaluated."""


@dataclass(eq=False, repr=False)
class ForegroundEvaluations(Evaluations):
    """Evaluates a version that is due while engines have nothing else to do."""

    evaluator: Evaluator
    records: RunRecords
    timeline: Timeline
    milestones: Milestones

    async def before_producing(
        self, version: int, recorded: Callable[[], Awaitable[None]]
    ) -> dict[str, Any] | None:
        if not self.is_due(version):
            return None
        await recorded()
        with self.timeline.span("evaluate", version=version):
            return self._record(await self.evaluator.evaluate(version))

    def is_due(self, version: int) -> bool:
        """Returns whether the version is evaluated: the first and the last of a run always are."""
        return self.milestones.is_measured(version)

    def _record(self, evaluation: Evaluation) -> dict[str, Any]:
        metric = self.evaluator.config.evaluate.metric
        record = {**evaluation.record(metric), "time": time.time()}
        self.records.write_evaluation(record, evaluation.responses)
        return record


@dataclass(eq=False, repr=False)
class BackgroundEvaluations(ForegroundEvaluations):
    """Evaluates a version while it is trained, with engines that have generated all that is due.

    The next weights cut an evaluation short. The last version is evaluated in the foreground.
    """

    _running: asyncio.Task[None] | None = field(default=None, init=False)

    async def before_producing(
        self, version: int, recorded: Callable[[], Awaitable[None]]
    ) -> dict[str, Any] | None:
        if version != self.milestones.last:
            return None
        return await super().before_producing(version, recorded)

    def after_producing(self, version: int) -> None:
        """Starts the evaluation of `version` where it is due."""
        if self.is_due(version):
            self._running = asyncio.create_task(
                self._whole(version), name=f"evaluation of version {version}"
            )

    @property
    def is_running(self) -> bool:
        if self._running is None:
            return False
        return not self._running.done() or self._running.exception() is not None

    async def make_way(self, version: int) -> None:
        """Gives up what is in flight; the questions that are complete count."""
        running = self._running
        self._running = None
        if running is None:
            return
        if running.done():
            return running.result()
        await cancel([running])
        evaluation = self.evaluator.so_far(version - 1)
        if evaluation.questions:
            self._record(evaluation)

    async def _whole(self, version: int) -> None:
        self._record(await self.evaluator.evaluate(version))

    def _record(self, evaluation: Evaluation) -> dict[str, Any]:
        self.timeline.complete(
            "evaluate",
            now() - evaluation.seconds,
            now(),
            "evaluation",
            version=evaluation.version,
        )
        return super()._record(evaluation)
