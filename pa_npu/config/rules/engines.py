"""Rules for engines: sampling that trainers can recompute, windows and lengths that fit, attached engines, the way of weights."""

from __future__ import annotations

from collections.abc import Iterator

from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import counted

_LEAST_TEMPERATURE = 0.01  # what vLLM raises smaller ones to, but for 0


def broken_engines(c: ConfigTree) -> Iterator[str]:
    """One line per rule that is broken: keys, values, rule, remedy."""
    _t, r, _s = c.trainer, c.rollout, c.schedule
    if r.temperature < _LEAST_TEMPERATURE:
        yield (
            f"rollout.temperature: {r.temperature}: engines sample at {_LEAST_TEMPERATURE} instead of less, and the trainer's "
            f"log-probs would not match; set it to {_LEAST_TEMPERATURE} or more"
        )
    if r.attach and len(r.attach) != c.num_engines:
        yield f"rollout.attach: {len(r.attach)} URLs for rollout.engines = {r.engines}; list one URL per engine"
    through = c.publish.shared_through
    if through == "handles" and c.placement.nnodes > 1:
        yield (
            f"publish.shared_through: handles are for one machine, and placement.nnodes = {c.placement.nnodes}; set it to auto or "
            f"host"
        )
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
