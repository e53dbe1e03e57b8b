"""How long to wait for a group: a slow engine gets more time, one that hangs is given up, and no group takes for ever."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import numpy.typing as npt

from pa_npu.config.sections import SLOWEST_TOKEN_S
from pa_npu.control.tasks import cancel
from pa_npu.engines.handing_on import NOTHING
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
    written: npt.NDArray[np.int32] = NOTHING,
) -> list[Generation]:
    """engine.generate, and past deadline_s a probe: one that answers it has SLOWEST_TOKEN_S more for every token of a response.

    written: as in RolloutEngine.generate. what: the group, for messages. Raises EngineGone when the engine does not answer the
    probe, GroupTooLong at the limit.
    """
    more = {"written": written} if len(written) else {}
    limit_s = deadline_s + SLOWEST_TOKEN_S * sampling.max_tokens
    # past the limit the task is cancelled here, so that its own deadline never comes first
    asked = engine.generate(prompt_tokens, n, seed, sampling, deadline_s=2 * limit_s, **more)
    task = asyncio.ensure_future(asked)
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            await _probe(engine, deadline_s, probe_timeout_s, what)
            logger.warning(
                "%s is slow: engine %s works, but has not finished it after %g s (rollout.request_timeout_s); waiting up to %g s",
                *(what, engine.name, deadline_s, limit_s),
            )
            await asyncio.wait({task}, timeout=limit_s - deadline_s)
        if not task.done():
            await _probe(engine, limit_s, probe_timeout_s, what)
        if not task.done():
            raise GroupTooLong(
                f"{what} is too long: engine {engine.name} works, but has not finished {n} responses of up to "
                f"{sampling.max_tokens} tokens within {limit_s:g} s; raise rollout.request_timeout_s (now {deadline_s:g}), "
                f"or lower rollout.window or rollout.max_response_tokens"
            )
        return await task
    finally:
        await cancel([task])


async def _probe(engine: RolloutEngine, waited_s: float, timeout_s: float, what: str) -> None:
    try:
        await engine.probe(deadline_s=timeout_s)
    except (EngineError, DeadlineExceeded) as error:
        raise EngineGone(
            f"engine {engine.name}: {what} not answered within {waited_s:g} s, nor a probe after it: {error}"
        ) from None
