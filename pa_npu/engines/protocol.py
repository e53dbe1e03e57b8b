"""The RolloutEngine protocol: what the coordinator asks of an engine, and the data that crosses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pa_npu.engines.live_weights import LiveReport
from pa_npu.errors import PaNpuError
from pa_npu.platform.memory_peaks import MemoryPeak
from pa_npu.samples.columns import Values
from pa_npu.samples.routes import Routes

NOTHING: npt.NDArray[np.int32] = np.zeros(0, np.int32)
"""No tokens."""


class EngineError(PaNpuError):
    """An engine refused a request, answered nonsense, or died; the message names the engine and
    what it was asked.
    """


class EngineGone(EngineError):
    """An engine does not answer any more, or says that it is broken: another one, or its successor,
    can do what was asked.
    """


@dataclass(frozen=True)
class Sampling:
    """How to sample a response. temperature 0 is greedy. top_p: nucleus sampling, for evaluation;
    training samples with 1.

    stop_token_ids end a response beside the model's own end token, unless ignore_eos asks for
    exactly max_tokens. logprobs: return the log-prob of every token under the distribution it was
    sampled from. stop: texts that end a response, which keeps the tokens up to the one that
    completes a text (finish_reason stop). routes: return the experts of every token as this column,
    of an engine that records them.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = True
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    routes: Routes | None = None


@dataclass(eq=False)  # not frozen, for the same reason as Sample
class Generation:
    """One response, read only. tokens: int32 [R], its end token included. logprobs: float32 [R], or
    [0] when not asked for.

    text leaves the end token and other special tokens out. finish_reason: stop (by itself), length
    (at its limit), or cut: handed on by `hand_on` as it stood, perhaps before its first token.
    version: of the weights that generated it, as the engine itself says; None where it does not
    say.
    columns: declared columns that the engine fills, each [R, *shape]; those of context of what it
    was given too.
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
        """The weight version of all its tokens. Raises ValueError where the engine does not say."""
        if self.version is None:
            raise ValueError(
                "a generation without weight version cannot be trained; take it from `generate`"
            )
        return self.version


@dataclass(frozen=True)
class WeightGroups:
    """The groups in which an engine's workers receive weights: process groups, one per pipeline
    stage, that the trainers lead.

    store: host and port of the trainers' rendezvous. first_rank: of the engine's first worker in
    every group, its other workers follow; rank 0 sends. world_size: of every group. stages: name
    and manifest of each, in stage order.
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

    versions: None before the first load and after one that failed, when the worker must not
    generate.
    digests: per worker, of what each stage sent, in stage order (Receiver.digests);
    empty before the first load. A publish after which there are none is refused (I5).
    memory: of all processes of the engine and of its fullest device since the load before; None
    where it does not say.
    live: per worker, what its live modules hold after the load; empty where it does not say.
    """

    versions: tuple[int | None, ...]
    digests: tuple[tuple[str, ...], ...] = ()
    memory: MemoryPeak | None = None
    live: tuple[LiveReport, ...] = ()


@dataclass(frozen=True)
class EngineCapabilities:
    """The kind and abilities of an engine that is ready; None where it does not say.

    kind: the value of rollout.backend. version: of its software.
    continues: it goes on with a response that another engine has begun, and hands on its own.
    sleeps: it can give its device's memory back for a time. records_routes: it says which experts
    of a mixture each token took.
    """

    kind: str
    version: str | None = None
    num_workers: int | None = None
    continues: bool = False
    sleeps: bool = False
    records_routes: bool = False


class RolloutEngine(Protocol):
    """One engine. Another inference server is one more class with these methods.

    Every method ends by its deadline: it raises DeadlineExceeded then, EngineGone when the engine
    dies, and EngineError when it refuses. After DeadlineExceeded from a method that concerns
    weights, the engine is in an unknown state and must be replaced.
    """

    name: str
    """How logs and metrics call it: its URL."""

    async def generate(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        *,
        deadline_s: float,
        written: npt.NDArray[np.int32] = NOTHING,
    ) -> list[Generation]:
        """Generates n responses. Response i is what a request of one with seed + i gives, whatever
        else is in flight.

        Args:
            prompt_tokens: int32 [P], the chat template's tokens included.
            n: responses, at least 1.
            seed: of the first response, below 2^63.
            sampling: lengths in tokens, temperature, ends, and whether log-probs and routes are
            returned.
            deadline_s: seconds from now, in which all n are there.
            written: int32 [W], the beginning of the response, of which the rest is returned, with n
            = 1, of an engine that
                continues; sampling.max_tokens is of the rest.

        Returns n generations in the order of their seeds.

        Raises:
            DeadlineExceeded, EngineGone, EngineError: as every method.
        """

    async def hand_on(self, *, deadline_s: float) -> None:
        """End every response in flight as it stands; their requests are answered with what is
        written so far.
        """

    async def sleep(self, *, deadline_s: float) -> None:
        """Give the memory of weights and caches back, with what is in it. Nothing may be in flight;
        it generates nothing before it has been woken and has loaded weights. Asked of engines that
        can."""

    async def wake(self, *, deadline_s: float) -> None:
        """Take the memory again; weights are loaded next. Asked of engines that can sleep."""

    async def join_weight_groups(self, connection: WeightGroups, *, deadline_s: float) -> None:
        """Every worker leaves the groups it is in and joins these.

        Returns once the trainers have joined as well.
        """

    async def load_weights(
        self, version: int, *, deadline_s: float, begins_within_s: float | None = None
    ) -> LoadedWeights:
        """Every worker receives `version` from the groups and loads it; prefixes that were cached
        under the old weights are forgotten. Nothing may be in flight.

        Args:
            version: of the weights, as the trainers send it; an engine that receives another one
            refuses.
            deadline_s: seconds from now, in which they are loaded.
            begins_within_s: asked ahead of time; the trainers may take so many seconds until they
            send (Receiver.receive).
                None: they are about to.

        Raises:
            DeadlineExceeded, EngineGone, EngineError: as every method; the engine must be replaced
            after the first.
        """

    async def prepare_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        """Every worker receives `version` from the groups into a second buffer, while the engine
        goes on generating by the version that it has. Returns what was received; `versions` are of
        that."""

    async def swap_weights(self, version: int, *, deadline_s: float) -> LoadedWeights:
        """Every worker loads the version that it has prepared, which takes no wire; otherwise as
        `load_weights`.
        """

    async def loaded_weights(self, *, deadline_s: float) -> LoadedWeights:
        """Ask every worker which weights it holds.

        Each must answer, so it also tells whether they are all there.
        """

    async def check_health(self, *, deadline_s: float) -> int | None:
        """Return when the engine says that it is well, which it can also while its workers load
        weights: the version that it says it holds."""

    async def wait_ready(self, *, deadline_s: float) -> EngineCapabilities:
        """Return as soon as the engine serves requests."""

    async def probe(self, *, deadline_s: float) -> None:
        """Return when the engine has generated a token: a health page says nothing about a stopped
        worker.
        """

    async def close(self) -> None:
        """Release connections, which ends all requests with EngineGone; the engine's process is the
        launcher's.
        """
