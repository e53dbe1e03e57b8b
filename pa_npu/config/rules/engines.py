"""Rules for engines: sampling that trainers can recompute, windows and lengths that fit, the way of weights; and for one alone."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted

_KEY = "rollout.engine_settings"
_LEAST_TEMPERATURE = 0.01  # what vLLM raises smaller ones to, but for 0


def broken_engines(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    r = c.rollout
    if r.temperature < _LEAST_TEMPERATURE:
        yield (
            f"rollout.temperature: {r.temperature}: engines sample at {_LEAST_TEMPERATURE} instead of less, and the trainer's "
            f"log-probs would not match; set it to {_LEAST_TEMPERATURE} or more"
        )
    if r.attach and len(r.attach) != c.num_engines:
        yield f"rollout.attach: {len(r.attach)} URLs for rollout.engines = {r.engines}; list one URL per engine"
    if r.window != "auto" and r.window < r.responses_per_prompt:
        yield (
            f"rollout.window: {counted(r.window, 'sequence')} cannot hold one group of rollout.responses_per_prompt = "
            f"{r.responses_per_prompt}; set it to at least {r.responses_per_prompt} or to auto"
        )
    longest = c.data.max_prompt_tokens + r.max_response_tokens
    if longest > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_batched_tokens: {r.max_num_batched_tokens} is less than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {c.data.max_prompt_tokens} + {r.max_response_tokens}, so that a sequence would be "
            f"prefilled in chunks, which seeded sampling does not allow; raise it to at least {longest}"
        )
    if r.max_num_seqs > r.max_num_batched_tokens:
        yield (
            f"rollout.max_num_seqs: {r.max_num_seqs} exceeds rollout.max_num_batched_tokens = {r.max_num_batched_tokens}; "
            f"lower it, a step has one token per sequence at least"
        )


def broken_single_engines(c: ConfigTree) -> Iterator[str]:
    """The same for what is particular to some engines (rollout.engine_settings): which there are, their windows and devices."""
    r = c.rollout
    number = max(c.num_engines, r.max_engines or 0)
    named = [index for entry in r.engine_settings for index in entry.engines]
    for index in sorted(set(named)):
        if index >= number:
            yield (
                f"{_KEY}: there is no engine {index}: the run has {number}, numbered from 0 (rollout.engines); name one of 0 to "
                f"{number - 1}"
            )
        if named.count(index) > 1:
            yield f"{_KEY}: engine {index} is named {named.count(index)} times; put all that is said of it into one entry"
    for entry in r.engine_settings:
        which = _which(entry.engines)
        shared = [index for index in entry.engines if c.is_shared(index)]
        if entry.window is not None and entry.window < r.responses_per_prompt:
            yield (
                f"{_KEY}: a window of {entry.window} for {which} cannot hold one group of rollout.responses_per_prompt = "
                f"{r.responses_per_prompt}; set it to at least {r.responses_per_prompt}, or remove it"
            )
        if entry.window is not None and shared and not c.placement.colocate:
            yield (
                f"{_KEY}: a window for engine {shared[0]}, which is on a trainer's device and takes the groups that the schedule "
                f"names for it; remove the window"
            )
        kind = entry.device_kind
        if kind is not None and not r.attach and c.run.device not in ("auto", kind):
            yield (
                f"{_KEY}: {which} on {entry.device}, but the run starts its engines on run.device={c.run.device}; start them where "
                f"they are and attach them (rollout.attach), or remove the device"
            )


def _which(engines: tuple[int, ...]) -> str:
    return f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"
