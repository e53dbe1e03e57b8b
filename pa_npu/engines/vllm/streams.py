"""Moves a request's random stream on inside a vLLM worker, so that it continues another's response.

vLLM makes a request's generator from its seed when the request enters the runner, and every sampled
token draws from it. A request that continues a response carries the number of tokens already drawn
(`vllm_xargs`), and its generator skips as many draws as it enters.

The engine's own sampler is tried once to find how far a draw moves a generator: on devices by an
offset, on CPU by one integer (`fused_gumbel_argmax`) or by a row of exponentials as long as the
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

DRAWN = "drawn"
"""The name under which a request gives the number of tokens of its stream that were drawn before."""

Skip = Callable[[torch.Generator, int], None]


def follow_streams(worker: Any) -> bool:
    """Lets every request begin where its stream has to.

    Returns False if this engine's sampler draws in an unknown way.
    """
    runner = worker.model_runner
    if hasattr(runner, "_pa_follows"):
        return bool(runner._pa_follows)
    skip = _skip_of(worker)
    runner._pa_follows = skip is not None
    if skip is None:
        return False
    update = runner._update_states

    def update_and_skip(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(scheduled, *args, **kwargs)
        for new in scheduled.scheduled_new_reqs:
            extra_args = None
            if new.sampling_params is not None:
                extra_args = new.sampling_params.extra_args
            generator = runner.requests[new.req_id].generator
            if extra_args and extra_args.get(DRAWN) and generator is not None:
                skip(generator, int(extra_args[DRAWN]))
        return result

    runner._update_states = update_and_skip
    return True


def _skip_of(worker: Any) -> Skip | None:
    """Returns a function that skips draws of the worker's sampler; None if that is unknown."""
    runner = worker.model_runner
    device = torch.device(worker.device)
    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    if sampler is None or not hasattr(runner, "_update_states"):
        return None
    vocabulary = int(worker.model_config.get_vocab_size())
    drawn = torch.Generator(device=device).manual_seed(1)
    fresh = torch.Generator(device=device).manual_seed(1)
    try:
        sampler(torch.zeros(1, vocabulary, device=device), {0: drawn}, None, None)
        if device.type != "cpu":
            return _by_offset(drawn.get_offset() - fresh.get_offset())
    # The sampler of another release has another signature, kernel or generator.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        logger.warning(
            "responses cannot be continued elsewhere: this engine's sampler does not draw from one "
            "row of logits on %s (%s: %s)",
            device,
            type(error).__name__,
            error,
        )
        return None

    def draw_integer(generator: torch.Generator) -> object:
        return torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)

    def draw_exponentials(generator: torch.Generator) -> object:
        return torch.empty(vocabulary).exponential_(generator=generator)

    for draw in (draw_integer, draw_exponentials):
        generator = torch.Generator().manual_seed(1)
        draw(generator)
        if torch.equal(generator.get_state(), drawn.get_state()):
            return _by_drawing(draw)
    return None


def _by_offset(step: int) -> Skip | None:
    def skip(generator: torch.Generator, draws: int) -> None:
        generator.set_offset(generator.get_offset() + draws * step)

    return skip if step > 0 else None


def _by_drawing(draw: Callable[[torch.Generator], object]) -> Skip:
    def skip(generator: torch.Generator, draws: int) -> None:
        for _ in range(draws):
            draw(generator)

    return skip
