"""The datum: Sample is one token sequence with per-token data; SampleBuilder puts one together.

    tokens     p0 p1 p2 a0 a1 e0 e1 b0   p: prompt, a and b: two turns of the policy,
                                         e: the environment's answer to the first turn
    component   0  0  0  1  1  0  0  1   the part of the loss that trains the token; 0: none
    versions   -1 -1 -1  4  4 -1 -1  4   the weight version that generated the token; -1: none

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

    session: number of the session (the attempt) in its group.
    number: number of the turn in its session; samples that share a turn give it the same number.
    shown: the text before the turn. written: the number of its tokens.
    trained: whether this sample trains it. reward: the turn's own reward, if it was given one.
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

    tokens: int32.
    component: uint8, the part of the loss that trains the token; 0 for tokens that are not
    trained, and always for the first one.
    logprobs: float32, log-prob of the token in the distribution that the policy sampled it from.
    versions: int32, the weight version that sampled the token; NO_VERSION for all other tokens.
    weight: float32, weight of the trained tokens; None if all have 1.
    reward: what the environment gave; None leaves it to the reward functions.
    finished: whether the sequence ended by itself rather than at a limit.
    text: what follows the prompt, for reward functions and records.
    columns: the declared columns, each [T, *shape].
    turns: the turns of a branch of a session; empty for other samples.
    placeholders: runs of tokens that stand for attached arrays, with starts counted in `tokens`.
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
        """bool [T]: whether a component of the loss trains the token."""
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
        """Number of tokens before the first one that the policy wrote; if it wrote none, before the
        first trained one.
        """
        first = int(self.written.argmax())
        return first if self.written[first] else int(self.trained.argmax())

    @cached_property
    def prefix_keys(self) -> npt.NDArray[np.integer[Any]]:
        """Keys [T] to compare beginnings by: two samples begin alike as far as their keys are
        equal.

        The tokens themselves if nothing is attached, else int64 (attachments.prefix_keys).
        """
        return prefix_keys(self.tokens, self.placeholders) if self.placeholders else self.tokens


@dataclass(frozen=True, eq=False)
class SampleRow:
    """Arrays of several samples, one sample after another; a group takes them without a copy.

    tokens, component, logprobs, versions, weight, columns: as in Sample, T tokens together.
    ends: where each sample ends.
    prompt: the length of all prompts, if each sample is a prompt of this length that is not
    trained followed by tokens that the policy wrote; None otherwise.
    placeholders: runs of all samples, with starts counted in `tokens`.
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
        """Returns the samples, whose arrays are views of this row's."""
        samples = []
        for number, (start, end) in enumerate(pairwise([0, *self.ends])):
            span = slice(start, end)
            sample = Sample(
                tokens=self.tokens[span],
                component=self.component[span],
                logprobs=self.logprobs[span],
                versions=self.versions[span],
                finished=finished[number],
                text=texts[number],
                columns={column: values[span] for column, values in self.columns.items()},
                weight=None if self.weight is None else self.weight[span],
            )
            if self.placeholders:
                sample.placeholders = within(self.placeholders, start, end)
            sample._place = self, number
            if self.prompt is not None:  # otherwise these are computed when they are asked for
                sample.prompt_length = self.prompt
                sample.num_trained = sample.num_written = end - start - self.prompt
            samples.append(sample)
        return samples

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> SampleRow:
        """Returns the row that was cut into these samples, or copies them into a new one."""
        place = samples[0]._place
        if place is not None and len(place[0].ends) == len(samples):
            row = place[0]
            if all(sample._place == (row, number) for number, sample in enumerate(samples)):
                return row
        return cls(
            tokens=np.concatenate([sample.tokens for sample in samples]),
            component=np.concatenate([sample.component for sample in samples]),
            logprobs=np.concatenate([sample.logprobs for sample in samples]),
            versions=np.concatenate([sample.versions for sample in samples]),
            ends=list(accumulate(len(sample.tokens) for sample in samples)),
            columns=_joined_columns(samples),
            weight=_joined_weights(samples),
            placeholders=_joined_placeholders(samples),
        )


def _joined_columns(samples: Sequence[Sample]) -> dict[Column, np.ndarray]:
    """Joins the columns that every sample has; a group's checks name those that some lack."""
    joined = {}
    for column in samples[0].columns:
        if all(column in sample.columns for sample in samples):
            joined[column] = np.concatenate([sample.columns[column] for sample in samples])
    return joined


def _joined_placeholders(samples: Sequence[Sample]) -> tuple[Placeholders, ...]:
    """Returns the runs of all samples, with starts counted in all their tokens."""
    joined: list[Placeholders] = []
    start = 0
    for sample in samples:
        joined += [run.moved(start) for run in sample.placeholders]
        start += len(sample.tokens)
    return tuple(joined)


def _joined_weights(samples: Sequence[Sample]) -> npt.NDArray[np.float32] | None:
    if all(sample.weight is None for sample in samples):
        return None
    weights = []
    for sample in samples:
        ones = np.ones(len(sample.tokens), np.float32)
        weights.append(ones if sample.weight is None else sample.weight)
    return np.concatenate(weights)


def group_lengths(samples: Sequence[Sample]) -> tuple[int, list[int]]:
    """Returns the length of the shortest prompt and the number of tokens of each sample after it,
    which are what the cost of training them follows from (GroupWork).

    A branch of a session counts only the tokens that it does not share with the sample before it:
    what both share is computed once.
    """
    prompt = min([sample.prompt_length for sample in samples])
    lengths = [len(samples[0].tokens) - prompt]
    for previous, sample in pairwise(samples):
        shared = prompt
        if sample.turns:
            shared = max(prompt, num_common(previous, sample))
        lengths.append(len(sample.tokens) - shared)
    return prompt, lengths


def num_common(first: Sample, second: Sample) -> int:
    """Returns how many leading tokens both share; what is attached to them is equal too."""
    shorter = min(len(first.tokens), len(second.tokens))
    differ = np.flatnonzero(first.prefix_keys[:shorter] != second.prefix_keys[:shorter])
    return int(differ[0]) if len(differ) else shorter


class SampleBuilder:
    """Puts a sample together turn by turn, from what the policy is shown and what it writes.

    Arguments of its methods:

    component, weight: the part of the loss that trains the given tokens, and their weight in it.
    columns: declared columns of the given tokens, [len(tokens), *shape]. A column of context comes
    for all tokens so far; each token keeps the first value that it gets.
    placeholders: runs of the given tokens that stand for attached arrays, with starts counted in
    these tokens.
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
        """All tokens so far: what the next turn is conditioned on."""
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
        """Appends tokens of the environment, which are not trained unless a component is named.

        Raises GroupFormatError for placeholders that overlap or are not within these tokens.
        """
        start = self._length
        self._length += len(tokens)
        if placeholders:
            runs = arranged(placeholders, len(tokens), "show:")
            self._placeholders += [run.moved(start) for run in runs]
        if component:
            self._trained.append((slice(start, self._length), component, weight))
            self.num_trained += len(tokens)
        self._parts.append(np.asarray(tokens, np.int32))
        for column, values in (columns or {}).items():
            first = 0 if column.tokens == "context" else start
            span = slice(first, self._length)
            checked_values = checked(column, values, self._length - first, "column")
            self._columns.setdefault(column, []).append((span, checked_values))

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
        """Appends tokens of the policy, as the engine returned them.

        logprobs: one for each token, or [0] if none were asked for. version: one for all tokens,
        or one for each.
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
        """Returns the sample.

        Raises GroupFormatError if a column has values for some of the policy's tokens but not for
        all of them.
        """
        component = np.zeros(self._length, np.uint8)
        weight = None
        if any(token_weight != 1 for _, _, token_weight in self._trained):
            weight = np.ones(self._length, np.float32)
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
        values = column.blank(self._length)
        has_value = np.zeros(self._length, np.bool_)
        for span, given_values in self._columns[column]:
            if has_value[span].any():  # looking at every value takes longer than copying them
                is_blank = column.where_blank(values[span])
                values[span] = np.where(is_blank, given_values, values[span])
            else:
                values[span] = given_values
            has_value[span] = True
        missing = int(np.count_nonzero(written & ~has_value))
        if missing:
            raise GroupFormatError(
                f"column {column.name}: {missing} of {np.count_nonzero(written)} tokens of the "
                "policy have no value; give one each with every write"
            )
        return values


def checked(column: Column, values: Any, num_tokens: int, owner: object) -> np.ndarray:
    """Returns the values if they are an array [num_tokens, *shape] of the column's type.

    owner: whose values they are, for messages. Raises GroupFormatError for anything else.
    """
    fits = (
        isinstance(values, np.ndarray)
        and values.dtype == column.type
        and values.ndim == 1 + len(column.shape)
    )
    if not fits or values.shape[1:] != column.shape:
        expected = ", ".join(["n", *map(str, column.shape)])
        raise GroupFormatError(
            f"{owner} {column.name}: must be a {column.dtype} array [{expected}], found "
            f"{described_array(values)}"
        )
    if len(values) != num_tokens:
        raise GroupFormatError(
            f"{owner} {column.name}: {len(values)} values for {num_tokens} tokens; give one each"
        )
    return values


def described_array(values: Any) -> str:
    """Returns the type and the shape of an array, or the type of what is no array."""
    if isinstance(values, np.ndarray):
        return f"{values.dtype} {list(values.shape)}"
    return type(values).__name__


def check_one_each(tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
    """Raises ValueError unless every token that was written has a log-prob, or none has."""
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(
            f"write: {len(logprobs)} log-probs for {len(tokens)} tokens; give one each, or none"
        )
