"""The engine of a service: it holds one version at a time, and samples only by the version that is asked for.

    requests for version 3 ─┐                        ┌─ all of them, in flight together
    requests for version 5 ─┴─> in the order of      ┴─ nothing is in flight: version 5 is published,
                                arrival of versions      digests are compared, then its requests

Behind each load a probe shows that the engine computes what the trainers compute of the snapshot
(probe.py). Where it does not, the request that asked for it is refused, and nothing is sampled.

An engine that is gone is waited for, since the launcher starts it again; a request that it did not
answer is asked again, with its seed, and so gets the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import (
    EngineError,
    Generation,
    LoadedWeights,
    RolloutEngine,
    Sampling,
    Scores,
    Scoring,
    WeightGroups,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation
from pa_npu.publish.messages import StageManifest
from pa_npu.publish.probes import MIN_RESPONSES
from pa_npu.service.commands import Probe, Publish, Ready, Trainers, TrainersFailed
from pa_npu.service.wire import Refused
from pa_npu.weight_transfer.digest import first_difference

logger = logging.getLogger(__name__)
T = TypeVar("T")
_PAUSE_S = 0.5
_ATTEMPTS = 5


@dataclass(frozen=True)
class ProbeLengths:
    """num_tokens: of each response of a probe. max_tokens: of its prompt and response together."""

    num_tokens: int
    max_tokens: int


class Sampler:
    """One engine. Close it by leaving `async with`."""

    def __init__(
        self,
        make_client: Callable[[], RolloutEngine],
        trainers: Trainers,
        ready: Ready,
        store: tuple[str, int],
        *,
        load_timeout_s: float,
        start_timeout_s: float,
        probe: ProbeLengths | None = None,
    ) -> None:
        self._make_client = make_client
        self._trainers = trainers
        self._stage = StageManifest(ready.manifest_name, ready.manifest)
        self._backend = ready.backend
        self._store = store
        self._load_timeout_s = load_timeout_s
        self._start_timeout_s = start_timeout_s
        self._probe_lengths = probe
        self._client: RolloutEngine | None = None
        self._epoch = 0
        self._loaded: int | None = None
        self._in_flight = 0
        self._waiting: dict[int, int] = {}
        self._last_ticket = 0
        self._last_of_load = 0
        self._change = asyncio.Condition()

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def generate(
        self,
        version: int,
        file: str,
        prompt: npt.NDArray[np.int32],
        count: int,
        seed: int,
        sampling: Sampling,
        deadline_s: float,
    ) -> list[Generation]:
        """Returns `count` responses by `version`, whose weights `file` has.

        Raises DeadlineExceeded, Refused where a probe shows other weights, or TrainersFailed.
        """

        async def ask(client: RolloutEngine, left_s: float) -> list[Generation]:
            return await client.generate(prompt, count, seed, sampling, deadline_s=left_s)

        return await self._asked(version, file, prompt, ask, deadline_s)

    async def score(
        self,
        version: int,
        file: str,
        tokens: npt.NDArray[np.int32],
        scoring: Scoring,
        deadline_s: float,
    ) -> Scores:
        """Returns the log-probs of a sequence's tokens by `version`. Raises as `generate`."""

        async def ask(client: RolloutEngine, left_s: float) -> Scores:
            return await client.score(tokens, scoring, deadline_s=left_s)

        return await self._asked(version, file, tokens, ask, deadline_s)

    async def _asked(
        self,
        version: int,
        file: str,
        tokens: npt.NDArray[np.int32],
        ask: Callable[[RolloutEngine, float], Awaitable[T]],
        deadline_s: float,
    ) -> T:
        end_s = time.monotonic() + deadline_s
        for attempt in range(_ATTEMPTS):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                return await asyncio.wait_for(self._ask(version, file, tokens, ask, left_s), left_s)
            except asyncio.TimeoutError:
                await self._lose()  # a load may have been cut off
                break
            except (Refused, TrainersFailed):  # its weights are not those of the version
                await self._lose()
                raise
            except (EngineError, DeadlineExceeded) as error:
                logger.warning("the engine did not answer (attempt %d): %s", attempt + 1, error)
                await self._lose()
                await asyncio.sleep(_PAUSE_S)
        raise DeadlineExceeded(f"the engine did not answer within {deadline_s:g} s")

    async def _ask(
        self,
        version: int,
        file: str,
        tokens: npt.NDArray[np.int32],
        ask: Callable[[RolloutEngine, float], Awaitable[T]],
        left_s: float,
    ) -> T:
        async with self._holding(version, file, tokens) as client:
            return await ask(client, left_s)

    @asynccontextmanager
    async def _holding(
        self, version: int, file: str, tokens: npt.NDArray[np.int32]
    ) -> AsyncIterator[RolloutEngine]:
        """Has the engine hold `version` inside. tokens: of the request, which a probe begins with."""
        async with self._change:
            ticket = self._last_ticket = self._last_ticket + 1
            self._waiting[ticket] = version
            try:
                await self._change.wait_for(lambda: self._admits(ticket, version))
            finally:
                del self._waiting[ticket]
                self._change.notify_all()
            self._in_flight += 1  # a load counts too, so that nobody else begins one
            must_load = self._loaded != version
            if must_load:
                self._loaded = None
        try:
            if must_load:
                await self._load(version, file, tokens)
            if self._client is None:
                raise EngineError("the engine has ended")
            yield self._client
        finally:
            async with self._change:
                self._in_flight -= 1
                self._change.notify_all()

    def _admits(self, ticket: int, version: int) -> bool:
        """Requests go in the order of their tickets; those by one version that were waiting when it
        was loaded go together.
        """
        first = next(iter(self._waiting))
        if self._loaded != version:
            return ticket == first and self._in_flight == 0
        others = [number for number, other in self._waiting.items() if other != version]
        return ticket <= self._last_of_load or not others or ticket < others[0]

    async def _load(self, version: int, file: str, tokens: npt.NDArray[np.int32]) -> None:
        """Publishes `version` to the engine, which nothing else asks meanwhile."""
        client = self._client
        if client is None:
            client = self._make_client()
            await client.wait_ready(deadline_s=self._start_timeout_s)
            self._client = client
            self._epoch += 1
            joins = WeightGroups(
                store=self._store,
                first_rank=1,
                world_size=2,
                stages=[self._stage.group(self._epoch)],
                backend=self._backend,
                timeout_s=self._load_timeout_s,
            )
            # the groups form when both ends join: the trainers do within the first publish
            loading = asyncio.create_task(self._join_and_load(client, joins, version))
        else:
            loading = asyncio.create_task(self._join_and_load(client, None, version))
        publish = Publish(file=file, version=version, epoch=self._epoch, workers=1)
        try:
            sent = (await self._trainers.ask(publish)).decode()
            loaded = await loading
        except Refused as refusal:  # the trainers lost the engine
            raise EngineError(str(refusal)) from None
        finally:
            loading.cancel()
        check_arrival(version, sent, loaded)
        await self._probe(client, version, file, tokens)
        async with self._change:
            self._loaded = version
            self._last_of_load = self._last_ticket
            self._change.notify_all()

    async def _probe(
        self, client: RolloutEngine, version: int, file: str, tokens: npt.NDArray[np.int32]
    ) -> None:
        """Raises Refused unless the engine computes the log-probs that the trainers compute."""
        lengths = self._probe_lengths
        if lengths is None:
            return
        prompt = tokens[: max(1, lengths.max_tokens - lengths.num_tokens)]
        sampling = Sampling(max_tokens=lengths.num_tokens, temperature=1.0, ignore_eos=True)
        responses = await client.generate(
            prompt, MIN_RESPONSES, version, sampling, deadline_s=self._load_timeout_s
        )
        probe = Probe(
            file=file,
            version=version,
            prompt=prompt.tolist(),
            tokens=[response.tokens.tolist() for response in responses],
            logprobs=[response.logprobs.tolist() for response in responses],
        )
        if difference := (await self._trainers.ask(probe)).decode():
            logger.error("%s", difference)
            raise Refused(difference)

    async def _join_and_load(
        self, client: RolloutEngine, joins: WeightGroups | None, version: int
    ) -> LoadedWeights:
        limit_s = self._load_timeout_s
        if joins is not None:
            await client.join_weight_groups(joins, deadline_s=limit_s)
        return await client.load_weights(version, deadline_s=limit_s)

    async def _lose(self) -> None:
        """Forgets an engine that did not answer: the next request waits for its next start."""
        client, self._client = self._client, None
        self._loaded = None
        if client is not None:
            await client.close()

    @property
    def versions(self) -> dict[str, Any]:
        """Returns what it holds, for whoever looks."""
        return {
            "loaded": self._loaded,
            "in_flight": self._in_flight,
            "waiting": list(self._waiting.values()),
        }


def check_arrival(version: int, sent: str, loaded: LoadedWeights) -> None:
    """Raises InvariantViolation unless every worker received what was sent (I5)."""
    for worker, digests in enumerate(loaded.digests or ((),)):
        arrived = digests[0] if digests else ""
        if first_difference(sent, arrived) is not None:
            raise InvariantViolation(
                f"I5: worker {worker} of the engine did not receive weight version {version} as the "
                "trainers sent it; look for what changes weights between broadcast and loader"
            )
