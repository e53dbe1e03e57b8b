"""Rules for tokens of older weights: what cannot be exact with them, and what makes no sense without."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.rules.algorithm import of_preset
from pa_npu.config.tree import ConfigTree

# Engines of a run in which some can swap before the others: two keep the version before.
_LEAST_ROLLING = 3


def broken_staleness(c: ConfigTree) -> Iterator[str]:
    """Yields combinations that cannot be exact, or make no sense, with or without tokens of older weights."""
    s, a = c.schedule, c.algorithm
    yield from _broken_divergence(c)
    yield from _broken_budget(c)
    yield from _broken_delay(c)
    if not s.max_staleness:
        if a.age_exponent:
            yield (
                f"algorithm.age_exponent: {a.age_exponent}: with schedule.max_staleness = 0 every token has the age 0; set "
                f"max_staleness, or remove the key"
            )
        return
    ahead = f"schedule.max_staleness = {s.max_staleness}"
    if s.max_staleness >= s.iterations:
        yield (
            f"schedule.max_staleness: {s.max_staleness} versions ahead in a run of schedule.iterations = {s.iterations}: the last "
            f"iteration would be sampled by the first model; lower max_staleness"
        )
    if a.advantage == "batch-std":
        yield (
            f"algorithm.advantage: batch-std{of_preset(c, 'advantage')} with {ahead}: it divides by the deviation of rewards that "
            f"other weights than the trained ones have earned; set advantage to group-std, or max_staleness to 0"
        )
    if s.compare_iterations:
        yield (
            f"schedule.compare_iterations: {s.compare_iterations} with {ahead}: it measures streamed against synchronous "
            f"iterations, and neither is what runs ahead; set it to 0, or max_staleness to 0"
        )
    if a.loss == "reinforce" and a.importance_sampling == "none":
        yield (
            f"algorithm.loss: reinforce{of_preset(c, 'loss')} with {ahead}: it has no ratio to the older policy that sampled; set "
            f"algorithm.importance_sampling to token or sequence, or algorithm.loss to clip"
        )


def _broken_divergence(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement of publish.divergence."""
    p, what = c.publish, f"publish.divergence: {c.publish.divergence}"
    if p.divergence is None:
        return
    if not c.schedule.max_staleness:
        yield (
            f"{what} with schedule.max_staleness = 0, where every token is trained by the version that generated it; set "
            f"max_staleness to 1 or more, or remove the key"
        )
    if not p.probe_tokens:
        yield f"{what} is measured on the probe, which publish.probe_tokens = 0 turns off; raise it"


def _broken_budget(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of schedule.tokens_per_update."""
    s, budget = c.schedule, c.schedule.tokens_per_update
    if budget is None:
        return
    what = f"schedule.tokens_per_update: {budget}"
    if not s.max_staleness:
        yield (
            f"{what} with schedule.max_staleness = 0: groups that an update leaves over would be trained by weights that did not "
            f"generate them; set max_staleness to 1 or more, or remove the key"
        )
    if s.dynamic_sampling:
        yield (
            f"{what} with schedule.dynamic_sampling{of_preset(c, 'dynamic_sampling', 'schedule')}, which trains a fixed number of "
            f"groups; set dynamic_sampling to false, or remove the key"
        )
    if c.publish.divergence is not None:
        yield (
            f"{what} with publish.divergence: one would keep groups and the other weights for the same versions of "
            f"max_staleness; remove one"
        )
    if s.updates_per_iteration > 1:
        yield (
            f"{what} with schedule.updates_per_iteration = {s.updates_per_iteration}, which shares a fixed number of groups; set "
            f"it to 1, or remove the key"
        )
    most = s.prompts_per_iteration * c.rollout.responses_per_prompt * c.rollout.max_response_tokens
    if budget > most:
        yield (
            f"{what} is more than the {most} tokens that schedule.prompts_per_iteration = {s.prompts_per_iteration} groups "
            f"can have; lower it, or raise prompts_per_iteration"
        )


def _broken_delay(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of publish.mode=delayed and rolling."""
    what = f"publish.mode: {c.publish.mode}"
    if c.publish.mode == "blocking":
        return
    yield from _broken_rolling(c)
    if not c.schedule.max_staleness:
        yield (
            f"{what} with schedule.max_staleness = 0, where engines have nothing to generate while newer weights arrive; set "
            f"max_staleness to 1 or more, or mode to blocking"
        )
    if c.publish.divergence is not None:
        yield f"{what} with publish.divergence, which is decided when engines are through; remove it, or set mode to blocking"
    if c.rollout.tensor_parallel > 1:
        yield (
            f"{what} with rollout.tensor_parallel = {c.rollout.tensor_parallel}: an engine's own collectives and a "
            f"publish would run side by side; set tensor_parallel to 1, or mode to blocking"
        )


def _broken_rolling(c: ConfigTree) -> Iterator[str]:
    """Yields each missing requirement and each conflict of publish.mode=rolling."""
    s, what = c.schedule, "publish.mode: rolling"
    if c.publish.mode != "rolling":
        return
    if (most := c.num_engines) < _LEAST_ROLLING:
        yield (
            f"{what} with rollout.engines = {most}: two engines keep the version before until all its groups are complete, in case "
            f"one of them dies; set engines to {_LEAST_ROLLING} or more, or mode to delayed"
        )
    if s.dynamic_sampling:
        yield (
            f"{what} with schedule.dynamic_sampling{of_preset(c, 'dynamic_sampling', 'schedule')}: which groups are replaced is "
            f"known only when all are complete; set mode to delayed, or dynamic_sampling to false"
        )
    if s.tokens_per_update is not None:
        yield (
            f"{what} with schedule.tokens_per_update: which groups are carried is known only when all are complete; set swap to "
            f"delayed, or remove the budget"
        )
    if c.agent.port is not None:
        yield (
            f"{what} with agent.port: samples for other programs would be of no version; set mode to delayed, or remove the port"
        )
    if c.evaluate.overlap:
        yield f"{what} with evaluate.overlap: engines would go on to the next version while they are evaluated; remove one"
