"""GroupSession: a group's requests to its engine, moved to another one if that engine is gone or rests.

A slow engine gets more time, one that hangs is given up, and no group takes for ever.

When an engine has to cut its responses, it ends each as it stands (finish_reason `cut`). The next
engine gets the tokens so far, computes them once, and samples from the same place of the same
random stream, so that the response is the one that it would have been. Where an engine cannot
continue, the response is generated again from its seed, which gives the same one too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.rollout import SLOWEST_TOKEN_S
from pa_npu.control.tasks import cancel, gather
from pa_npu.engines.protocol import (
    NO_TOKENS,
    EngineError,
    EngineGone,
    Generation,
    RolloutEngine,
    Sampling,
    Scores,
    Scoring,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation, UserError
from pa_npu.samples.columns import continued
from pa_npu.vision.images import ShownImage

if TYPE_CHECKING:
    from pa_npu.engines.pool import EnginePool, Lease

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""

# A response may be cut before its first token whenever a device changes its role. An engine that
# cuts by itself is broken.
_MAX_UNASKED = 16
# A request that killed so many engines is the cause, not the victim.
_MAX_SENDS = 4


class GroupSession:
    """A group's requests to its engine, and to another one if that is gone.

    Responses are the same from every engine, because they follow from the seed. Use it with `with`:
    the end closes the lease.

    Args:
        pool: of the engines.
        lease: the room that the group was admitted with.
        window: as for EnginePool.admit.
        deadline_s: of a request, after which the engine must show that it works.
        again_deadline_s: of the wait for another engine.
        label: the group, for messages.
        version: the weight version that has to write it; None: any.
    """

    def __init__(
        self,
        pool: EnginePool,
        lease: Lease,
        window: Callable[[str], int],
        *,
        deadline_s: float,
        again_deadline_s: float,
        label: str = "a group",
        version: int | None = None,
    ) -> None:
        self.lease = lease
        """The group's present or last one."""
        self._pool = pool
        self._window = window
        self._deadline_s = deadline_s
        self._again_deadline_s = again_deadline_s
        self._label = label
        self._version = version
        self._moving = asyncio.Lock()
        self._tokens = 0
        self._unasked = 0  # responses cut before their first token by an engine that did not rest
        self._seats = lease.sequences
        # Responses that were asked for and are not there, those of a failed request included.
        self._open = 0

    def __enter__(self) -> GroupSession:
        self._pool.count_open(self._version, 1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lease.close(self._tokens)
        self._pool.count_open(self._version, -1)

    async def generate(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        images: Sequence[ShownImage] = (),
    ) -> list[Generation]:
        """Returns n responses to these tokens; several requests may be in flight at the same time.

        images: of the tokens, as for RolloutEngine.generate.

        Raises InvariantViolation if the engine does not state which weight version wrote a
        response: nobody else can (I1).
        """
        self._open += n
        generations = await self._ask(prompt_tokens, n, seed, sampling, images=images)
        num_cut = len(_cut(generations))
        self._open -= n - num_cut
        if num_cut:
            generations = await gather(
                [
                    self._continue(response, prompt_tokens, seed + number, sampling, images)
                    for number, response in enumerate(generations)
                ]
            )
        self._tokens += sum([len(response.tokens) for response in generations])
        return list(generations)

    async def score(self, tokens: npt.NDArray[np.int32], scoring: Scoring) -> Scores:
        """Returns the scores of a sequence by the engine that has the group, or by the next one of
        the same version if that is gone.
        """
        for sends in count(1):
            await self._leave_resting()
            engine = self.lease.engine
            try:
                with self._pool.count_request(engine):
                    return await engine.score(tokens, scoring, deadline_s=self._deadline_s)
            except (EngineGone, DeadlineExceeded) as error:
                if sends == _MAX_SENDS:
                    raise EngineError(
                        f"{self._label}: {sends} engines were lost while they scored it, the last: "
                        f"{error}"
                    ) from None
                if not await self._move_from(engine, str(error)):
                    raise
            except EngineError:
                # an engine whose device trains cuts all that it has in flight
                if sends == _MAX_SENDS or not self._pool.is_resting(engine):
                    raise
        raise AssertionError("unreachable: the loop ends by return or raise")

    async def _continue(
        self,
        response: Generation,
        prompt_tokens: npt.NDArray[np.int32],
        seed: int,
        sampling: Sampling,
        images: Sequence[ShownImage],
    ) -> Generation:
        """Returns the whole of a response, which may have been cut several times."""
        if response.finish_reason != "cut":
            return response
        begun: Generation | None = None
        while response.finish_reason == "cut":
            if begun is None or len(response.tokens):
                whole = response if begun is None else join_parts(begun, response, None)
                # A text that ends a response may lie across the cut, where no engine would find it.
                can_continue = self._pool.continues and not sampling.stop
                begun = whole if can_continue and len(whole.tokens) else None
            written = NO_TOKENS if begun is None else begun.tokens
            rest = replace(sampling, max_tokens=sampling.max_tokens - len(written))
            (response,) = await self._ask(prompt_tokens, 1, seed, rest, written, images)
        self._open -= 1
        return response if begun is None else join_parts(begun, response, self._pool.decode)

    async def _ask(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        written: npt.NDArray[np.int32] = NO_TOKENS,
        images: Sequence[ShownImage] = (),
    ) -> list[Generation]:
        for sends in count(1):
            await self._leave_resting()
            engine = self.lease.engine
            try:
                with self._pool.count_request(engine):
                    generations = await generate_patiently(
                        engine,
                        prompt_tokens,
                        n,
                        seed,
                        sampling,
                        written=written,
                        images=images,
                        deadline_s=self._deadline_s,
                        probe_timeout_s=self._pool.probe_timeout_s,
                        label=self._label,
                    )
            except EngineGone as error:
                if sends == _MAX_SENDS:
                    raise EngineError(
                        f"{self._label}: {sends} engines were lost while they generated it, the "
                        f"last: {error}"
                    ) from None
                if not await self._move_from(engine, str(error)):
                    raise
            else:
                if None in [generation.version for generation in generations]:
                    raise InvariantViolation(
                        f"I1 version: engine {engine.name} does not say which weight version wrote "
                        f"its responses for {self._label}; its client must put the version that the "
                        "engine itself names into every Generation"
                    )
                cut = _cut(generations)
                if cut and not self._pool.is_resting(engine):
                    self._unasked += sum(len(response.tokens) == 0 for response in cut)
                if self._unasked > _MAX_UNASKED * self._seats:
                    raise EngineError(
                        f"engine {engine.name}: it ended responses of {self._label} "
                        f"{self._unasked} times unbegun; see its log"
                    )
                return generations
        raise AssertionError("unreachable: the loop ends by return or raise")

    async def _move_from(self, lost: RolloutEngine, reason: str) -> bool:
        """Leaves an engine that is gone; returns False if nobody replaces engines.

        The first of the group's requests does it for all.
        """
        async with self._moving:
            if self.lease.engine is lost:
                self.lease.close(self._tokens)
                self._tokens = 0
                if not await self._pool.report_lost(lost, reason):
                    return False
                await self._admit_again()
        return True

    async def _leave_resting(self) -> None:
        """Moves to another engine if the present one rests; takes room for all open responses."""
        moves = self._moving.locked() or self._pool.is_resting(self.lease.engine)
        if not moves and self.lease.sequences >= self._num_open:
            return
        async with self._moving:
            if self._pool.is_resting(self.lease.engine):
                self.lease.close(self._tokens)
                self._tokens = 0
                await self._admit_again()
            elif self.lease.sequences < self._num_open:
                # More was asked for since it moved here.
                self.lease.resize(self._num_open)

    @property
    def _num_open(self) -> int:
        return min(max(1, self._open), self._seats)

    async def _admit_again(self) -> None:
        first = self.lease.first
        tokens = self.lease.tokens * self._num_open // self.lease.sequences
        self.lease = await self._pool.admit(
            self._num_open,
            tokens,
            self._window,
            self._again_deadline_s,
            again=True,
            version=self._version,
        )
        self.lease.first = first


def _cut(generations: Sequence[Generation]) -> list[Generation]:
    """Returns the responses that an engine has cut."""
    return [response for response in generations if response.finish_reason == "cut"]


def join_parts(first: Generation, rest: Generation, decode: Decode | None) -> Generation:
    """Returns one response of two parts; `rest` begins where `first` was cut.

    `decode`: None joins their texts as they are.
    """
    tokens = np.concatenate([first.tokens, rest.tokens])
    text = first.text + rest.text
    if decode is not None:
        text = decode((tokens[:-1] if rest.finished else tokens).tolist())
    return replace(
        rest,
        tokens=tokens,
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        text=text,
        columns=continued(first.columns, rest.columns),
    )


class GroupTooLong(UserError):
    """A working engine did not finish a group within the limit.

    Another one would not either: responses follow from the seed.
    """


async def generate_patiently(
    engine: RolloutEngine,
    prompt_tokens: npt.NDArray[np.int32],
    n: int,
    seed: int,
    sampling: Sampling,
    *,
    deadline_s: float,
    probe_timeout_s: float,
    label: str,
    written: npt.NDArray[np.int32] = NO_TOKENS,
    images: Sequence[ShownImage] = (),
) -> list[Generation]:
    """Generates as engine.generate does; a slow engine that answers a probe gets more time.

    It gets SLOWEST_TOKEN_S more for every token of a response.

    Args:
        engine: to ask.
        prompt_tokens, n, seed, sampling, written, images: as for RolloutEngine.generate.
        deadline_s: seconds until the engine is probed.
        probe_timeout_s: of the probe.
        label: the group, for messages.

    Raises EngineGone if the engine does not answer the probe, GroupTooLong at the limit.
    """
    more: dict[str, Any] = {"written": written} if len(written) else {}
    if images:
        more["images"] = images
    limit_s = deadline_s + SLOWEST_TOKEN_S * sampling.max_tokens
    loop = asyncio.get_running_loop()
    # Set by the request, or by its watcher.
    ended: asyncio.Future[None] = loop.create_future()
    watching: list[asyncio.Task[None]] = []

    def watch() -> None:
        responses = f"{n} responses of up to {sampling.max_tokens} tokens"
        work = _watch(ended, engine, deadline_s, limit_s, probe_timeout_s, label, responses)
        watching.append(loop.create_task(work))

    # Past the limit the request is cancelled here, so that its own deadline never comes first.
    request = loop.create_task(
        engine.generate(prompt_tokens, n, seed, sampling, deadline_s=2 * limit_s, **more)
    )
    request.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    # Nearly every request ends before its deadline, and needs no second task.
    timer = loop.call_later(deadline_s, watch)
    try:
        await ended
        return request.result()
    finally:
        timer.cancel()
        await cancel([request, *watching])


async def _watch(
    ended: asyncio.Future[None],
    engine: RolloutEngine,
    deadline_s: float,
    limit_s: float,
    probe_timeout_s: float,
    label: str,
    responses: str,
) -> None:
    """Ends a request past its deadline, with the reason.

    The reason is that its engine does not answer, or does not finish within the limit.
    """
    try:
        await _probe(engine, deadline_s, probe_timeout_s, label)
        logger.warning(
            "%s is slow: engine %s works, but has not finished it after %g s "
            "(rollout.request_timeout_s); waiting up to %g s",
            label,
            engine.name,
            deadline_s,
            limit_s,
        )
        await asyncio.sleep(limit_s - deadline_s)
        await _probe(engine, limit_s, probe_timeout_s, label)
        raise GroupTooLong(
            f"{label} is too long: engine {engine.name} works, but has not finished {responses} within "
            f"{limit_s:g} s; raise rollout.request_timeout_s (now {deadline_s:g}), or lower "
            "rollout.window or rollout.max_response_tokens"
        )
    except Exception as error:
        if not ended.done():
            ended.set_exception(error)


async def _probe(engine: RolloutEngine, waited_s: float, timeout_s: float, label: str) -> None:
    try:
        await engine.probe(deadline_s=timeout_s)
    except (EngineError, DeadlineExceeded) as error:
        raise EngineGone(
            f"engine {engine.name}: {label} not answered within {waited_s:g} s, nor a probe after "
            f"it: {error}"
        ) from None
