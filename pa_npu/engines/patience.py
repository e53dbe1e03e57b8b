"""How long to wait for a group: a slow engine gets more time, one that hangs is given up, and no group takes for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections import CUT_SHARE, SLOWEST_TOKEN_S
from pa_npu.control.tasks import cancel
from pa_npu.engines.protocol import EngineError, EngineGone, Generation, RolloutEngine, Sampling
from pa_npu.errors import DeadlineExceeded, UserError

logger = logging.getLogger(__name__)


class GroupTooLong(UserError):
    """An engine that works did not finish a group within the limit. Another would not either: responses follow from the seed."""


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
    cut: bool = False,
) -> list[Generation]:
    """engine.generate, and past deadline_s a probe: one that answers it has SLOWEST_TOKEN_S more for every token of a response.

    what: the group, for messages. cut: at the limit it is generated once more, with fewer tokens: the beginnings of the same
    responses, which follow from the seed. Raises EngineGone when the engine does not answer the probe, GroupTooLong at the limit.
    """
    arguments = (engine, prompt_tokens, n, seed)
    try:
        return await _until_limit(*arguments, sampling, deadline_s, probe_timeout_s, what)
    except GroupTooLong as error:
        shorter = replace(sampling, max_tokens=sampling.max_tokens // CUT_SHARE)
        if not cut or not shorter.max_tokens:
            raise
        reason = str(error).partition(";")[0]
        logger.warning("%s; it is cut to %d tokens and generated again (rollout.too_long)", reason, shorter.max_tokens)
        return await _until_limit(*arguments, shorter, deadline_s, probe_timeout_s, f"{what}, cut,")


async def _until_limit(
    engine: RolloutEngine,
    prompt_tokens: npt.NDArray[np.int32],
    n: int,
    seed: int,
    sampling: Sampling,
    deadline_s: float,
    probe_timeout_s: float,
    what: str,
) -> list[Generation]:
    limit_s = deadline_s + SLOWEST_TOKEN_S * sampling.max_tokens

    def too_long() -> GroupTooLong:
        return GroupTooLong(
            f"{what} is too long: engine {engine.name} works, but has not finished {n} responses of up to "
            f"{sampling.max_tokens} tokens within {limit_s:g} s; raise rollout.request_timeout_s (now {deadline_s:g}), "
            f"lower rollout.window or rollout.max_response_tokens, or set rollout.too_long=cut"
        )

    watch = _Watch(engine, deadline_s, limit_s, probe_timeout_s, what, too_long)
    try:
        # past the limit it is cancelled by the watch, so that its own deadline never comes first
        return await engine.generate(prompt_tokens, n, seed, sampling, deadline_s=2 * limit_s)
    except asyncio.CancelledError:
        if watch.verdict is None:
            raise
        raise watch.verdict from None
    finally:
        await watch.end()


class _Watch:
    """Looks after the request of the task that makes it: nothing until deadline_s, which nearly every request is done before.

    verdict: why it cancelled that task, if it did.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        deadline_s: float,
        limit_s: float,
        probe_timeout_s: float,
        what: str,
        too_long: Callable[[], GroupTooLong],
    ) -> None:
        self.verdict: BaseException | None = None
        self._engine, self._what, self._too_long = engine, what, too_long
        self._deadline_s, self._limit_s, self._probe_timeout_s = deadline_s, limit_s, probe_timeout_s
        self._owner: Any = asyncio.current_task()
        self._looking: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(deadline_s, self._begin)

    def _begin(self) -> None:
        self._looking = asyncio.create_task(self._look(), name=f"watch over {self._what}")

    async def _look(self) -> None:
        try:
            await _probe(self._engine, self._deadline_s, self._probe_timeout_s, self._what)
            logger.warning(
                "%s is slow: engine %s works, but has not finished it after %g s (rollout.request_timeout_s); waiting up to %g s",
                *(self._what, self._engine.name, self._deadline_s, self._limit_s),
            )
            await asyncio.sleep(self._limit_s - self._deadline_s)
            await _probe(self._engine, self._limit_s, self._probe_timeout_s, self._what)
            raise self._too_long()
        except Exception as error:  # whatever it is, the request's task is where it is raised
            self.verdict = error
            self._owner.cancel()

    async def end(self) -> None:
        """The request has ended."""
        self._timer.cancel()
        if self.verdict is not None and hasattr(self._owner, "uncancel"):
            self._owner.uncancel()  # since Python 3.11
        if self._looking is not None:
            await cancel([self._looking])


async def _probe(engine: RolloutEngine, waited_s: float, timeout_s: float, what: str) -> None:
    try:
        await engine.probe(deadline_s=timeout_s)
    except (EngineError, DeadlineExceeded) as error:
        raise EngineGone(
            f"engine {engine.name}: {what} not answered within {waited_s:g} s, nor a probe after it: {error}"
        ) from None
