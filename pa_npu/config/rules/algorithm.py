"""Rules for the algorithm: what loss, advantages and corrections need of each other."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.presets import PRESETS
from pa_npu.config.tree import ConfigTree


def broken_algorithm(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    r, s = c.rollout, c.schedule
    uncorrected = c.algorithm.importance_sampling == "none"
    if s.updates_per_iteration > 1 and c.algorithm.loss == "reinforce":
        yield (
            f"schedule.updates_per_iteration: {s.updates_per_iteration}: algorithm.loss=reinforce has no ratio to the policy "
            f"that sampled, so that it is exact for one update only; set it to 1, or algorithm.loss=clip"
        )
    if c.algorithm.ratio == "sampling" and not uncorrected:
        yield (
            f"algorithm.ratio: sampling with algorithm.importance_sampling={c.algorithm.importance_sampling}, which counts the "
            f"sampling policy twice; set ratio to proximal, or importance_sampling to none"
        )
    if (
        c.algorithm.kl_in == "reward"
        and c.algorithm.kl_coef
        and c.algorithm.advantage not in ("centred", "leave-one-out")
    ):
        yield (
            f"algorithm.kl_in: reward with algorithm.advantage={c.algorithm.advantage}: the trainer knows the KL only after the "
            f"coordinator has divided rewards by their deviation; set advantage to centred or leave-one-out, or kl_in to loss"
        )
    if c.algorithm.kl_in == "reward" and c.algorithm.kl_coef and c.microbatch_responses != r.responses_per_prompt:
        yield (
            f"algorithm.kl_in: reward needs all responses of a group in one microbatch, but microbatch.responses = "
            f"{c.microbatch_responses} of {r.responses_per_prompt}; remove microbatch.responses, or set kl_in to loss"
        )
    yield from _broken_preference(c)
    if c.algorithm.dual_clip is not None and c.algorithm.delta is not None:
        yield (
            f"algorithm.delta: {c.algorithm.delta} with algorithm.dual_clip = {c.algorithm.dual_clip}: both bound the loss of "
            f"tokens with a negative advantage; remove one"
        )
    if c.algorithm.delta is not None and c.algorithm.delta <= 1 + c.algorithm.clip_high:
        yield (
            f"algorithm.delta: {c.algorithm.delta} is not above 1 + algorithm.clip_high = {1 + c.algorithm.clip_high:g}, where "
            f"ratios are clipped already; raise it, or remove the key"
        )
    refresh = c.algorithm.reference_refresh_every
    if refresh and not c.algorithm.has_reference:
        yield (
            f"algorithm.reference_refresh_every: {refresh}: there is no reference with algorithm.kl_coef = 0; set kl_coef, or "
            f"remove the key"
        )
    if s.stream and c.algorithm.advantage == "batch-std":
        yield (
            f"algorithm.advantage: batch-std{of_preset(c, 'advantage')} needs the whole batch before the first update, but "
            f"schedule.stream={str(s.stream).lower()} trains while groups arrive; set schedule.stream=false or "
            f"algorithm.advantage=group-std"
        )


def _broken_preference(c: ConfigTree) -> Iterator[str]:
    """Yields each conflict of algorithm.loss=dpo with another key."""
    a = c.algorithm
    if a.loss != "dpo":
        return
    what = f"algorithm.loss: dpo{of_preset(c, 'loss')}"
    if c.microbatch_responses != c.rollout.responses_per_prompt:
        yield (
            f"{what} compares the responses of a group, but microbatch.responses = {c.microbatch_responses} of "
            f"{c.rollout.responses_per_prompt} are in a microbatch; remove microbatch.responses"
        )
    if not a.kl_coef:
        yield f"{what} needs its beta, the larger the nearer the policy stays to the reference; set algorithm.kl_coef, e.g. to 0.1"
    if a.router_aux_coef:
        yield f"{what} is a mean over pairs, which no token has a part of; set algorithm.router_aux_coef to 0"
    if a.importance_sampling != "none":
        yield (
            f"{what} prefers one response to another whoever sampled them, so that algorithm.importance_sampling="
            f"{a.importance_sampling} has nothing to correct; set it to none"
        )


def of_preset(c: ConfigTree, key: str, section: str = "algorithm") -> str:
    """Says so where a key's value may be a preset's, which the user has not written."""
    preset = PRESETS.get(c.algorithm.name) if c.algorithm.name else None
    known = preset.sections()[section] if preset else ()
    return f" (of algorithm.name={c.algorithm.name})" if key in known else ""
