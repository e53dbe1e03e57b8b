"""Group: the checked samples of one prompt; the unit of dispatch, of advantages and of the buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from pa_npu.algorithm.algorithm import ScoredSamples
from pa_npu.samples.attachments import (
    Attachment,
    Placeholders,
    arranged,
    distinct,
    prefix_keys,
    within,
)
from pa_npu.samples.columns import (
    ADVANTAGES,
    FIXED,
    LOGPROBS,
    NO_VERSION,
    VERSIONS,
    WEIGHT,
    Column,
    GroupFormatError,
    Values,
)
from pa_npu.samples.types import Sample, SampleRow, checked, described_array

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
class Group:
    """The samples of one prompt, their arrays one after another: the unit of dispatch, of
    advantages and of the buffer.

    Construction validates everything, so a Group that exists is well-formed on both sides of the
    wire.

    run_seed, iteration, index: with a sample's number they say what was sampled, whichever engine
    sampled it. index is the dispatch index within the iteration.
    prompt_id: row of the dataset.
    lengths: int32 [G], tokens of each sample. rewards: float32 [G]. finished: bool [G].
    tokens, component, logprobs, versions: as in Sample, [sum of lengths].
    advantages: float32 [sum of lengths].
    first: the number of this piece's first sample in the group that was dispatched; 0 for a whole
    group.
    part: the samples [first, last) of a whole group that the replica which gets it trains; None
    means all.
    columns: the declared columns, each [sum of lengths, *shape].
    weight: as in Sample, [sum of lengths]; None if all are 1.
    placeholders: as in Sample, in order, with starts counted in `tokens`.

    Tokens that are not trained have the advantage 0 and NO_VERSION. Tokens without a version have
    the log-prob 0.
    """

    run_seed: int
    iteration: int
    index: int
    prompt_id: int
    lengths: np.ndarray
    tokens: np.ndarray
    component: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    finished: np.ndarray
    first: int = 0
    part: tuple[int, int] | None = None
    columns: Values = field(default_factory=dict)
    weight: np.ndarray | None = None
    placeholders: Sequence[Placeholders] = ()
    _cache: dict[str, Any] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in IDENTITY:
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
                raise GroupFormatError(
                    f"group {name}: {value!r} must be an integer between 0 and 2**63 - 1"
                )
            object.__setattr__(self, name, int(value))
        for name, dtype in PER_SAMPLE.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise GroupFormatError(
                    f"{self} {name}: must be a {dtype.name} array [n], found "
                    f"{described_array(array)}"
                )
        self._check_sizes()
        self._check_values()
        if self.placeholders:
            runs = arranged(self.placeholders, len(self.tokens), self)
            object.__setattr__(self, "placeholders", runs)
            self._check_placeholders()

    @property
    def per_token(self) -> dict[Column, np.ndarray]:
        """All columns of the group, the fixed and the declared ones."""
        fixed = {column: getattr(self, column.name) for column in FIXED}
        return {**fixed, **self.columns}

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], rewards: np.ndarray, advantages: np.ndarray, **identity: Any
    ) -> Group:
        """Makes a group in which all trained tokens of a sample have the same advantage.

        rewards: float32 [G]. advantages: float32 [G]. identity: the numbers of IDENTITY.
        """
        row = SampleRow.from_samples(samples)
        token_advantages = np.repeat(
            np.asarray(advantages, np.float32), [len(sample.tokens) for sample in samples]
        )
        token_advantages[row.component == 0] = 0
        finished = [sample.finished for sample in samples]
        return cls.from_row(row, finished, rewards, token_advantages, **identity)

    @classmethod
    def from_row(
        cls,
        row: SampleRow,
        finished: Sequence[bool],
        rewards: np.ndarray,
        advantages: np.ndarray,
        **identity: Any,
    ) -> Group:
        """Makes a group of a row without copying its arrays.

        finished: one for each sample. rewards: float32 [G]. advantages: float32 [tokens].
        identity: the numbers of IDENTITY.
        """
        return cls(
            **identity,
            lengths=np.diff(row.ends, prepend=0).astype(np.int32),
            tokens=row.tokens,
            component=row.component,
            logprobs=row.logprobs,
            versions=row.versions,
            advantages=advantages,
            rewards=np.asarray(rewards, np.float32),
            finished=np.array(finished, np.bool_),
            columns=row.columns,
            weight=row.weight,
            placeholders=row.placeholders,
        )

    def _check_sizes(self) -> None:
        num_samples = len(self.lengths)
        if num_samples == 0:
            raise GroupFormatError(f"{self} lengths: a group needs at least one sample")
        shortest = min(self.lengths.tolist())
        if shortest < 2:
            raise GroupFormatError(
                f"{self} lengths: a sample needs a prompt and a trained token, shortest is "
                f"{shortest}"
            )
        for name in PER_SAMPLE:
            if len(getattr(self, name)) != num_samples:
                raise GroupFormatError(
                    f"{self} {name}: {len(getattr(self, name))} values for {num_samples} samples"
                )
        if self.part is not None and not 0 <= self.part[0] < self.part[1] <= num_samples:
            raise GroupFormatError(
                f"{self} part: {list(self.part)} are no samples of {num_samples}"
            )
        total = int(self.offsets()[-1])
        for column in FIXED:
            checked(column, getattr(self, column.name), total, self)
        if self.weight is not None:
            checked(WEIGHT, self.weight, total, self)
        for column, values in self.columns.items():
            checked(column, values, total, self)

    def _check_values(self) -> None:
        lowest = np.minimum.reduce(self.tokens)
        if lowest < 0:
            raise GroupFormatError(
                f"{self} tokens: token ids must not be negative, lowest is {lowest}"
            )
        self._check_finite("rewards", self.rewards)
        if _any(self.component[self.offsets()[:-1]]):
            raise GroupFormatError(
                f"{self} component: a sample's first token follows from nothing and cannot be "
                "trained"
            )
        if not _all(self.trained_lengths):
            untrained = int(self.trained_lengths.argmin())
            raise GroupFormatError(f"{self} component: sample {untrained} has no trained token")
        self._check_stretches()
        for column, values in ((LOGPROBS, self.logprobs), *self.columns.items()):
            if column.is_float:
                self._check_finite(column.name, values)
            if column is LOGPROBS:
                self._check_elsewhere(column, values, self.written, "that the policy did not write")
            elif column.tokens == "trained":
                self._check_elsewhere(column, values, self.trained)
        if self.weight is not None:
            self._check_finite(WEIGHT.name, self.weight)
            self._check_elsewhere(WEIGHT, self.weight, self.trained)

    def _check_stretches(self) -> None:
        """Checks versions and advantages; what holds for a stretch's first token holds for all of
        it.
        """
        starts = self._stretches[:-1]
        trained = self.trained[starts]
        versions = self.versions[starts]
        advantages = self.advantages[starts]
        self._check_finite("advantages", advantages, starts)
        if _any(versions < NO_VERSION):
            raise GroupFormatError(
                f"{self} versions: a weight version is at least 0, or {NO_VERSION} where the "
                f"policy did not write the token; lowest is {versions.min()}"
            )
        self._check_elsewhere(ADVANTAGES, advantages, trained)
        self._check_elsewhere(VERSIONS, versions, trained)

    def _check_placeholders(self) -> None:
        offsets = self.offsets()
        for run in self.placeholders:
            sample = int(offsets.searchsorted(run.start, side="right")) - 1
            if run.end > offsets[sample + 1]:
                raise GroupFormatError(
                    f"{self} {run}: must lie within sample {sample}, which ends at token "
                    f"{offsets[sample + 1]}; correct start or length"
                )
            if _any(self.written[run.start : run.end]):
                raise GroupFormatError(
                    f"{self} {run}: the policy wrote some of them, and what it writes is a token "
                    "whatever its id; attach arrays to tokens that are shown"
                )

    def _check_finite(
        self, name: str, values: np.ndarray, numbers: np.ndarray | None = None
    ) -> None:
        """Raises GroupFormatError for a value that is not finite.

        numbers: the tokens that the values belong to, if `values` are not those of all tokens.
        """
        finite = np.isfinite(values)
        if int(np.count_nonzero(finite)) != finite.size:
            position = int(finite.argmin())
            number = position if numbers is None else numbers[position]
            raise GroupFormatError(
                f"{self} {name}: values must be finite, number {number} is {values.flat[position]}"
            )

    def _check_elsewhere(
        self,
        column: Column,
        values: np.ndarray,
        has_value: np.ndarray,
        others: str = "that are not trained",
    ) -> None:
        differs = values != column.elsewhere
        if column.shape:
            differs = differs.reshape(len(values), -1).any(axis=1)
        if _any(differs > has_value):  # bool > bool: the one without the other
            raise GroupFormatError(
                f"{self} {column.name}: must be {column.elsewhere} for tokens {others}"
            )

    def __str__(self) -> str:
        return f"group {self.index} of iteration {self.iteration} (prompt {self.prompt_id})"

    def __getitem__(self, span: slice) -> Group:
        """Returns the piece of the group that has these consecutive samples."""
        offsets = self.offsets()
        first, last, _ = span.indices(self.num_samples)
        rows = slice(int(offsets[first]), int(offsets[last]))
        return replace(
            self,
            first=self.first + first,
            part=None,
            **{name: getattr(self, name)[rows] for name in PER_TOKEN},
            **{name: getattr(self, name)[first:last] for name in PER_SAMPLE},
            columns={column: values[rows] for column, values in self.columns.items()},
            weight=None if self.weight is None else self.weight[rows],
            placeholders=within(self.placeholders, rows.start, rows.stop),
        )

    def made(self, makers: Mapping[Column, Callable[[Group], np.ndarray]]) -> Group:
        """Returns the group with the columns that `makers` compute from it (RunColumns.makers).

        Raises GroupFormatError for values that do not fit their column.
        """
        if not makers:
            return self
        advantages = self.advantages
        columns = dict(self.columns)
        for column, make in makers.items():
            values = make(self)
            if column.name == ADVANTAGES.name:
                advantages = values
            else:
                columns[column] = values
        return replace(self, advantages=advantages, columns=columns)

    @property
    def scored(self) -> ScoredSamples:
        """The group as credit sees it."""
        return ScoredSamples(
            rewards=self.rewards,
            lengths=self.lengths,
            tokens=self.tokens,
            component=self.component,
            columns={column.name: values for column, values in self.columns.items()},
        )

    def samples(self, texts: Sequence[str]) -> list[Sample]:
        """Returns the group's samples without rewards, as views. texts: one for each sample."""
        ends = self.offsets()[1:].tolist()
        row = SampleRow(
            tokens=self.tokens,
            component=self.component,
            logprobs=self.logprobs,
            versions=self.versions,
            ends=ends,
            columns=self.columns,
            weight=self.weight,
            placeholders=self.placeholders,
        )
        return row.cut([bool(finished) for finished in self.finished], texts)

    @property
    def num_samples(self) -> int:
        """G."""
        return len(self.lengths)

    @property
    def trained(self) -> np.ndarray:
        """bool [sum of lengths]: whether some component trains the token."""
        return self.cached("is trained", lambda: self.component != 0)

    @property
    def written(self) -> np.ndarray:
        """bool [sum of lengths]: whether the policy wrote the token, and it is trained."""
        return self.cached("is written", lambda: self.versions != NO_VERSION)

    @property
    def leading_lengths(self) -> np.ndarray:
        """int64 [G]: number of tokens of each sample that the leading component trains."""

        def count() -> np.ndarray:
            return np.add.reduceat(self.component == 1, self.offsets()[:-1], dtype=np.int64)

        return self.cached("leading", count)

    @property
    def trained_lengths(self) -> np.ndarray:
        """int64 [G]: number of trained tokens of each sample."""

        def count() -> np.ndarray:
            return np.add.reduceat(self.trained, self.offsets()[:-1], dtype=np.int64)

        return self.cached("trained", count)

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends), int64 [R]: the runs of consecutive trained tokens with one component,
        version and advantage. Together they are all trained tokens.
        """

        def build() -> tuple[np.ndarray, np.ndarray]:
            bounds = self._stretches
            trained = self.trained[bounds[:-1]]
            return bounds[:-1][trained], bounds[1:][trained]

        return self.cached("runs", build)

    @property
    def _stretches(self) -> np.ndarray:
        """int64 [S + 1]: bounds of stretches of consecutive tokens with the same component, version
        and advantage.
        """

        def build() -> np.ndarray:
            changes = np.empty(len(self.tokens) + 1, np.bool_)
            changes[0] = changes[-1] = True
            inner = changes[1:-1]
            np.not_equal(self.component[1:], self.component[:-1], out=inner)
            inner |= self.versions[1:] != self.versions[:-1]
            bits = self.advantages.view(np.int32)  # 0.0 and -0.0 are two
            inner |= bits[1:] != bits[:-1]
            return np.flatnonzero(changes)

        return self.cached("stretches", build)

    @property
    def num_trained(self) -> int:
        """Number of tokens that have a loss."""
        return int(self.trained_lengths.sum())

    @property
    def version_range(self) -> tuple[int, ...]:
        """The oldest and the newest weight version that generated a trained token; empty if the
        policy wrote none.
        """
        versions = self.versions[self.runs[0]]
        versions = versions[versions != NO_VERSION]
        if not len(versions):
            return ()
        return int(versions.min()), int(versions.max())

    def offsets(self) -> np.ndarray:
        """int64 [G + 1]: sample i is `tokens[offsets[i]:offsets[i + 1]]`."""

        def build() -> np.ndarray:
            offsets = np.zeros(len(self.lengths) + 1, np.int64)
            np.cumsum(self.lengths, out=offsets[1:])
            return offsets

        return self.cached("offsets", build)

    def sequences(self) -> list[np.ndarray]:
        """Returns the tokens of each sample, views."""
        return [self.tokens[start:end] for start, end in pairwise(self.offsets().tolist())]

    @property
    def prefix_keys(self) -> np.ndarray:
        """Keys [sum of lengths] to compare beginnings by: two samples begin alike as far as their
        keys are equal.

        The tokens themselves if nothing is attached, else int64 (attachments.prefix_keys).
        """
        if not self.placeholders:
            return self.tokens
        return self.cached("keys", lambda: prefix_keys(self.tokens, self.placeholders))

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The attachments of all samples, each array once, in the order of their first use."""
        return self.cached("attachments", lambda: distinct(self.placeholders))

    def prompt_lengths(self) -> list[int]:
        """Returns the number of tokens of each sample before the first one that the policy wrote;
        if it wrote none, before the first trained one.
        """
        starts = self.runs[0]
        offsets = self.offsets()[:-1]
        first_starts = starts[np.searchsorted(starts, offsets)]
        if not self.is_all_written:
            written = np.flatnonzero(self.written)
            first_written = np.append(written, len(self.tokens))[np.searchsorted(written, offsets)]
            has_written = first_written < self.offsets()[1:]
            first_starts = np.where(has_written, first_written, first_starts)
        lengths: list[int] = (first_starts - offsets).tolist()
        return lengths

    @property
    def is_all_written(self) -> bool:
        """Returns whether the policy wrote every trained token."""
        return not _any(self.versions[self.runs[0]] == NO_VERSION)

    def cached(self, name: str, build: Callable[[], T]) -> T:
        """Returns the result of `build`, which is called once. For results that follow from the
        group and take time.
        """
        if name not in self._cache:
            self._cache[name] = build()
        result: T = self._cache[name]
        return result


def _any(values: np.ndarray) -> bool:
    """Does what values.any() does. That, like all(), takes several times as long for few values."""
    return bool(np.count_nonzero(values))


def _all(values: np.ndarray) -> bool:
    return int(np.count_nonzero(values)) == len(values)
