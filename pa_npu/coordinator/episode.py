"""One prompt through the environment: what the environment writes with, the samples it makes, and their rewards.

    prompt ──Environment.rollout(generate)──> samples ──environment's rewards, or the reward functions'──> ScoredGroup

An environment's mistake is one line that names it; a failing reward function is a logged zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pa_npu.algorithm.algorithm import Algorithm, ScoredSamples, TokenValues
from pa_npu.algorithm.rules import needs_whole_groups
from pa_npu.config.schema import Config
from pa_npu.config.user_code import describe
from pa_npu.control.tasks import catch, gather
from pa_npu.coordinator.answers import Answers
from pa_npu.coordinator.images import begins_with, shows_placeholders, with_images
from pa_npu.data.prompts import Prompt
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import Environment, EnvironmentFailed, Generate
from pa_npu.environments.time_limit import ended
from pa_npu.errors import InvariantViolation, PaNpuError
from pa_npu.rewards.functions import RewardInput, RewardResult, scored_digest
from pa_npu.rewards.pool import RewardPool
from pa_npu.samples.columns import NO_VERSION
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import turn_seed
from pa_npu.samples.types import Sample, SampleRow, group_lengths
from pa_npu.vision.images import ShownImage

Credit = Callable[[ScoredSamples], TokenValues]
"""Gives each token of a group its advantage (Algorithm.credit)."""


@dataclass(eq=False)
class ScoredGroup:
    """A prompt, the samples that its environment made of it, any number from one on, their rewards,
    and what it counted.

    result: None where nothing rewards them, as rows of data.
    lengths: trained tokens of each sample. trained_as: group_lengths, prompt and lengths as
    trainers compute them. answers: what engines answered for it; None where that is not known any
    more. is_demonstration: whether it is trained beside what engines write (demonstrations.py).
    """

    prompt: Prompt
    samples: list[Sample]
    result: RewardResult | None
    counted: Mapping[str, int] = field(default_factory=dict)
    answers: Answers | None = None
    is_demonstration: bool = False

    def __post_init__(self) -> None:
        self.lengths = [sample.num_trained for sample in self.samples]
        self.trained_as = group_lengths(self.samples)

    @property
    def computed(self) -> tuple[int, tuple[int, ...]] | None:
        """GroupTiming.computed: None where samples are the prompt and a response each."""
        start, behind = self.trained_as
        return (
            None
            if (start, behind) == (len(self.prompt.tokens), self.lengths)
            else (start, tuple(behind))
        )

    @property
    def tokens(self) -> int:
        """Trained tokens of all samples."""
        return sum(self.lengths)

    @property
    def version(self) -> int:
        """The oldest weight version that generated a token; NO_VERSION where the policy wrote none."""
        oldest = [
            int(sample.versions[sample.written].min())
            for sample in self.samples
            if sample.written.any()
        ]
        return min(oldest, default=NO_VERSION)

    @property
    def is_informative(self) -> bool:
        """Returns whether its rewards differ, or it has none."""
        return self.result is None or self.result.is_informative

    @property
    def rewards(self) -> np.ndarray:
        """float32 [samples]; zeros where nothing rewards them."""
        if self.result is None:
            return np.zeros(len(self.samples), np.float32)
        return np.asarray(self.result.total, np.float32)

    @property
    def row(self) -> SampleRow:
        """The samples' arrays, one sample after another."""
        return SampleRow.from_samples(self.samples)

    @property
    def for_credit(self) -> ScoredSamples:
        """The group as the algorithm's credit sees it."""
        return self._scored(self.row)

    def _scored(self, row: SampleRow) -> ScoredSamples:
        return ScoredSamples(
            rewards=self.rewards,
            lengths=np.diff(row.ends, prepend=0).astype(np.int32),
            tokens=row.tokens,
            component=row.component,
            columns={column.name: values for column, values in row.columns.items()},
        )

    def group(
        self, run_seed: int, iteration: int, index: int, credit: Credit | None = None
    ) -> Group:
        """Returns the group that trainers get under this number. credit: gives its tokens
        advantages; None: zeros.

        Raises InvariantViolation where its samples are not what engines answered, or its rewards
        are of other texts.
        """
        row = self.row
        values = (
            np.zeros(len(row.tokens), np.float32) if credit is None else credit(self._scored(row))
        )
        identity = {
            "run_seed": run_seed,
            "iteration": iteration,
            "index": index,
            "prompt_id": self.prompt.prompt_id,
        }
        finished = [sample.finished for sample in self.samples]
        group = Group.from_row(row, finished, self.rewards, values, **identity)
        if self.answers is not None:
            self.answers.check(group)
        texts = [sample.text for sample in self.samples]
        scored_as = "" if self.result is None else self.result.scored
        if scored_as and scored_as != scored_digest(
            self.prompt.text, self.prompt.answer, texts, group.rewards.tolist()
        ):
            raise InvariantViolation(
                f"I7 rewards: {group}: its rewards {group.rewards.tolist()} were given to other "
                "texts than its samples', with another reference answer, or in another order"
            )
        return group


async def run_episode(
    config: Config,
    environment: Environment,
    prompt: Prompt,
    num_samples: int,
    generate: GroupGenerate,
    max_tokens: int,
) -> list[Sample]:
    """Returns the samples that the environment makes of a prompt, of which num_samples are asked
    for.

    most_tokens: of a sample behind its prompt.
    Errors of engines pass as they are; what else is raised becomes EnvironmentFailed. An
    environment whose class says `waits_are_bounded = True` has limits of its own.
    """
    subject = f"environment {type(environment).__name__}, prompt {prompt.prompt_id}"
    try:
        # a subclass may wait for something else
        if vars(type(environment)).get("waits_are_bounded"):
            samples = await environment.rollout(prompt, num_samples, generate)
        else:
            task = asyncio.ensure_future(
                catch(lambda: environment.rollout(prompt, num_samples, generate))
            )
            await ended(
                task, config.deadlines.environment_timeout_s * num_samples, generate.idle_s, subject
            )
            samples, failed = await task
            if failed is not None:
                raise failed
    except (PaNpuError, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an environment is users' code
        raise EnvironmentFailed(f"{subject}: {describe(error)}; correct the environment") from error
    _check(subject, samples, max_tokens)
    if prompt.images and not getattr(environment, "shows_own_images", False):
        try:
            return await with_images(prompt, samples)
        except ValueError as error:
            raise EnvironmentFailed(f"{subject}: {error}") from None
    return samples


def _check(subject: str, samples: Sequence[Sample], max_tokens: int) -> None:
    several = isinstance(samples, Sequence)
    if not several or not samples or not all([isinstance(sample, Sample) for sample in samples]):
        kinds = (
            ", ".join(sorted({type(sample).__name__ for sample in samples}))
            if several
            else type(samples).__name__
        )
        raise EnvironmentFailed(
            f"{subject}: must return samples, at least one, returned {kinds or 'nothing'}; correct "
            "rollout"
        )
    for number, sample in enumerate(samples):
        same_length = (
            len(sample.tokens)
            == len(sample.component)
            == len(sample.logprobs)
            == len(sample.versions)
        )
        if not same_length or not sample.num_trained or sample.component[0]:
            raise EnvironmentFailed(
                f"{subject}: sample {number} must have arrays of one length and trained tokens "
                "behind an untrained first one; put it together with SampleBuilder"
            )
        written = len(sample.tokens) - sample.prompt_length
        if written > max_tokens:
            raise EnvironmentFailed(
                f"{subject}: sample {number} has {written} tokens behind its prompt, more than "
                f"rollout.max_response_tokens = {max_tokens}; end it sooner"
            )


def check_size(
    config: Config, algorithm: Algorithm, prompt: Prompt, samples: Sequence[Sample]
) -> None:
    """Raises EnvironmentFailed where what compares or cuts the samples of a prompt needs another
    number of them.
    """
    size = config.rollout.responses_per_prompt
    if len(samples) != size and (needs := needs_whole_groups(config, algorithm)) is not None:
        raise EnvironmentFailed(
            f"environment.name: {config.environment.name} made {len(samples)} samples of prompt "
            f"{prompt.prompt_id}, but {needs} needs exactly rollout.responses_per_prompt = {size}; "
            "make as many, or change that key"
        )


def check_components(algorithm: Algorithm, scored: ScoredGroup) -> None:
    """Raises EnvironmentFailed where tokens are to be trained by a component that there is not, or
    that cannot train them.
    """
    why = algorithm.broken_components(scored.row.component, scored.row.versions != NO_VERSION)
    if why is not None:
        raise EnvironmentFailed(
            f"environment.name: of the samples of prompt {scored.prompt.prompt_id} {why}; put "
            "samples together with SampleBuilder, and show what the policy did not write, with a "
            "component of the algorithm's if it is to be trained"
        )


def with_components(algorithm: Algorithm, samples: list[Sample]) -> list[Sample]:
    """Returns the samples with the components that the algorithm gives their tokens."""
    if type(algorithm).token_components is Algorithm.token_components:
        return samples
    return [
        replace(
            sample,
            component=algorithm.token_components(sample.tokens, sample.component, sample.written),
        )
        for sample in samples
    ]


async def score(
    rewards: RewardPool,
    prompt: Prompt,
    samples: list[Sample],
    counted: Mapping[str, int] | None = None,
    answers: Answers | None = None,
) -> ScoredGroup:
    """Returns the samples of a prompt with their rewards: those that the environment gave, if it
    gave any.

    counted: by the environment. answers: that engines gave for them.
    """
    counted = counted or {}
    rewards_of_samples = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards_of_samples:
        return ScoredGroup(
            prompt, samples, await rewards.score(reward_input(prompt, samples)), counted, answers
        )
    total = _in_float32(rewards_of_samples)
    if len(rewards_of_samples) != len(samples) or not np.isfinite(total).all():
        raise EnvironmentFailed(
            f"environment.name: rewards {[sample.reward for sample in samples]} of the samples of "
            f"prompt {prompt.prompt_id} must be finite numbers in float32, or all None, which "
            "leaves them to the reward functions; correct the environment"
        )
    texts = [sample.text for sample in samples]
    digest = scored_digest(prompt.text, prompt.answer, texts, total.tolist())
    result = RewardResult(total, {"environment": total}, total > 0, (), scored=digest)
    return ScoredGroup(prompt, samples, result, counted, answers)


def _in_float32(rewards: Sequence[float]) -> np.ndarray:
    """Returns rewards as trainers get them: infinite beyond float32's range, NaN where one is no
    number.
    """
    try:
        with np.errstate(over="ignore"):
            return np.array([float(reward) for reward in rewards], np.float32)
    except (TypeError, ValueError, OverflowError):
        return np.full(len(rewards), np.nan, np.float32)


def reward_input(prompt: Prompt, samples: Sequence[Sample]) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        answer=prompt.answer,
        responses=[sample.text for sample in samples],
        response_tokens=[sample.num_written for sample in samples],
        row=prompt.row,
    )


@dataclass(eq=False, repr=False)
class GroupGenerate(Generate):
    """The Generate of one group. Seeds follow from the group, the sample and the turn, never from
    time or engine (I4).

    seed: the group's. answers: notes what engines answer. prompt: the group's; engines see its
    images with all tokens that begin with it.
    """

    session: GroupSession
    seed: int
    sampling: Sampling
    answers: Answers = field(default_factory=Answers)
    prompt: Prompt | None = None
    _under_way: int = field(default=0, init=False)
    _since_s: float = field(default_factory=time.monotonic, init=False)

    def idle_s(self) -> float:
        """Seconds since the policy owed an answer."""
        return 0.0 if self._under_way else time.monotonic() - self._since_s

    async def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        n: int = 1,
        sample: int = 0,
        turn: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        images: Sequence[ShownImage] | None = None,
    ) -> list[Generation]:
        if n < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"generate: n = {n} and max_tokens = {max_tokens} must be at least 1")
        limit = self.sampling.max_tokens
        sampling = replace(
            self.sampling, max_tokens=min(max_tokens or limit, limit), stop=tuple(stop)
        )
        shown = self._images_of(tokens) if images is None else images
        context = self.answers.context_of(tokens)
        self._under_way += 1
        try:
            # seeds of the first turn follow one another, so that one request gives all samples
            if turn == 0:
                first = turn_seed(self.seed, sample, 0)
                seeds = list(range(first, first + n))
                answered = await self.session.generate(tokens, n, first, sampling, shown)
            else:
                seeds = [turn_seed(self.seed, number, turn) for number in range(sample, sample + n)]
                several = await gather(
                    [self.session.generate(tokens, 1, seed, sampling, shown) for seed in seeds]
                )
                answered = [generation for generations in several for generation in generations]
            for number, (seed, generation) in enumerate(
                zip(seeds, answered, strict=True), start=sample
            ):
                self.answers.note(number, turn, seed, generation, context)
            return answered
        finally:
            self._under_way -= 1
            self._since_s = time.monotonic()

    def _images_of(self, tokens: npt.NDArray[np.int32]) -> Sequence[ShownImage]:
        """Returns the prompt's images, if the tokens begin with it.

        Raises ValueError for tokens that show its images elsewhere: nobody could say which.
        """
        if self.prompt is None or not self.prompt.images:
            return ()
        if begins_with(tokens, self.prompt.tokens):
            return self.prompt.images
        if shows_placeholders(tokens, self.prompt):
            raise ValueError(
                "generate: the tokens have placeholders of images, but do not begin with the "
                "prompt; begin with prompt.tokens"
            )
        return ()
