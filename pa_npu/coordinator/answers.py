"""Compares the answers of engines for a group with the samples that leave the coordinator (I2).

    engine ──answer──> noted: seed, length, digest of tokens and log-probs ──> environment ──> samples ──> group
                         └───────────────── compared ────────────────────────────────────────────┘

Every stretch of trained tokens that the policy wrote must be whole answers, each trained once.
Seeds must be those of the group's place in the run, by a second derivation: were they those of
another iteration, the policy
would answer as it has before. An environment of your own that trains parts of answers on purpose
says so: `trains_whole_answers = False` on its class.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import Generation
from pa_npu.environments.protocol import Environment
from pa_npu.errors import InvariantViolation
from pa_npu.samples.group import Group

# Two answers with different seeds and the same tokens: less likely than e^-40 is no chance.
_NO_CHANCE = -40.0


@dataclass(frozen=True)
class EngineAnswer:
    """One answer of an engine. sample, turn: what it was asked for. digest: of its tokens and
    log-probs. logprob: its sum.
    """

    sample: int
    turn: int
    seed: int
    length: int
    digest: bytes
    logprob: float


class Answers:
    """A group's.

    all_trained: whether every answer must be trained. whole: whether a trained one must be so as a
    whole. is_counted: whether the environment says how many tokens are.
    """

    def __init__(
        self, *, whole: bool = True, all_trained: bool = False, is_counted: bool = False
    ) -> None:
        self._is_counted = is_counted
        self._num_trained: int | None = None
        self._whole = whole
        self._all_trained = all_trained
        self._answers: list[EngineAnswer] = []

    def note(self, sample: int, turn: int, seed: int, generation: Generation) -> None:
        digest = _digest(generation.tokens, generation.logprobs)
        logprob = float(np.sum(generation.logprobs, dtype=np.float64))
        self._answers.append(
            EngineAnswer(sample, turn, seed, len(generation.tokens), digest, logprob)
        )

    def expect(self, num_trained: int | None) -> None:
        """num_trained: as the environment says it (Generate.num_trained)."""
        self._num_trained = num_trained if self._is_counted else None

    def check_seeds(self, run_seed: int, iteration: int, index: int) -> None:
        """Raises InvariantViolation where a seed is not the one of this group's place, or two
        answers are one.
        """
        fault = f"I2 exactly once: group {index} of iteration {iteration}"
        for answer in self._answers:
            expected = _seed_of(run_seed, iteration, index, answer.sample, answer.turn)
            if answer.seed != expected:
                raise InvariantViolation(
                    f"{fault}: sample {answer.sample}, turn {answer.turn} was asked for with the "
                    f"seed {answer.seed} instead of {expected}; the policy would answer as it does "
                    "for another place"
                )
        first: dict[bytes, EngineAnswer] = {}
        for answer in self._answers:
            earlier = first.setdefault(answer.digest, answer)
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
        left = Counter((answer.length, answer.digest) for answer in self._answers)
        known = set(left)
        lengths = sorted({length for length, _ in left}, reverse=True)
        bounds = group.offsets().tolist()
        for number, (start, end) in enumerate(pairwise(bounds)):
            trained = np.flatnonzero(
                np.diff(
                    np.concatenate([[False], group.written[start:end], [False]]).astype(np.int8)
                )
            )
            for first, last in trained.reshape(-1, 2).tolist():
                tokens = group.tokens[start + first : start + last]
                logprobs = group.logprobs[start + first : start + last]
                parts = _split(tokens, logprobs, left, lengths)
                if parts is None:
                    twice = (len(tokens), _digest(tokens, logprobs)) in known
                    why = "it is trained a second time" if twice else self._nearest(len(tokens))
                    raise InvariantViolation(
                        f"{fault}: {len(tokens)} trained tokens of sample {number}, from its token "
                        f"{first} on, are no answers of an engine: {why}; an environment that "
                        "trains parts of answers sets trains_whole_answers = False on its class"
                    )
                left.subtract(parts)
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

    def _nearest(self, length: int) -> str:
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
    )


def _split(
    tokens: npt.NDArray[Any],
    logprobs: npt.NDArray[Any],
    left: Counter[tuple[int, bytes]],
    lengths: Sequence[int],
) -> list[tuple[int, bytes]] | None:
    """Returns the answers that these tokens are, one after another; None where they are none."""
    if not len(tokens):
        return []
    for length in lengths:
        if length > len(tokens) or not length:
            continue
        part = (length, _digest(tokens[:length], logprobs[:length]))
        if left[part] > 0:
            rest = _split(tokens[length:], logprobs[length:], left - Counter([part]), lengths)
            if rest is not None:
                return [part, *rest]
    return None


def _digest(tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> bytes:
    """Log-probs that were not asked for are 0, as a sample has them."""
    values = np.zeros(len(tokens), np.float32)
    if len(logprobs):
        values[:] = logprobs
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16)
    digest.update(values.tobytes())
    return digest.digest()


def _seed_of(run_seed: int, iteration: int, index: int, sample: int, turn: int) -> int:
    """Returns the seed of a sample's turn, written out from its definition: a hash of the place,
    and for first turns of samples the next numbers.
    """
    group = _hash(b"pa_npu.rollout", run_seed, iteration, index)
    return group + sample if turn == 0 else _hash(b"pa_npu.turn", group, sample, turn)


def _hash(purpose: bytes, *numbers: int) -> int:
    data = b"".join(struct.pack("<Q", number) for number in numbers)
    return (
        int.from_bytes(hashlib.blake2b(data, digest_size=4, person=purpose).digest(), "little") // 2
    )
