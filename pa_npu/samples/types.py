"""The datum: a Sample is one token sequence with what training needs of every token; SampleBuilder puts one together.

    tokens     p0 p1 p2 a0 a1 e0 e1 b0      prompt, what the policy wrote, what the environment answered, what the policy wrote
    component   0  0  0  1  1  0  0  1      the part of the loss that trains the token; 0: none
    versions   -1 -1 -1  4  4 -1 -1  4      the weight version that generated the token; -1 where none did

What is trained and where it comes from are two things: a component may train tokens that the policy
did not write, such as the environment's. Log-probs and versions are those of tokens that it wrote,
and of no others.

A single turn is the case with one prompt and one run of trained tokens. Nothing behind this file
assumes it. Whatever else a feature needs of every token is a declared column (samples/columns.py).
What has no value for each token, such as an image, is attached to placeholder tokens
(samples/attachments.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.samples.attachments import Placeholders, arranged, prefix_keys, within
from pa_npu.samples.columns import NO_VERSION, Column, GroupFormatError, Values


@dataclass(frozen=True)
class SampleTurn:
    """A turn of the policy in a sample that is a branch of a session, for records.

    session: the attempt's number in its group. number: of the turn in its session; where several
    samples share it, it is the same.
    shown: the text before it. written: how many tokens it has. trained: in this sample. reward: its
    own, if it was given one.
    """

    session: int
    number: int
    shown: str
    written: int
    trained: bool
    reward: float | None


@dataclass(eq=False)  # frozen ones take twice as long to make, and there is one for every response
class Sample:
    """One sequence from its prompt to its end, read only. T tokens; arrays are numpy [T].

    tokens: int32. component: uint8, by which part of the loss a token is trained; 0 for the first
    one, and where it is not.
    logprobs: float32, of the distribution that the policy sampled a token from. versions: int32,
    the weight version that sampled it, NO_VERSION where the policy did not. weight: float32, of
    trained tokens; None where all have 1.
    reward: what the environment gave; None leaves it to the reward functions.
    finished: ended by itself, not cut at a limit. text: what follows the prompt, for reward
    functions and records.
    columns: the declared ones, each [T, *shape]. turns: of a branch of a session.
    placeholders: runs of tokens that stand for attached arrays, starts in `tokens`.
    """

    tokens: npt.NDArray[np.int32]
    component: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finished: bool
    text: str = ""
    reward: float | None = None
    columns: Values = field(default_factory=dict)
    turns: Sequence[SampleTurn] = ()
    weight: npt.NDArray[np.float32] | None = None
    placeholders: Sequence[Placeholders] = ()
    _place: tuple[SampleRow, int] | None = field(init=False, default=None, repr=False)

    @cached_property
    def trained(self) -> npt.NDArray[np.bool_]:
        """bool [T]: whether some component trains the token."""
        return self.component != 0

    @cached_property
    def written(self) -> npt.NDArray[np.bool_]:
        """bool [T]: whether the policy wrote the token, and it is trained."""
        return self.versions != NO_VERSION

    @cached_property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.component))

    @cached_property
    def num_written(self) -> int:
        return int(np.count_nonzero(self.written))

    @cached_property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy wrote; without any, before the first trained
        one.
        """
        first = int(self.written.argmax())
        return first if self.written[first] else int(self.trained.argmax())

    @cached_property
    def prefix_keys(self) -> npt.NDArray[np.integer[Any]]:
        """[T]: equal, from the first on, where two samples begin alike; attachments.prefix_keys."""
        return prefix_keys(self.tokens, self.placeholders)


@dataclass(frozen=True, eq=False)
class SampleRow:
    """Arrays [T] of Sample for some samples, one after another: what a group of them is made of
    without another copy.

    ends: where each sample ends. prompt: the tokens of each that are not trained, where these are
    its first and the policy wrote all others; None: whatever the arrays say. placeholders: of all
    samples, starts in `tokens`.
    """

    tokens: npt.NDArray[np.int32]
    component: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    ends: Sequence[int]
    columns: Values = field(default_factory=dict)
    prompt: int | None = None
    weight: npt.NDArray[np.float32] | None = None
    placeholders: Sequence[Placeholders] = ()

    def cut(self, finished: Sequence[bool], texts: Sequence[str]) -> list[Sample]:
        """The samples, views."""
        samples = []
        for number, (start, end) in enumerate(pairwise([0, *self.ends])):
            span = slice(start, end)
            arrays = (
                self.tokens[span],
                self.component[span],
                self.logprobs[span],
                self.versions[span],
            )
            weight = None if self.weight is None else self.weight[span]
            columns = (
                {column: values[span] for column, values in self.columns.items()}
                if self.columns
                else {}
            )
            sample = Sample(
                *arrays, finished[number], texts[number], columns=columns, weight=weight
            )
            if self.placeholders:
                sample.placeholders = within(self.placeholders, start, end)
            sample._place = self, number
            if self.prompt is not None:  # else found when it is asked for
                sample.prompt_length = self.prompt
                sample.num_trained = sample.num_written = end - start - self.prompt
            samples.append(sample)
        return samples

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleRow:
        """The row that was cut into these samples; a copy where there is none."""
        place = samples[0]._place
        if place is not None and len(place[0].ends) == len(samples):
            row = place[0]
            if all(sample._place == (row, number) for number, sample in enumerate(samples)):
                return row
        return cls(
            np.concatenate([sample.tokens for sample in samples]),
            np.concatenate([sample.component for sample in samples]),
            np.concatenate([sample.logprobs for sample in samples]),
            np.concatenate([sample.versions for sample in samples]),
            list(accumulate(len(sample.tokens) for sample in samples)),
            {
                column: np.concatenate([sample.columns[column] for sample in samples])
                for column in samples[0].columns
                if all(column in sample.columns for sample in samples)
            },
            weight=_joined_weights(samples),
            placeholders=_joined_placeholders(samples),
        )


def _joined_placeholders(samples: Sequence[Sample]) -> tuple[Placeholders, ...]:
    """The runs of all samples, starts in all their tokens."""
    joined: list[Placeholders] = []
    start = 0
    for sample in samples:
        joined += [run.moved(start) for run in sample.placeholders]
        start += len(sample.tokens)
    return tuple(joined)


def _joined_weights(samples: Sequence[Sample]) -> npt.NDArray[np.float32] | None:
    if all(sample.weight is None for sample in samples):
        return None
    weights = [
        np.ones(len(s.tokens), np.float32) if s.weight is None else s.weight for s in samples
    ]
    return np.concatenate(weights)


def group_lengths(samples: Sequence[Sample]) -> tuple[int, list[int]]:
    """The shortest prompt of these samples and what each has behind that, in tokens: what training
    them costs by (GroupWork).

    A branch of a session has there what it does not share with the sample before it, which is
    computed once for both.
    """
    prompt = min([sample.prompt_length for sample in samples])
    shared = [
        max(prompt, num_common(one, two)) if two.turns else prompt for one, two in pairwise(samples)
    ]
    return prompt, [
        len(sample.tokens) - start for sample, start in zip(samples, [prompt, *shared], strict=True)
    ]


def num_common(one: Sample, two: Sample) -> int:
    """How many tokens both begin with, attachments of these being equal too."""
    shorter = min(len(one.tokens), len(two.tokens))
    differ = np.flatnonzero(one.prefix_keys[:shorter] != two.prefix_keys[:shorter])
    return int(differ[0]) if len(differ) else shorter


class SampleBuilder:
    """Puts a sample together turn by turn: what the policy is shown, and what it writes.

    component, weight, everywhere here: by which part of the loss the given tokens are trained, and
    with what weight. columns, everywhere here: declared columns of the tokens that are given with
    them, [len(tokens), *shape]; those of context of all tokens so far, of which each keeps the
    first value that it is given. placeholders, everywhere here: runs of the given tokens that stand
    for attached arrays, starts in these tokens.
    """

    def __init__(
        self,
        prompt: npt.NDArray[np.int32],
        columns: Values | None = None,
        *,
        placeholders: Sequence[Placeholders] = (),
    ) -> None:
        self._parts: list[npt.NDArray[np.int32]] = []
        self._length = 0
        self._written: list[tuple[slice, npt.NDArray[np.float32], int | npt.NDArray[np.int32]]] = []
        self._trained: list[tuple[slice, int, float]] = []
        self._columns: dict[Column, list[tuple[slice, np.ndarray]]] = {}
        self._placeholders: list[Placeholders] = []
        self.num_trained = 0
        self.show(prompt, columns, placeholders=placeholders)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Everything so far: what the next turn is conditioned on."""
        return np.concatenate(self._parts)

    def show(
        self,
        tokens: npt.NDArray[np.int32],
        columns: Values | None = None,
        *,
        component: int = 0,
        weight: float = 1.0,
        placeholders: Sequence[Placeholders] = (),
    ) -> None:
        """Tokens of the environment, which are not trained unless a component is named.

        Raises GroupFormatError for placeholders that are not within these tokens, or overlap.
        """
        start, self._length = self._length, self._length + len(tokens)
        if placeholders:
            runs = arranged(placeholders, len(tokens), "show:")
            self._placeholders += [run.moved(start) for run in runs]
        if component:
            self._trained.append((slice(start, self._length), component, weight))
            self.num_trained += len(tokens)
        self._parts.append(np.asarray(tokens, np.int32))
        for column, values in (columns or {}).items():
            first = 0 if column.tokens == "context" else start
            part = (
                slice(first, self._length),
                checked(column, values, self._length - first, "column"),
            )
            self._columns.setdefault(column, []).append(part)

    def write(
        self,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        version: int | npt.NDArray[np.int32],
        columns: Values | None = None,
        *,
        component: int = 1,
        weight: float = 1.0,
    ) -> None:
        """Tokens of the policy, as the engine returned them. logprobs: one each, or [0] where none
        were asked for.

        version: of all, or of each.
        """
        check_one_each(tokens, logprobs)
        if component < 1:
            raise ValueError("write: tokens of the policy that are not trained are shown; use show")
        start = self._length
        self.show(tokens, columns, component=component, weight=weight)
        self._written.append((slice(start, self._length), logprobs, version))

    def finish(
        self,
        finished: bool,
        text: str,
        reward: float | None = None,
        turns: Sequence[SampleTurn] = (),
    ) -> Sample:
        """The sample.

        Raises GroupFormatError where a column has values for some of the policy's tokens and not
        for others.
        """
        component = np.zeros(self._length, np.uint8)
        weight = (
            np.ones(self._length, np.float32)
            if any(part[2] != 1 for part in self._trained)
            else None
        )
        logprobs = np.zeros(self._length, np.float32)
        versions = np.empty(self._length, np.int32)
        versions.fill(NO_VERSION)
        for span, number, token_weight in self._trained:
            component[span] = number
            if weight is not None:
                weight[span] = token_weight
        for span, sampled, version in self._written:
            versions[span] = version
            if len(sampled):
                logprobs[span] = sampled
        written = versions != NO_VERSION
        columns = {column: self._column(column, written) for column in self._columns}
        return Sample(
            tokens=self.tokens,
            component=component,
            logprobs=logprobs,
            versions=versions,
            finished=finished,
            text=text,
            reward=reward,
            columns=columns,
            turns=turns,
            weight=weight,
            placeholders=tuple(self._placeholders),
        )

    def _column(self, column: Column, written: npt.NDArray[np.bool_]) -> np.ndarray:
        values, given = column.blank(self._length), np.zeros(self._length, np.bool_)
        for span, part in self._columns[column]:
            if given[span].any():  # looking at every value takes longer than copying them
                part = np.where(column.where_blank(values[span]), part, values[span])
            values[span], given[span] = part, True
        if missing := int(np.count_nonzero(written & ~given)):
            raise GroupFormatError(
                f"column {column.name}: {missing} of {np.count_nonzero(written)} tokens of the "
                "policy have no value; give one each with every write"
            )
        return values


def checked(column: Column, values: Any, num_tokens: int, what: object) -> np.ndarray:
    """The values, where they are an array [num_tokens, *shape] of the type.

    Raises GroupFormatError.
    """
    fits = (
        isinstance(values, np.ndarray)
        and values.dtype == column.type
        and values.ndim == 1 + len(column.shape)
    )
    if not fits or values.shape[1:] != column.shape:
        found = (
            f"{values.dtype} {list(values.shape)}"
            if isinstance(values, np.ndarray)
            else type(values).__name__
        )
        wanted = ", ".join(["n", *map(str, column.shape)])
        raise GroupFormatError(
            f"{what} {column.name}: must be a {column.dtype} array [{wanted}], found {found}"
        )
    if len(values) != num_tokens:
        raise GroupFormatError(
            f"{what} {column.name}: {len(values)} values for {num_tokens} tokens; give one each"
        )
    return values


def check_one_each(tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
    """Raises ValueError unless every token that was written has a log-prob, or none has."""
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(
            f"write: {len(logprobs)} log-probs for {len(tokens)} tokens; give one each, or none"
        )
