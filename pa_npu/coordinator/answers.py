"""Compares the answers of engines for a group with the samples that leave the coordinator (I2).

    engine ──answer──> noted: seed, length, version, digests ──> environment ──> samples ──> group
                         └───────────────── compared ──────────────────────────────────┘

Every stretch of trained tokens that the policy wrote must be whole answers of the version that they
name, each trained once, and where the environment trains answers in their context, behind the very
tokens that the engine was asked with.
Seeds must be those of the group's place in the run, by a second derivation: were they those of
another iteration, the policy
would answer as it has before. An environment of your own that trains parts of answers on purpose
says so: `trains_whole_answers = False` on its class.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import Environment
from pa_npu.errors import InvariantViolation
from pa_npu.samples.group import Group

# Two answers with different seeds and the same tokens: less likely than e^-40 is no chance.
_NO_CHANCE = -40.0
# Of a context that is kept as it is, which takes less time than its digest.
_SHORT_BYTES = 2048


@dataclass(frozen=True)
class EngineAnswer:
    """One answer of an engine. sample, turn: what it was asked for. length: its tokens. content:
    their bytes and those of their log-probs, copied, so that nothing later changes both sides.
    version: of its weights; None if the engine does not state it. context: digest of the tokens
    that the engine was asked with; empty if nobody compares them.
    """

    sample: int
    turn: int
    seed: int
    length: int
    content: bytes
    version: int | None
    context: bytes

    @property
    def logprob(self) -> float:
        """The sum of its log-probs."""
        values = np.frombuffer(self.content, np.float32, offset=4 * self.length)
        return float(np.sum(values, dtype=np.float64))


_Part = tuple[int, bytes, bytes]
"""Length, content and context of an answer."""


class Answers:
    """A group's.

    all_trained: whether every answer must be trained. whole: whether a trained one must be so as a
    whole. is_counted: whether the environment says how many tokens are. in_context: whether an
    answer must be trained behind the tokens that the engine was asked with.
    """

    def __init__(
        self,
        *,
        whole: bool = True,
        all_trained: bool = False,
        is_counted: bool = False,
        in_context: bool = False,
    ) -> None:
        self._in_context = whole and in_context
        self._is_counted = is_counted
        self._num_trained: int | None = None
        self._whole = whole
        self._all_trained = all_trained
        self._answers: list[EngineAnswer] = []

    def context_of(self, tokens: npt.NDArray[np.int32]) -> bytes:
        """Returns the digest of what an engine is asked with, or nothing where it is not compared."""
        return _context(tokens) if self._in_context else b""

    def note(
        self, sample: int, turn: int, seed: int, generation: Generation, context: bytes = b""
    ) -> None:
        """Notes an answer. context: as `context_of` gives it."""
        self._answers.append(
            EngineAnswer(
                sample=sample,
                turn=turn,
                seed=seed,
                length=len(generation.tokens),
                content=_content(generation.tokens, generation.logprobs),
                version=generation.version,
                context=context,
            )
        )

    def expect(self, num_trained: int | None) -> None:
        """num_trained: as the environment says it (Generate.num_trained)."""
        self._num_trained = num_trained if self._is_counted else None

    def check_seeds(self, run_seed: int, iteration: int, index: int) -> None:
        """Raises InvariantViolation where a seed is not the one of this group's place, or two
        answers are one.
        """
        fault = f"I2 exactly once: group {index} of iteration {iteration}"
        group_seed = _hash(b"pa_npu.rollout", run_seed, iteration, index)
        for answer in self._answers:
            expected = _seed_of(group_seed, answer.sample, answer.turn)
            if answer.seed != expected:
                raise InvariantViolation(
                    f"{fault}: sample {answer.sample}, turn {answer.turn} was asked for with the "
                    f"seed {answer.seed} instead of {expected}; the policy would answer as it does "
                    "for another place"
                )
        first: dict[bytes, EngineAnswer] = {}
        for answer in self._answers:
            earlier = first.setdefault(answer.content, answer)
            if earlier.seed != answer.seed and answer.logprob < _NO_CHANCE:
                raise InvariantViolation(
                    f"{fault}: samples {earlier.sample} and {answer.sample} have the same "
                    f"{answer.length} tokens and log-probs from different seeds, by chance with a "
                    f"probability of e^{answer.logprob:.0f}; the engine answered one request twice"
                )

    def check(self, group: Group) -> None:
        """Raises InvariantViolation unless the group trains these answers, each once."""
        if not self._whole:
            return
        fault = f"I2 exactly once: {group}"
        left = Counter((answer.length, answer.content, answer.context) for answer in self._answers)
        known = {(answer.length, answer.content): answer for answer in self._answers}
        lengths = sorted({length for length, _, _ in left}, reverse=True)
        bounds = group.offsets()
        for number, begin, end in _trained_stretches(group.written, bounds):
            start = int(bounds[number])
            row_end = int(bounds[number + 1])
            row = _Row(group.tokens[start:row_end], group.logprobs[start:row_end], self._in_context)
            first = begin - start
            last = end - start
            parts = _split(row, first, last, left, lengths)
            if parts is None:
                why = self._why(row, first, last, known)
                raise InvariantViolation(
                    f"{fault}: {last - first} trained tokens of sample {number}, from its token "
                    f"{first} on, are no answers of an engine: {why}; an environment that "
                    "trains parts of answers sets trains_whole_answers = False on its class"
                )
            for part in parts:
                left[part] -= 1
                length, content, _ = part
                version = known[length, content].version
                versions = group.versions[start + first : start + first + length]
                if version is not None and (versions != version).any():
                    raise InvariantViolation(
                        f"I1 version: {group}: {length} tokens of sample {number}, from its "
                        f"token {first} on, are said to be of versions {versions.min()} to "
                        f"{versions.max()}, where the engine wrote them with version {version}"
                    )
                first += length
        num_trained = int(np.count_nonzero(group.written))
        if self._num_trained is not None and num_trained != self._num_trained:
            raise InvariantViolation(
                f"{fault}: its samples train {num_trained} tokens, where the turns of its sessions "
                f"have {self._num_trained}"
            )
        if self._all_trained and (missing := sum(left.values())):
            raise InvariantViolation(
                f"{fault}: {missing} of {len(self._answers)} answers of engines are not trained"
            )

    def _why(
        self, row: _Row, first: int, last: int, known: dict[tuple[int, bytes], EngineAnswer]
    ) -> str:
        """Returns why a stretch of trained tokens is no answers."""
        length = last - first
        answer = known.get((length, row.content(first, last)))
        if answer is not None and answer.context != row.context(first):
            return (
                f"the engine wrote them for sample {answer.sample}, turn {answer.turn}, behind "
                f"other tokens than the {first} that stand before them"
            )
        if answer is not None:
            return "it is trained a second time"
        lengths = [answer.length for answer in self._answers]
        if length in lengths:
            return f"the one of {length} tokens has others, or other log-probs"
        return f"the engines' have {', '.join(map(str, sorted(lengths)[:16]))} tokens"


def answers_of(environment: Environment) -> Answers:
    """Returns the answers of a group for which this environment makes samples."""
    kind = type(environment)
    whole = getattr(kind, "trains_whole_answers", True)
    # a subclass may leave some out
    declared = vars(kind)
    return Answers(
        whole=whole,
        all_trained=declared.get("trains_all_answers", False),
        is_counted=declared.get("trains_all_turns", False),
        in_context=declared.get("trains_in_context", False),
    )


@dataclass(frozen=True, eq=False)
class _Row:
    """All tokens of a sample, and their log-probs. in_context: whether contexts are compared."""

    tokens: npt.NDArray[Any]
    logprobs: npt.NDArray[Any]
    in_context: bool

    def context(self, first: int) -> bytes:
        """Returns the digest of the tokens before `first`, as Answers.context_of."""
        return _context(self.tokens[:first]) if self.in_context else b""

    def content(self, first: int, last: int) -> bytes:
        """Returns the content of the tokens from `first` to `last`, as EngineAnswer.content."""
        return _content(self.tokens[first:last], self.logprobs[first:last])


def _split(
    row: _Row, first: int, last: int, left: Counter[_Part], lengths: Sequence[int]
) -> list[_Part] | None:
    """Returns the answers that the tokens from `first` to `last` are, one after another; None if
    they are none.
    """
    if first == last:
        return []
    context = row.context(first)
    # nearly always the whole stretch is one answer
    whole = (last - first, row.content(first, last), context)
    if left[whole] > 0:
        return [whole]
    for length in lengths:
        if length >= last - first or not length:
            continue
        end = first + length
        part = (length, row.content(first, end), context)
        if left[part] > 0:
            rest = _split(row, end, last, left - Counter([part]), lengths)
            if rest is not None:
                return [part, *rest]
    return None


def _context(tokens: npt.NDArray[Any]) -> bytes:
    """Returns the tokens' bytes, or the digest of many, as an agent's turns have them."""
    content = np.ascontiguousarray(tokens, np.int32)
    if content.nbytes <= _SHORT_BYTES:
        return content.tobytes()
    return hashlib.blake2b(content.data, digest_size=16).digest()


def _content(tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> bytes:
    """Returns the bytes of tokens, int32, and log-probs, float32. Log-probs that were not asked for
    are 0, as a sample has them.
    """
    if len(logprobs):
        values = np.ascontiguousarray(logprobs, np.float32)
    else:
        values = np.zeros(len(tokens), np.float32)
    return b"".join((np.ascontiguousarray(tokens, np.int32).data, values.data))


def _trained_stretches(
    written: npt.NDArray[np.bool_], bounds: npt.NDArray[Any]
) -> Iterator[tuple[int, int, int]]:
    """Yields number of the sample, begin and end of each stretch of tokens that the policy wrote.

    written: of all tokens of a group. bounds: where its samples begin and end, [samples + 1].
    """
    starts = written.copy()
    starts[1:] &= ~written[:-1]
    # a stretch ends with its sample, though the next one may begin with a written token
    inner = bounds[1:-1]
    inner = inner[inner < len(written)]
    starts[inner] = written[inner]
    begins = np.flatnonzero(starts)
    breaks = np.flatnonzero(starts | ~written)
    after = np.searchsorted(breaks, begins, side="right")
    ends = np.append(breaks, len(written))[after]
    numbers = np.searchsorted(bounds, begins, side="right") - 1
    yield from zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True)


def _seed_of(group_seed: int, sample: int, turn: int) -> int:
    """Returns the seed of a sample's turn, written out from its definition: a hash of the group's
    place, and for first turns of samples the next numbers.
    """
    if turn == 0:
        return group_seed + sample
    return _hash(b"pa_npu.turn", group_seed, sample, turn)


def _hash(purpose: bytes, *numbers: int) -> int:
    data = b"".join(struct.pack("<Q", number) for number in numbers)
    return (
        int.from_bytes(hashlib.blake2b(data, digest_size=4, person=purpose).digest(), "little") // 2
    )
