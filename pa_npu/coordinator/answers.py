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
from typing import Any, NamedTuple

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

_WRITTEN = b"\x01"
_NOT_WRITTEN = b"\x00"


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
        rows = _Rows(group, self._in_context)
        versions = {answer.version for answer in self._answers}
        is_of_one_version = len(versions) == 1 and rows.are_of_version(versions.pop())
        for stretch in _trained_stretches(group.written, group.offsets()):
            parts = _split(rows, stretch, left, lengths)
            if parts is None:
                why = self._why(rows, stretch, known)
                raise InvariantViolation(
                    f"{fault}: {stretch.length} trained tokens of sample {stretch.sample}, from "
                    f"its token {stretch.place} on, are no answers of an engine: {why}; an "
                    "environment that trains parts of answers sets trains_whole_answers = False "
                    "on its class"
                )
            begin = stretch.begin
            for part in parts:
                left[part] -= 1
                length, content, _ = part
                version = known[length, content].version
                if not is_of_one_version and version is not None:
                    self._check_version(group, stretch, begin, begin + length, version)
                begin += length
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

    def _check_version(
        self, group: Group, stretch: _Stretch, begin: int, end: int, version: int
    ) -> None:
        """Raises InvariantViolation unless all tokens of an answer are said to be of its version.

        begin, end: of the answer, in the group.
        """
        versions = group.versions[begin:end]
        if (versions != version).any():
            place = stretch.place + begin - stretch.begin
            raise InvariantViolation(
                f"I1 version: {group}: {end - begin} tokens of sample {stretch.sample}, from its "
                f"token {place} on, are said to be of versions {versions.min()} to "
                f"{versions.max()}, where the engine wrote them with version {version}"
            )

    def _why(
        self, rows: _Rows, stretch: _Stretch, known: dict[tuple[int, bytes], EngineAnswer]
    ) -> str:
        """Returns why a stretch of trained tokens is no answers."""
        length = stretch.length
        answer = known.get((length, rows.content(stretch.begin, stretch.end)))
        if answer is not None and answer.context != rows.context(stretch, stretch.begin):
            return (
                f"the engine wrote them for sample {answer.sample}, turn {answer.turn}, behind "
                f"other tokens than the {stretch.place} that stand before them"
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


class _Stretch(NamedTuple):
    """Tokens that the policy wrote, one behind another. sample: theirs. begin, end: in the group.
    row: where the sample begins in the group.
    """

    sample: int
    begin: int
    end: int
    row: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def place(self) -> int:
        """Where it begins in its sample."""
        return self.begin - self.row


class _Rows:
    """All tokens of a group, and their log-probs, as bytes, which are sliced in a tenth of the time
    that arrays take.
    """

    def __init__(self, group: Group, in_context: bool) -> None:
        """in_context: whether contexts are compared."""
        self._group = group
        self._in_context = in_context
        self._tokens = np.ascontiguousarray(group.tokens, np.int32).tobytes()
        self._logprobs = np.ascontiguousarray(group.logprobs, np.float32).tobytes()

    def are_of_version(self, version: int | None) -> bool:
        """Returns whether every token that the policy wrote is of this version, or nobody knows
        one.
        """
        if version is None:
            return True
        return bool((self._group.versions[self._group.written] == version).all())

    def context(self, stretch: _Stretch, begin: int) -> bytes:
        """Returns the digest of the sample's tokens before `begin`, as Answers.context_of."""
        if not self._in_context:
            return b""
        return _context(self._group.tokens[stretch.row : begin])

    def content(self, begin: int, end: int) -> bytes:
        """Returns the content of the tokens from `begin` to `end`, as EngineAnswer.content."""
        return self._tokens[4 * begin : 4 * end] + self._logprobs[4 * begin : 4 * end]


def _split(
    rows: _Rows, stretch: _Stretch, left: Counter[_Part], lengths: Sequence[int]
) -> list[_Part] | None:
    """Returns the answers that a stretch is, one after another; None if it is none."""
    if not stretch.length:
        return []
    context = rows.context(stretch, stretch.begin)
    # nearly always the whole stretch is one answer
    whole = (stretch.length, rows.content(stretch.begin, stretch.end), context)
    if left[whole] > 0:
        return [whole]
    for length in lengths:
        if length >= stretch.length or not length:
            continue
        end = stretch.begin + length
        part = (length, rows.content(stretch.begin, end), context)
        if left[part] > 0:
            rest = _split(rows, stretch._replace(begin=end), left - Counter([part]), lengths)
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
) -> Iterator[_Stretch]:
    """Yields each stretch of tokens that the policy wrote.

    written: of all tokens of a group. bounds: where its samples begin and end, [samples + 1].
    """
    # searching bytes takes a fifth of the time of numpy's small calls
    marks = written.astype(np.bool_, copy=False).tobytes()
    limits = bounds.tolist()
    sample = 0
    begin = marks.find(_WRITTEN)
    while begin >= 0:
        while limits[sample + 1] <= begin:
            sample += 1
        end = marks.find(_NOT_WRITTEN, begin)
        if end < 0:
            end = len(marks)
        # a stretch ends with its sample, though the next one may begin with a written token
        end = min(end, limits[sample + 1])
        yield _Stretch(sample, begin, end, limits[sample])
        begin = marks.find(_WRITTEN, end)


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
