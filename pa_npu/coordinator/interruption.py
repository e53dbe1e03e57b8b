"""Responses that go on under newer weights (schedule.on_publish=continue): in parts, each by one version, that end by number.

    version v                   version v + 1               of iteration v + 1, with max_staleness = 1
    at most c tokens     ──>    the rest                    (c: schedule.tokens_per_version)

While a version is not the one that trains the response, it writes at most c tokens of it; the version that does writes the rest.
So a publish waits for c decode steps at most, long responses are written beside the next iterations' short ones, and which version
wrote which token follows from numbers, not from when a publish came: runs with order=prompt are reproducible. A part is a request
of its own: its prompt is everything before it, so that no key or value of older weights is used, and its log-probs are those of
the version that sampled it.

What has been written of groups that are not trained yet goes into checkpoints; a run that continues begins with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pa_npu.control.tasks import gather
from pa_npu.coordinator.variants import Variant
from pa_npu.engines.group_session import GroupSession
from pa_npu.engines.handing_on import Decode
from pa_npu.engines.pool import Lease
from pa_npu.engines.protocol import Generation, Sampling
from pa_npu.environments.protocol import Generate, Turn
from pa_npu.samples.columns import Values, continued
from pa_npu.samples.group import Group
from pa_npu.samples.seeds import turn_seed
from pa_npu.samples.types import Sample, SampleBuilder


@dataclass(frozen=True, eq=False)
class Written:
    """A response so far: tokens int32 [R], logprobs float32 [R], versions int32 [R] and columns of its parts together."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finished: bool = False
    columns: Values = field(default_factory=dict)

    def then(self, part: Generation) -> Written:
        """part: with the version that the engine says it wrote by."""
        assert part.version is not None, "sessions refuse responses without a version"
        return Written(
            np.concatenate([self.tokens, part.tokens]),
            np.concatenate([self.logprobs, part.logprobs]),
            np.concatenate([self.versions, np.full(len(part.tokens), part.version, np.int32)]),
            part.finished,
            continued(self.columns, part.columns),
        )


NOTHING = Written(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class Interruptions(Variant):
    """Groups of a run that are written in parts by several versions: which version writes, and what is written so far.

    tokens: most that a version writes of a response which it does not train. decode: for the text of parts together.
    """

    def __init__(self, tokens: int, decode: Decode, resume_deadline_s: float) -> None:
        self._tokens = tokens
        self._decode = decode
        self._resume_deadline_s = resume_deadline_s
        self._version = -1
        self._working = 0
        self._waiting = 0  # for the next version
        self._changed = asyncio.Event()
        self._published = asyncio.Event()
        self._written: dict[int, dict[int, list[Written]]] = {}  # by iteration and index
        self._prompts: dict[int, dict[int, npt.NDArray[np.int32]]] = {}

    # the border

    def publish(self, version: int) -> None:
        """Engines hold `version`: everybody who waits goes on. Iterations before it are trained, and forgotten."""
        self._version = version
        for iteration in [i for i in self._written if i < version]:
            del self._written[iteration], self._prompts[iteration]
        # they have work from now on, not from when they run next: nobody may find it quiet before that
        self._working, self._waiting = self._working + self._waiting, 0
        self._published.set()
        self._published = asyncio.Event()

    async def quiet(self) -> None:
        """Until everything that the version may write is written. Requests end by their own deadlines, hence so does this."""
        while self._working:
            self._changed.clear()
            await self._changed.wait()

    def so_far(self, iteration: int) -> list[Group]:
        """Returns the parts of an iteration's groups that are written, by index, without rewards."""
        return [
            _group(iteration, index, self._prompts[iteration][index], responses)
            for index, responses in sorted(self._written.get(iteration, {}).items())
        ]

    def begin_with(self, group: Group) -> None:
        """Takes the part of a group that an earlier attempt of the run wrote."""
        samples = group.samples([""] * group.num_samples)
        self._written.setdefault(group.iteration, {})[group.index] = [_written(sample) for sample in samples]

    # producing

    def admits(self) -> None:
        """An iteration is about to be begun: the version has work until `all_dispatched`."""
        self._begin()

    def all_dispatched(self) -> None:
        """The iteration's last group has been given to an engine."""
        self.ended()

    def admitted(self, lease: Lease) -> None:
        """The version has work of a group until that ends, or waits for another version."""
        self._begin()

    def ended(self) -> None:
        """A piece of work of the version is over."""
        self._working -= 1
        self._changed.set()

    def generate(self, session: GroupSession, place: tuple[int, int], seed: int, sampling: Sampling) -> GenerateInParts:
        """Returns the Generate that writes a group of an environment with one turn. seed: the group's."""
        return GenerateInParts(self, session, place, seed, sampling)

    def _begin(self) -> None:
        self._working += 1

    async def write(
        self,
        session: GroupSession,
        place: tuple[int, int],
        prompt: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
    ) -> list[Generation]:
        """n responses of the group with this iteration and index, in parts. seed: the group's."""
        iteration, index = place
        self._prompts.setdefault(iteration, {})[index] = prompt
        groups = self._written.setdefault(iteration, {})
        if index not in groups:
            parts = await session.generate(prompt, n, seed, self._part(sampling, iteration, 0))
            groups[index] = [NOTHING.then(part) for part in parts]
        while open_ := _open(groups[index], sampling.max_tokens):
            last = max(int(response.versions[-1]) for response in groups[index])
            if self._version <= last:
                session.pause()
                await self._version_after(last)
                await session.resume(len(open_), self._resume_deadline_s)
            version, written = self._version, groups[index]
            several = await gather(
                [
                    session.generate(
                        np.concatenate([prompt, written[number].tokens]),
                        1,
                        # later parts are told apart by their distance from the version that trains them
                        turn_seed(seed, number, 1 + iteration - version),
                        self._part(sampling, iteration, len(written[number].tokens)),
                    )
                    for number in open_
                ]
            )
            grown = {number: written[number].then(part) for number, (part,) in zip(open_, several, strict=True)}
            groups[index] = [grown.get(number, response) for number, response in enumerate(written)]
        return [self._generation(response) for response in groups[index]]

    def _part(self, sampling: Sampling, iteration: int, num_written: int) -> Sampling:
        left = sampling.max_tokens - num_written
        return replace(sampling, max_tokens=left if self._version >= iteration else min(left, self._tokens))

    async def _version_after(self, version: int) -> None:
        """Without work until a later one is published."""
        self._waiting += 1
        self.ended()
        while self._version <= version:
            await self._published.wait()

    def _generation(self, response: Written) -> Generation:
        tokens = response.tokens[:-1] if response.finished else response.tokens
        return Generation(
            response.tokens,
            response.logprobs,
            self._decode(tokens.tolist()),
            "stop" if response.finished else "length",
            version=int(response.versions[-1]),
            versions=response.versions,
            columns=response.columns,
        )


class GenerateInParts(Generate):
    """The Generate of one group whose responses go on under newer weights."""

    def __init__(
        self, interruptions: Interruptions, session: GroupSession, place: tuple[int, int], seed: int, sampling: Sampling
    ) -> None:
        self._interruptions = interruptions
        self._session = session
        self._place = place
        self._seed = seed
        self._sampling = sampling

    async def _write(self, turn: Turn) -> list[Generation]:
        if turn.sample or turn.turn or turn.max_tokens is not None or turn.stop:
            raise ValueError("generate: only a single turn of all samples together can go on under newer weights")
        return await self._interruptions.write(
            self._session, self._place, turn.tokens, turn.n, self._seed, self._sampling
        )


def _open(responses: Sequence[Written], max_tokens: int) -> list[int]:
    return [
        number
        for number, response in enumerate(responses)
        if not response.finished and len(response.tokens) < max_tokens
    ]


def _written(sample: Sample) -> Written:
    own = sample.trained
    columns = {one: values if one.tokens == "context" else values[own] for one, values in sample.columns.items()}
    return Written(sample.tokens[own], sample.logprobs[own], sample.versions[own], sample.finished, columns)


def _group(iteration: int, index: int, prompt: npt.NDArray[np.int32], responses: Sequence[Written]) -> Group:
    samples = []
    for response in responses:
        sample = SampleBuilder(prompt)
        sample.write(response.tokens, response.logprobs, response.versions, response.columns)
        samples.append(sample.finish(response.finished, ""))
    nothing = np.zeros(len(samples), np.float32)
    return Group.of_samples(samples, nothing, nothing, run_seed=0, iteration=iteration, index=index, prompt_id=0)
