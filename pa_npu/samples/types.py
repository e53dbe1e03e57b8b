"""The datum: a Sample is one token sequence with what training needs of every token; a Group holds the samples of one prompt.

    tokens     p0 p1 p2 a0 a1 e0 e1 b0      prompt, what the policy wrote, what the environment answered, what the policy wrote
    trained     0  0  0  1  1  0  0  1      the policy's own tokens, and no others, have a loss
    versions   -1 -1 -1  4  4 -1 -1  4      the weight version that generated the token; -1 where none did

A single turn is the case with one prompt and one run of trained tokens. Nothing behind this file assumes it.
Whatever else a feature needs of every token is a declared column (samples/columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pa_npu.samples.columns import ADVANTAGES, FIXED, LOGPROBS, NO_VERSION, VERSIONS, Column, GroupFormatError, Values

T = TypeVar("T")

IDENTITY = ("run_seed", "iteration", "index", "prompt_id")
"""The whole numbers that say which group this is."""

PER_TOKEN: dict[str, np.dtype[Any]] = {column.name: column.type for column in FIXED}
PER_SAMPLE: dict[str, np.dtype[Any]] = {
    "lengths": np.dtype("<i4"),
    "rewards": np.dtype("<f4"),
    "finished": np.dtype("?"),
}


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence from its prompt to its end. T tokens; arrays are numpy [T].

    tokens: int32. trained: bool, the tokens that the policy sampled, never the first one. logprobs: float32, of the
    distribution that a trained token was sampled from. versions: int32, the weight version that sampled it. Both mean
    nothing where trained is False. reward: what the environment gave; None leaves it to the reward functions.
    finished: ended by itself, not cut at a limit. text: what follows the prompt, for reward functions and records.
    columns: the declared ones, each [T, *shape].
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finished: bool
    text: str = ""
    reward: float | None = None
    columns: Values = field(default_factory=dict)
    _place: tuple[SampleRow, int] | None = field(init=False, default=None, repr=False)

    @cached_property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.trained))

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.trained.argmax())

    @property
    def is_of_several_versions(self) -> bool:
        """Whether it was written by more than one weight version; later tokens never have older ones."""
        return bool(self.versions.max() != self.versions[self.prompt_length])


@dataclass(frozen=True, eq=False)
class SampleRow:
    """Arrays [T] of Sample for some samples, one after another: what a group of them is made of without another copy.

    ends: where each sample ends.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    ends: Sequence[int]
    columns: Values = field(default_factory=dict)

    def cut(self, finished: Sequence[bool], texts: Sequence[str]) -> list[Sample]:
        """The samples, views."""
        samples = []
        for number, span in enumerate(map(slice, [0, *self.ends], self.ends)):
            arrays = self.tokens[span], self.trained[span], self.logprobs[span], self.versions[span]
            columns = {column: values[span] for column, values in self.columns.items()}
            sample = Sample(*arrays, finished[number], texts[number], columns=columns)
            object.__setattr__(sample, "_place", (self, number))
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
            np.concatenate([sample.trained for sample in samples]),
            np.concatenate([sample.logprobs for sample in samples]),
            np.concatenate([sample.versions for sample in samples]),
            list(accumulate(len(sample.tokens) for sample in samples)),
            {
                column: np.concatenate([sample.columns[column] for sample in samples])
                for column in samples[0].columns
                if all(column in sample.columns for sample in samples)
            },
        )


def group_lengths(samples: Sequence[Sample]) -> tuple[int, list[int]]:
    """The shortest prompt of these samples and what each has behind that, in tokens: what training them costs by (GroupWork)."""
    prompt = min(sample.prompt_length for sample in samples)
    return prompt, [len(sample.tokens) - prompt for sample in samples]


class SampleBuilder:
    """Puts a sample together turn by turn: what the policy is shown, and what it writes.

    columns, everywhere here: declared columns of the tokens that are given with them, [len(tokens), *shape].
    """

    def __init__(self, prompt: npt.NDArray[np.int32], columns: Values | None = None) -> None:
        self._parts: list[npt.NDArray[np.int32]] = []
        self._length = 0
        self._written: list[tuple[slice, npt.NDArray[np.float32], int | npt.NDArray[np.int32]]] = []
        self._columns: dict[Column, list[tuple[slice, np.ndarray]]] = {}
        self.num_trained = 0
        self.show(prompt, columns)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Everything so far: what the next turn is conditioned on."""
        return np.concatenate(self._parts)

    def show(self, tokens: npt.NDArray[np.int32], columns: Values | None = None) -> None:
        """Tokens of the environment, which are not trained."""
        start, self._length = self._length, self._length + len(tokens)
        self._parts.append(np.asarray(tokens, np.int32))
        for column, values in (columns or {}).items():
            span = slice(start, self._length), checked(column, values, len(tokens), "column")
            self._columns.setdefault(column, []).append(span)

    def write(
        self,
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        version: int | npt.NDArray[np.int32],
        columns: Values | None = None,
    ) -> None:
        """Tokens of the policy, as the engine returned them. logprobs: one each, or [0] where none were asked for.

        version: of all, or of each.
        """
        check_one_each(tokens, logprobs)
        start = self._length
        self.show(tokens, columns)
        self._written.append((slice(start, self._length), logprobs, version))
        self.num_trained += len(tokens)

    def finish(self, finished: bool, text: str, reward: float | None = None) -> Sample:
        """The sample. Raises GroupFormatError where a column has values for some of the policy's tokens and not for others."""
        trained = np.zeros(self._length, np.bool_)
        logprobs = np.zeros(self._length, np.float32)
        versions = np.empty(self._length, np.int32)
        versions.fill(NO_VERSION)
        for span, sampled, version in self._written:
            trained[span] = True
            versions[span] = version
            if len(sampled):
                logprobs[span] = sampled
        columns = {column: self._column(column, trained) for column in self._columns}
        return Sample(self.tokens, trained, logprobs, versions, finished, text, reward, columns)

    def _column(self, column: Column, trained: npt.NDArray[np.bool_]) -> np.ndarray:
        values, given = column.blank(self._length), np.zeros(self._length, np.bool_)
        for span, part in self._columns[column]:
            values[span], given[span] = part, True
        if missing := int(np.count_nonzero(trained & ~given)):
            raise GroupFormatError(
                f"column {column.name}: {missing} of {self.num_trained} tokens of the policy have no value; give one each with "
                f"every write"
            )
        return values


def checked(column: Column, values: Any, num_tokens: int, what: object) -> np.ndarray:
    """The values, where they are an array [num_tokens, *shape] of the type. Raises GroupFormatError."""
    fits = isinstance(values, np.ndarray) and values.dtype == column.type and values.ndim == 1 + len(column.shape)
    if not fits or values.shape[1:] != column.shape:
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        wanted = ", ".join(["n", *map(str, column.shape)])
        raise GroupFormatError(f"{what} {column.name}: must be a {column.dtype} array [{wanted}], found {found}")
    if len(values) != num_tokens:
        raise GroupFormatError(f"{what} {column.name}: {len(values)} values for {num_tokens} tokens; give one each")
    return values


def check_one_each(tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
    """Raises ValueError unless every token that was written has a log-prob, or none has."""
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(f"write: {len(logprobs)} log-probs for {len(tokens)} tokens; give one each, or none")


@dataclass(frozen=True, eq=False)
class Group:
    """The samples of one prompt, their arrays one after another: the unit of dispatch, of advantages and of the buffer.

    Construction validates everything, so a Group that exists is well-formed on both sides of the wire.

    run_seed, iteration, index: with a sample's number they say what was sampled, whatever engine did it. index is the dispatch
    index within the iteration. prompt_id: row of the dataset.
    lengths: int32 [G], tokens of each sample. rewards: float32 [G]. finished: bool [G].
    tokens, trained, logprobs, versions: those of Sample, [sum of lengths]. advantages: float32 [sum of lengths].
    first: the number of the first sample here, in a piece of the group that was dispatched; 0 for the whole.
    columns: the declared ones, each [sum of lengths, *shape].
    Log-probs and advantages are 0, and versions NO_VERSION, where a token is not trained.
    """

    run_seed: int
    iteration: int
    index: int
    prompt_id: int
    lengths: np.ndarray
    tokens: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    finished: np.ndarray
    first: int = 0
    columns: Values = field(default_factory=dict)
    _cache: dict[str, Any] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in IDENTITY:
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
                raise GroupFormatError(f"group {name}: {value!r} must be an integer between 0 and 2**63 - 1")
            object.__setattr__(self, name, int(value))
        for name, dtype in PER_SAMPLE.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise GroupFormatError(f"{self} {name}: must be a {dtype.name} array [n], found {found}")
        self._check_sizes()
        self._check_values()

    @property
    def per_token(self) -> dict[Column, np.ndarray]:
        """All its columns, fixed and declared."""
        return {**{column: getattr(self, column.name) for column in FIXED}, **self.columns}

    @classmethod
    def of_samples(
        cls,
        samples: Sequence[Sample],
        rewards: np.ndarray,
        advantages: np.ndarray,
        *,
        run_seed: int,
        iteration: int,
        index: int,
        prompt_id: int,
    ) -> Group:
        """rewards: float32 [G]. advantages: float32 [G], the same for all trained tokens of a sample."""
        row = SampleRow.of(samples)
        lengths = np.array([len(sample.tokens) for sample in samples], np.int32)
        of_tokens = np.repeat(np.asarray(advantages, np.float32), lengths)
        of_tokens[~row.trained] = 0
        return cls(
            run_seed=run_seed,
            iteration=iteration,
            index=index,
            prompt_id=prompt_id,
            lengths=lengths,
            tokens=row.tokens,
            trained=row.trained,
            logprobs=row.logprobs,
            versions=row.versions,
            advantages=of_tokens,
            rewards=np.asarray(rewards, np.float32),
            finished=np.array([sample.finished for sample in samples], np.bool_),
            columns=row.columns,
        )

    @classmethod
    def of_responses(
        cls,
        *,
        iteration: int,
        version: int,
        index: int,
        prompt_id: int,
        prompt_tokens: np.ndarray,
        response_tokens: np.ndarray,
        response_lengths: np.ndarray,
        logprobs: np.ndarray,
        rewards: np.ndarray,
        advantages: np.ndarray,
        finished: np.ndarray,
        run_seed: int = 0,
    ) -> Group:
        """One prompt with G responses, which stand one after another in response_tokens and logprobs."""
        ends = np.cumsum(response_lengths)[:-1]
        samples = []
        for number, (tokens, sampled) in enumerate(
            zip(np.split(response_tokens, ends), np.split(logprobs, ends), strict=True)
        ):
            sample = SampleBuilder(prompt_tokens)
            sample.write(tokens, sampled, version)
            samples.append(sample.finish(bool(finished[number]), ""))
        identity = {"run_seed": run_seed, "iteration": iteration, "index": index, "prompt_id": prompt_id}
        return cls.of_samples(samples, rewards, advantages, **identity)

    def _check_sizes(self) -> None:
        num_samples = len(self.lengths)
        if num_samples == 0:
            raise GroupFormatError(f"{self} lengths: a group needs at least one sample")
        if (shortest := min(self.lengths.tolist())) < 2:
            raise GroupFormatError(
                f"{self} lengths: a sample needs a prompt and a trained token, shortest is {shortest}"
            )
        for name in PER_SAMPLE:
            if len(getattr(self, name)) != num_samples:
                raise GroupFormatError(f"{self} {name}: {len(getattr(self, name))} values for {num_samples} samples")
        total = int(self.offsets()[-1])
        for column, values in self.per_token.items():
            checked(column, values, total, self)

    def _check_values(self) -> None:
        if (lowest := np.minimum.reduce(self.tokens)) < 0:
            raise GroupFormatError(f"{self} tokens: token ids must not be negative, lowest is {lowest}")
        self._check_finite("rewards", self.rewards)
        if _any(self.trained[self.offsets()[:-1]]):
            raise GroupFormatError(f"{self} trained: a sample's first token follows from nothing and cannot be trained")
        if not _all(counts := self.trained_lengths):
            raise GroupFormatError(f"{self} trained: sample {int(counts.argmin())} has no trained token")
        self._check_stretches()
        for column, values in ((LOGPROBS, self.logprobs), *self.columns.items()):
            if column.is_float:
                self._check_finite(column.name, values)
            if column.tokens == "trained":
                self._check_elsewhere(column, values, self.trained)

    def _check_stretches(self) -> None:
        """Versions and advantages: what holds for a stretch's first token holds for all of it."""
        starts = self._stretches[:-1]
        trained, versions, advantages = self.trained[starts], self.versions[starts], self.advantages[starts]
        self._check_finite("advantages", advantages, starts)
        if _any((versions < 0) & trained):
            raise GroupFormatError(
                f"{self} versions: a trained token needs a weight version, lowest is {versions[trained].min()}"
            )
        self._check_elsewhere(ADVANTAGES, advantages, trained)
        self._check_elsewhere(VERSIONS, versions, trained)

    def _check_finite(self, name: str, values: np.ndarray, numbers: np.ndarray | None = None) -> None:
        """numbers: of the values, where these are not all of them."""
        finite = np.isfinite(values)
        if int(np.count_nonzero(finite)) != finite.size:
            position = int(finite.argmin())
            number, value = position if numbers is None else numbers[position], values.flat[position]
            raise GroupFormatError(f"{self} {name}: values must be finite, number {number} is {value}")

    def _check_elsewhere(self, column: Column, values: np.ndarray, trained: np.ndarray) -> None:
        differs = values != column.elsewhere
        if column.shape:
            differs = differs.reshape(len(values), -1).any(axis=1)
        if _any(differs > trained):  # bool > bool: the one without the other
            raise GroupFormatError(f"{self} {column.name}: must be {column.elsewhere} for tokens that are not trained")

    def __str__(self) -> str:
        return f"group {self.index} of iteration {self.iteration} (prompt {self.prompt_id})"

    def __getitem__(self, span: slice) -> Group:
        """The same group with some consecutive samples of it."""
        offsets = self.offsets()
        first, last, _ = span.indices(self.num_samples)
        rows = slice(int(offsets[first]), int(offsets[last]))
        return replace(
            self,
            first=self.first + first,
            **{name: getattr(self, name)[rows] for name in PER_TOKEN},
            **{name: getattr(self, name)[first:last] for name in PER_SAMPLE},
            columns={column: values[rows] for column, values in self.columns.items()},
        )

    def made(self, makers: Mapping[Column, Callable[[Group], np.ndarray]]) -> Group:
        """The group with the columns that `makers` make of it (RunColumns.makers). Raises GroupFormatError for something else."""
        if not makers:
            return self
        values = {column: make(self) for column, make in makers.items()}
        advantages = next((found for one, found in values.items() if one.name == ADVANTAGES.name), self.advantages)
        declared = {column: found for column, found in values.items() if column.name != ADVANTAGES.name}
        return replace(self, advantages=advantages, columns={**self.columns, **declared})

    def samples(self, texts: Sequence[str]) -> list[Sample]:
        """The samples that `of_samples` was given, views, without rewards. texts: theirs."""
        ends = self.offsets()[1:].tolist()
        row = SampleRow(self.tokens, self.trained, self.logprobs, self.versions, ends, self.columns)
        return row.cut([bool(finished) for finished in self.finished], texts)

    @property
    def num_samples(self) -> int:
        """G."""
        return len(self.lengths)

    @property
    def trained_lengths(self) -> np.ndarray:
        """int64 [G]: trained tokens of each sample."""
        return self.cached("trained", lambda: np.add.reduceat(self.trained, self.offsets()[:-1], dtype=np.int64))

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends), int64 [R]: consecutive trained tokens of one version and one advantage; together all trained tokens."""

        def build() -> tuple[np.ndarray, np.ndarray]:
            bounds = self._stretches
            trained = self.trained[bounds[:-1]]
            return bounds[:-1][trained], bounds[1:][trained]

        return self.cached("runs", build)

    @property
    def _stretches(self) -> np.ndarray:
        """int64 [S + 1]: bounds of stretches of consecutive tokens with the same `trained`, version and advantage."""

        def build() -> np.ndarray:
            changes = np.empty(len(self.tokens) + 1, np.bool_)
            changes[0] = changes[-1] = True
            inner = changes[1:-1]
            np.not_equal(self.trained[1:], self.trained[:-1], out=inner)
            inner |= self.versions[1:] != self.versions[:-1]
            bits = self.advantages.view(np.int32)  # 0.0 and -0.0 are two
            inner |= bits[1:] != bits[:-1]
            return np.flatnonzero(changes)

        return self.cached("stretches", build)

    @property
    def num_trained(self) -> int:
        """Tokens that have a loss."""
        return int(self.trained_lengths.sum())

    @property
    def num_tokens(self) -> int:
        """All tokens of all samples, a shared prompt once per sample: the numerator of TPSPD."""
        return len(self.tokens)

    @property
    def version_range(self) -> tuple[int, int]:
        """Oldest and newest weight version that generated a trained token."""
        versions = self.versions[self.runs[0]]
        return int(versions.min()), int(versions.max())

    def offsets(self) -> np.ndarray:
        """int64 [G + 1]: sample i is `tokens[offsets[i]:offsets[i + 1]]`."""

        def build() -> np.ndarray:
            offsets = np.zeros(len(self.lengths) + 1, np.int64)
            np.cumsum(self.lengths, out=offsets[1:])
            return offsets

        return self.cached("offsets", build)

    def sequences(self) -> list[np.ndarray]:
        """The tokens of each sample, views."""
        return [self.tokens[start:end] for start, end in pairwise(self.offsets().tolist())]

    def prompt_lengths(self) -> list[int]:
        """Tokens before each sample's first trained one."""
        starts, offsets = self.runs[0], self.offsets()[:-1]
        lengths: list[int] = (starts[np.searchsorted(starts, offsets)] - offsets).tolist()
        return lengths

    def cached(self, name: str, build: Callable[[], T]) -> T:
        """What `build` returns, built once; for what follows from the group and takes time."""
        if name not in self._cache:
            self._cache[name] = build()
        found: T = self._cache[name]
        return found


def _any(values: np.ndarray) -> bool:
    """As values.any(), which takes several times as long for a group's few values, as all() does."""
    return bool(np.count_nonzero(values))


def _all(values: np.ndarray) -> bool:
    return int(np.count_nonzero(values)) == len(values)
