"""A group's requests to the engine that it has been given: moved where that engine is gone or rests, joined where several wrote.

A slow engine gets more time, one that hangs is given up, and no group takes for ever.

An engine that is asked to hand on ends every response in flight as it stands (finish_reason `cut`).
The next engine gets the tokens so far, computes them once, and samples from the same place of the
same random stream, so that the response is the one that it would have been. Where that cannot be,
the response is generated again from its seed, which gives the same one too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections.rollout import SLOWEST_TOKEN_S
from pa_npu.control.tasks import cancel, gather
from pa_npu.engines.protocol import (
    NOTHING,
    EngineError,
    EngineGone,
    Generation,
    RolloutEngine,
    Sampling,
)
from pa_npu.errors import DeadlineExceeded, InvariantViolation, UserError
from pa_npu.samples.columns import continued

if TYPE_CHECKING:
    from pa_npu.engines.pool import EnginePool, Lease

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens left out."""

# Responses may be handed on unbegun whenever a device changes its role. An engine that does so of
# itself is broken.
_MAX_UNASKED = 16
# A request that so many engines died of is the cause, not the victim.
_MAX_SENDS = 4


class GroupSession:
    """A group's requests, one or many, to the engine it has been given, and to another where that
    one is gone.

    What comes back is the same wherever it comes from, because it follows from the seed. Use it
    with `with`: the end closes the lease.

    deadline_s: of a request, after which the engine must show that it works. again_deadline_s: of
    the wait for another engine.
    what: the group, for messages. version: that writes it; None: any.
    """

    def __init__(
        self,
        pool: EnginePool,
        lease: Lease,
        window: Callable[[str], int],
        *,
        deadline_s: float,
        again_deadline_s: float,
        what: str = "a group",
        version: int | None = None,
    ) -> None:
        self.lease = lease
        """The one that the group has, or had last."""
        self._pool = pool
        self._window = window
        self._deadline_s = deadline_s
        self._again_deadline_s = again_deadline_s
        self._what = what
        self._version = version
        self._moving = asyncio.Lock()
        self._tokens = 0
        self._unasked = 0  # responses that an engine handed on unbegun, which did not rest
        self._seats = lease.sequences
        # responses that were asked for and are not there; those of a request that failed among them
        self._open = 0

    def __enter__(self) -> GroupSession:
        self._pool.count_open(self._version, 1)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lease.close(self._tokens)
        self._pool.count_open(self._version, -1)

    async def generate(
        self, prompt_tokens: npt.NDArray[np.int32], n: int, seed: int, sampling: Sampling
    ) -> list[Generation]:
        """n responses to these tokens; several requests of a group may be on their way at the same
        time.

        Raises InvariantViolation where the engine does not say which weight version wrote one:
        nobody else can (I1).
        """
        self._open += n
        generations = await self._ask(prompt_tokens, n, seed, sampling)
        cut = _cut(generations)
        self._open -= n - len(cut)
        if cut:
            several = enumerate(generations)
            generations = await gather(
                [self._go_on(g, prompt_tokens, seed + i, sampling) for i, g in several]
            )
        self._tokens += sum([len(generation.tokens) for generation in generations])
        return list(generations)

    async def _go_on(
        self,
        response: Generation,
        prompt_tokens: npt.NDArray[np.int32],
        seed: int,
        sampling: Sampling,
    ) -> Generation:
        """The whole of a response that an engine may have handed on, and the next one again."""
        if response.finish_reason != "cut":
            return response
        begun: Generation | None = None
        while response.finish_reason == "cut":
            if begun is None or len(response.tokens):
                whole = response if begun is None else joined(begun, response, None)
                # a text that ends a response may lie across the cut, where no engine would find it
                begun = (
                    whole
                    if self._pool.continues and not sampling.stop and len(whole.tokens)
                    else None
                )
            written = NOTHING if begun is None else begun.tokens
            rest = replace(sampling, max_tokens=sampling.max_tokens - len(written))
            (response,) = await self._ask(prompt_tokens, 1, seed, rest, written)
        self._open -= 1
        return response if begun is None else joined(begun, response, self._pool.decode)

    async def _ask(
        self,
        prompt_tokens: npt.NDArray[np.int32],
        n: int,
        seed: int,
        sampling: Sampling,
        written: npt.NDArray[np.int32] = NOTHING,
    ) -> list[Generation]:
        for sends in count(1):
            await self._leave_resting()
            engine = self.lease.engine
            try:
                with self._pool.asking(engine):
                    generations = await generate_patiently(
                        engine,
                        prompt_tokens,
                        n,
                        seed,
                        sampling,
                        written=written,
                        deadline_s=self._deadline_s,
                        probe_timeout_s=self._pool.probe_timeout_s,
                        what=self._what,
                    )
            except EngineGone as error:
                if sends == _MAX_SENDS:
                    raise EngineError(
                        f"{self._what}: {sends} engines were lost while they generated it, the "
                        f"last: {error}"
                    ) from None
                if not await self._move_from(engine, str(error)):
                    raise
            else:
                if None in [generation.version for generation in generations]:
                    raise InvariantViolation(
                        f"I1 version: engine {engine.name} does not say which weight version wrote "
                        f"its responses for {self._what}; its client must put the version that the "
                        "engine itself names into every Generation"
                    )
                if (cut := _cut(generations)) and not self._pool.rests(engine):
                    self._unasked += sum(not len(one.tokens) for one in cut)
                if self._unasked > _MAX_UNASKED * self._seats:
                    raise EngineError(
                        f"engine {engine.name}: it ended responses of {self._what} {self._unasked} "
                        "times unbegun; see its log"
                    )
                return generations
        raise AssertionError("unreachable: the loop ends by return or raise")

    async def _move_from(self, lost: RolloutEngine, reason: str) -> bool:
        """Leave an engine that is gone; false where nobody replaces engines.

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
        """Go to another engine where the group's has handed its responses on, with room for what is
        asked for there.
        """
        moves = self._moving.locked() or self._pool.rests(self.lease.engine)
        if not moves and self.lease.sequences >= self._num_open:
            return
        async with self._moving:
            if self._pool.rests(self.lease.engine):
                self.lease.close(self._tokens)
                self._tokens = 0
                await self._admit_again()
            elif (
                self.lease.sequences < self._num_open
            ):  # more of it than had been asked for when it moved here
                self.lease.hold(self._num_open)

    @property
    def _num_open(self) -> int:
        return min(max(1, self._open), self._seats)

    async def _admit_again(self) -> None:
        first, tokens = self.lease.first, self.lease.tokens * self._num_open // self.lease.sequences
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
    """Those that an engine handed on."""
    return [one for one in generations if one.finish_reason == "cut"]


def joined(first: Generation, rest: Generation, decode: Decode | None) -> Generation:
    """One response of two parts; rest begins where `first` was cut. decode: None leaves their texts
    side by side.
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
    """An engine that works did not finish a group within the limit.

    Another would not either: responses follow from the seed.
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
    what: str,
    written: npt.NDArray[np.int32] = NOTHING,
) -> list[Generation]:
    """engine.generate, and past deadline_s a probe: one that answers it has SLOWEST_TOKEN_S more
    for every token of a response.

    written: as in RolloutEngine.generate. what: the group, for messages. Raises EngineGone when the
    engine does not answer the probe, GroupTooLong at the limit.
    """
    more = {"written": written} if len(written) else {}
    limit_s = deadline_s + SLOWEST_TOKEN_S * sampling.max_tokens
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()  # by the request, or by who watches it
    watching: list[asyncio.Task[None]] = []

    def watch() -> None:
        of = f"{n} responses of up to {sampling.max_tokens} tokens"
        watching.append(
            loop.create_task(_watch(ended, engine, deadline_s, limit_s, probe_timeout_s, what, of))
        )

    # past the limit the request is cancelled here, so that its own deadline never comes first
    request = loop.create_task(
        engine.generate(prompt_tokens, n, seed, sampling, deadline_s=2 * limit_s, **more)
    )
    request.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    # nearly every request ends before, and needs no other task
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
    what: str,
    of: str,
) -> None:
    """Ends a request that has passed its deadline by the reason, if its engine does not answer, or
    not within the limit.
    """
    try:
        await _probe(engine, deadline_s, probe_timeout_s, what)
        logger.warning(
            "%s is slow: engine %s works, but has not finished it after %g s "
            "(rollout.request_timeout_s); waiting up to %g s",
            what,
            engine.name,
            deadline_s,
            limit_s,
        )
        await asyncio.sleep(limit_s - deadline_s)
        await _probe(engine, limit_s, probe_timeout_s, what)
        raise GroupTooLong(
            f"{what} is too long: engine {engine.name} works, but has not finished {of} within "
            f"{limit_s:g} s; raise rollout.request_timeout_s (now {deadline_s:g}), or lower "
            "rollout.window or rollout.max_response_tokens"
        )
    except Exception as error:
        if not ended.done():
            ended.set_exception(error)


async def _probe(engine: RolloutEngine, waited_s: float, timeout_s: float, what: str) -> None:
    try:
        await engine.probe(deadline_s=timeout_s)
    except (EngineError, DeadlineExceeded) as error:
        raise EngineGone(
            f"engine {engine.name}: {what} not answered within {waited_s:g} s, nor a probe after "
            f"it: {error}"
        ) from None
