"""The RolloutEngine protocol: the requests of the coordinator to an engine, and their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.errors import PaNpuError
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.columns import Values
from pa_npu.samples.expert_choices import ExpertChoices
from pa_npu.vision.images import ShownImage

if TYPE_CHECKING:  # imports torch, for which a command's help need not wait
    from pa_npu.engines.live_weights import LiveReport

NO_TOKENS: npt.NDArray[np.int32] = np.zeros(0, np.int32)
"""An empty sequence of tokens."""


class EngineError(PaNpuError):
    """An engine refused a request, answered nonsense, or died.

    The message names the engine and the request.
    """


class EngineGone(EngineError):
    """An engine does not answer any more, or says that it is broken.

    Another engine, or its successor, can do what was asked.
    """


@dataclass(frozen=True)
class Sampling:
    """The way to sample a response.

    max_tokens: of the response.
    temperature: 0 is greedy.
    stop_token_ids: end a response, beside the model's own end token.
    ignore_eos: neither ends a response; it has exactly max_tokens.
    logprobs: return the log-prob of every token under the distribution that it was sampled from.
    stop: texts that end a response. It keeps the tokens up to the one that completes a text
        (finish_reason stop).
    top_p: nucleus sampling, for evaluation; training samples with 1.
    expert_choices: return the experts of every token as this column, from an engine that records
    them.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = True
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    expert_choices: ExpertChoices | None = None


@dataclass(eq=False)  # not frozen, for the same reason as Sample
class Generation:
    """One response, read only.

    tokens: int32 [R], its end token included.
    logprobs: float32 [R], or [0] if they were not asked for.
    text: without the end token and other special tokens.
    finish_reason: stop (by itself), length (at its limit), or cut: by `cut_responses`, as it stood,
        perhaps before its first token.
    version: of the weights that generated it, as the engine itself states it; None if it does not.
    columns: declared columns that the engine fills, each [R, *shape]; columns of context also cover
        the prompt.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str
    finish_reason: Literal["stop", "length", "cut"]
    version: int | None = None
    columns: Values = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"

    @property
    def written_by(self) -> int:
        """The weight version of all its tokens. Raises ValueError if the engine does not state it."""
        if self.version is None:
            raise ValueError(
                "a generation without weight version cannot be trained; take it from `generate`"
            )
        return self.version


@dataclass(frozen=True)
class Scoring:
    """The way to score a sequence.

    temperature: of the distribution whose log-probs are wanted.
    num_choices: at each place, so many of the most likely tokens are wanted too; 0: none.
    """

    temperature: float = 1.0
    num_choices: int = 0


@dataclass(frozen=True, eq=False)
class Scores:
    """A model's log-probs of the T tokens of a sequence, each behind those before it. Read only.

    The first token follows from nothing: it has log-prob 0 and no likely tokens.

    logprobs: float32 [T].
    choices: int32 [T, k], the k most likely tokens at each place, the likeliest first; -1 at the
        first.
    choice_logprobs: float32 [T, k + 1], theirs, and last that of all other tokens together; [T, 0]
        without choices.
    version: of the weights that scored, as the engine states it.
    """

    logprobs: npt.NDArray[np.float32]
    choices: npt.NDArray[np.int32]
    choice_logprobs: npt.NDArray[np.float32]
    version: int | None = None


@dataclass(frozen=True)
class WeightGroups:
    """The process groups in which an engine's workers receive weights.

    There is one per pipeline stage, led by the trainers.

    store: host and port of the trainers' rendezvous.
    first_rank: of the engine's first worker in every group; its other workers follow. Rank 0 sends.
    world_size: of every group.
    stages: name and manifest of each, in stage order.
    timeout_s: of joining, and of every load.
    """

    store: tuple[str, int]
    first_rank: int
    world_size: int
    stages: Sequence[Mapping[str, Any]]
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class LoadedWeights:
    """The weights that the workers of an engine hold, in rank order.

    versions: None before the first load and after a failed one; the worker must not generate then.
    digests: per worker, of the weights of each stage, in stage order (Receiver.digests); empty
        before the first load. A publish without digests is refused (I5).
    memory: of all processes of the engine and of its fullest device since the load before; None if
        it is not reported.
    live: per worker, what its live modules hold after the load; empty if it is not reported.
    """

    versions: tuple[int | None, ...]
    digests: tuple[tuple[str, ...], ...] = ()
    memory: MemoryPeak | None = None
    live: tuple[LiveReport, ...] = ()


@dataclass(frozen=True)
class EngineCapabilities:
    """The kind and abilities of a ready engine; None for what it does not report.

    kind: the value of rollout.backend.
    version: of its software.
    num_workers: of the engine.
    continues: whether it continues responses that another engine has begun, and can cut its own.
    sleeps: whether it can give its device's memory back for a time.
    records_expert_choices: whether it reports the experts of a mixture that each token took.
    scores_at_temperature: whether it scores at other temperatures than 1.
    reads_images: whether its model and its server take images.
    """

    kind: str
    version: str | None = None
    num_workers: int | None = None
    continues: bool = False
    sleeps: bool = False
    records_expert_choices: bool = False
    scores_at_temperature: bool = False
    reads_images: bool = False


class RolloutEngine(Protocol):
    """One engine. Another inference server is one more class with these methods.

    Every method ends by its deadline. It raises DeadlineExceeded then, EngineGone if the engine
    dies, and EngineError if it refuses. After DeadlineExceeded from a method that concerns weights,
    the engine is in an unknown state and must be replaced.
    """

    name: str
    """Its name in logs and metrics: its URL."""

    async def generate(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: npt.NDArray[np.int32] = NO_TOKENS,
        images: Sequence[ShownImage] = (),
    ) -> list[Generation]:
        """Generates n responses.

        Response i is the one that a single request with seed + i gives, whatever else is in flight.

        Args:
            prompt_tokens: int32 [P], the chat template's tokens included.
            n: number of responses, at least 1.
            seed: of the first response, below 2^63.
            sampling: lengths in tokens, temperature, ends, and whether log-probs and expert choices
                are returned.
            deadline_s: seconds from now until all n are there.
            written: int32 [W], the beginning of the response, if n = 1 and the engine continues
                responses. The rest is returned, and sampling.max_tokens is that of the rest.
            images: that placeholders among prompt_tokens stand for. What the engine makes of
                the prompt must be prompt_tokens. Other tokens with the placeholder's id are tokens.

        Returns n generations in the order of their seeds.

        Raises:
            DeadlineExceeded, EngineGone, EngineError: as every method.
        """

    async def score(
        self, tokens: npt.NDArray[np.int32], scoring: Scoring, *, deadline_s: float
    ) -> Scores:
        """Returns the log-prob of every token of a sequence behind those before it.

        Args:
            tokens: int32 [T], at least 2.
            scoring: temperature, and how many of the most likely tokens are wanted. Other
                temperatures than 1 only of engines with `scores_at_temperature`.
            deadline_s: seconds from now.

        Raises:
            DeadlineExceeded, EngineGone, EngineError: as every method.
        """

    async def cut_responses(self, *, deadline_s: float) -> None:
        """Ends every response in flight as it stands.

        Their requests are answered with the tokens so far.
        """

    async def sleep(self, *, deadline_s: float) -> None:
        """Gives the memory of weights and caches back, with its contents.

        Nothing may be in flight. The engine generates nothing before it has been woken and has
        loaded weights. Called only on engines that declared `sleeps`.
        """

    async def wake(self, *, deadline_s: float) -> None:
        """Takes the memory again; weights are loaded next. Called only on engines with `sleeps`."""

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        """Lets every worker leave the groups that it is in and join these.

        Returns once the trainers have joined as well.
        """

    async def load_weights(
        self, version: int, *, deadline_s: float, begins_within_s: float | None = None
    ) -> LoadedWeights:
        """Lets every worker receive `version` from the groups and load it.

        Prefixes that were cached under the old weights are forgotten. Nothing may be in flight.

        Args:
            version: of the weights, as the trainers send it; the engine refuses another one.
            deadline_s: seconds from now until they are loaded.
            begins_within_s: seconds until the trainers send, if it is called ahead of time
                (Receiver.receive). None: they are about to send.

        Raises:
            DeadlineExceeded, EngineGone, EngineError: as every method; the engine must be replaced
                after the first.
        """

    async def prepare_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        """Lets every worker receive `version` into a second buffer.

        The engine goes on generating by the version that it has. Returns what was received, with
        its `versions`.
        """

    async def swap_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        """Lets every worker load the version that it has prepared; otherwise as `load_weights`."""

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        """Returns the weights that every worker holds.

        Each must answer, so this also checks that all workers are there.
        """

    async def check_health(self, *, deadline_s: float) -> int | None:
        """Returns the version that a healthy engine states.

        An engine can answer this while its workers load weights.
        """

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        """Returns once the engine serves requests."""

    async def probe(self, *, deadline_s: float) -> None:
        """Returns once the engine has generated a token.

        A health page shows nothing about a stopped worker.
        """

    async def close(self) -> None:
        """Releases connections, which ends all requests with EngineGone.

        The launcher owns the engine's process.
        """
