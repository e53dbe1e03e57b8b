"""Group: the samples of one prompt, checked; the unit of dispatch, of advantages and of the buffer."""

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
from pa_npu.samples.types import Sample, SampleRow, checked

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

    run_seed, iteration, index: with a sample's number they say what was sampled, whatever engine
    did it. index is the dispatch index within the iteration. prompt_id: row of the dataset.
    lengths: int32 [G], tokens of each sample. rewards: float32 [G]. finished: bool [G].
    tokens, component, logprobs, versions: those of Sample, [sum of lengths]. advantages: float32
    [sum of lengths].
    first: the number of the first sample here, in a piece of the group that was dispatched; 0 for
    the whole.
    part: of a whole group, the samples that the replica which gets it trains, from one number to
    before another; None: all.
    columns: the declared ones, each [sum of lengths, *shape].
    weight: those of Sample, [sum of lengths]; None where all are 1.
    placeholders: those of Sample, starts in `tokens`, in their order.
    Advantages are 0, and versions NO_VERSION, where a token is not trained; log-probs are 0 where
    it has no version.
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
                found = (
                    f"{array.dtype} {list(array.shape)}"
                    if isinstance(array, np.ndarray)
                    else type(array).__name__
                )
                raise GroupFormatError(
                    f"{self} {name}: must be a {dtype.name} array [n], found {found}"
                )
        self._check_sizes()
        self._check_values()
        if self.placeholders:
            runs = arranged(self.placeholders, len(self.tokens), self)
            object.__setattr__(self, "placeholders", runs)
            self._check_placeholders()

    @property
    def per_token(self) -> dict[Column, np.ndarray]:
        """All its columns, fixed and declared."""
        return {**{column: getattr(self, column.name) for column in FIXED}, **self.columns}

    @classmethod
    def of_samples(
        cls, samples: Sequence[Sample], rewards: np.ndarray, advantages: np.ndarray, **identity: Any
    ) -> Group:
        """rewards: float32 [G]. advantages: float32 [G], the same for a sample's trained tokens.
        identity: IDENTITY's numbers.
        """
        row = SampleRow.of(samples)
        of_tokens = np.repeat(
            np.asarray(advantages, np.float32), [len(sample.tokens) for sample in samples]
        )
        of_tokens[row.component == 0] = 0
        return cls.of_row(
            row, [sample.finished for sample in samples], rewards, of_tokens, **identity
        )

    @classmethod
    def of_row(
        cls,
        row: SampleRow,
        finished: Sequence[bool],
        rewards: np.ndarray,
        advantages: np.ndarray,
        **identity: Any,
    ) -> Group:
        """finished: of each sample. rewards: float32 [G]. advantages: float32 [tokens]. identity:
        IDENTITY's numbers.
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
        if (shortest := min(self.lengths.tolist())) < 2:
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
        if (lowest := np.minimum.reduce(self.tokens)) < 0:
            raise GroupFormatError(
                f"{self} tokens: token ids must not be negative, lowest is {lowest}"
            )
        self._check_finite("rewards", self.rewards)
        if _any(self.component[self.offsets()[:-1]]):
            raise GroupFormatError(
                f"{self} component: a sample's first token follows from nothing and cannot be "
                "trained"
            )
        if not _all(counts := self.trained_lengths):
            raise GroupFormatError(
                f"{self} component: sample {int(counts.argmin())} has no trained token"
            )
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
        """Versions and advantages: what holds for a stretch's first token holds for all of it."""
        starts = self._stretches[:-1]
        trained, versions, advantages = (
            self.trained[starts],
            self.versions[starts],
            self.advantages[starts],
        )
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
        """numbers: of the values, where these are not all of them."""
        finite = np.isfinite(values)
        if int(np.count_nonzero(finite)) != finite.size:
            position = int(finite.argmin())
            number, value = (
                position if numbers is None else numbers[position],
                values.flat[position],
            )
            raise GroupFormatError(
                f"{self} {name}: values must be finite, number {number} is {value}"
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
        """The same group with some consecutive samples of it."""
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
        """The group with the columns that `makers` make of it (RunColumns.makers).

        Raises GroupFormatError for something else.
        """
        if not makers:
            return self
        values = {column: make(self) for column, make in makers.items()}
        advantages = next(
            (found for one, found in values.items() if one.name == ADVANTAGES.name), self.advantages
        )
        declared = {
            column: found for column, found in values.items() if column.name != ADVANTAGES.name
        }
        return replace(self, advantages=advantages, columns={**self.columns, **declared})

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
        """The samples that `of_samples` was given, views, without rewards. texts: theirs."""
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
        """int64 [G]: tokens of each sample that the leading component trains."""

        def count() -> np.ndarray:
            return np.add.reduceat(self.component == 1, self.offsets()[:-1], dtype=np.int64)

        return self.cached("leading", count)

    @property
    def trained_lengths(self) -> np.ndarray:
        """int64 [G]: trained tokens of each sample."""
        return self.cached(
            "trained", lambda: np.add.reduceat(self.trained, self.offsets()[:-1], dtype=np.int64)
        )

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends), int64 [R]: consecutive trained tokens of one component, version and
        advantage; together all that are trained."""

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
        """Tokens that have a loss."""
        return int(self.trained_lengths.sum())

    @property
    def version_range(self) -> tuple[int, ...]:
        """Oldest and newest weight version that generated a trained token; empty where the policy
        wrote none.
        """
        versions = self.versions[self.runs[0]]
        versions = versions[versions != NO_VERSION]
        return (int(versions.min()), int(versions.max())) if len(versions) else ()

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

    @property
    def prefix_keys(self) -> np.ndarray:
        """[sum of lengths]: equal, from a sample's first on, where two samples begin alike;
        attachments.prefix_keys.
        """
        return self.cached("keys", lambda: prefix_keys(self.tokens, self.placeholders))

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The attachments of all samples, each array once, in the order of their first use."""
        return self.cached("attachments", lambda: distinct(self.placeholders))

    def prompt_lengths(self) -> list[int]:
        """Tokens of each sample before the first that the policy wrote; without any, before its
        first trained one.
        """
        starts, offsets = self.runs[0], self.offsets()[:-1]
        first_starts = starts[np.searchsorted(starts, offsets)]
        if not self.is_all_written:
            written, ends = np.flatnonzero(self.written), self.offsets()[1:]
            first_written = np.append(written, len(self.tokens))[np.searchsorted(written, offsets)]
            first_starts = np.where(first_written < ends, first_written, first_starts)
        lengths: list[int] = (first_starts - offsets).tolist()
        return lengths

    @property
    def is_all_written(self) -> bool:
        """Whether the policy wrote every trained token."""
        return not _any(self.versions[self.runs[0]] == NO_VERSION)

    def cached(self, name: str, build: Callable[[], T]) -> T:
        """Returns the result of `build`, built once; for results that follow from the group and
        take time.
        """
        if name not in self._cache:
            self._cache[name] = build()
        found: T = self._cache[name]
        return found


def _any(values: np.ndarray) -> bool:
    """As values.any(), which takes several times as long for a group's few values, as all() does."""
    return bool(np.count_nonzero(values))


def _all(values: np.ndarray) -> bool:
    return int(np.count_nonzero(values)) == len(values)
