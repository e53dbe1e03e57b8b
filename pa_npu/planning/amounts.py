"""Upper bounds of an iteration's work: every prompt and response at its longest."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.pieces import MIN_SAVED_ROWS, saved_rows
from pa_npu.config.schema import Config


@dataclass(frozen=True)
class Work:
    """Sequences, microbatches and tokens that an iteration has at most. sequences: without rows of
    data.demonstrations, which are in all other numbers. stem_tokens: of the prompt that the
    microbatches of a group share and that is computed once for them; 0 where each computes it.
    """

    sequences: int
    updates: int
    microbatches_per_replica: int
    microbatch_tokens: int
    prompt_tokens: int
    response_tokens: int
    computed_tokens: int
    stem_tokens: int = 0


def work(config: Config) -> Work:
    """Returns the bounds of `config`.

    `prompt_tokens` and `response_tokens` are counted as TPSPD counts them, the prompt once per
    response; `computed_tokens` are those that trainers compute, padding included.
    """
    prompt = config.data.max_prompt_tokens
    response = config.rollout.max_response_tokens
    sequences = config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt
    rows = config.demonstration_groups * config.rollout.responses_per_prompt
    pieces = config.microbatches_per_group  # of a group

    responses = config.microbatch_responses
    # rows of data may begin alike, and need not
    has_rows = not config.rollout.has_engines or bool(config.demonstration_groups)
    is_shared = config.attention.shared_prompt and not has_rows
    num_prompts = 1 if is_shared else responses
    tokens = prompt * num_prompts + response * responses
    if config.microbatch.tokens is not None:
        # a group is cut further, down to single responses
        tokens = min(tokens, max(config.microbatch.tokens, prompt + response))
        per_piece = (
            max(1, (tokens - prompt) // response) if is_shared else tokens // (prompt + response)
        )
        pieces = -(-config.rollout.responses_per_prompt // min(responses, per_piece))
    microbatches = config.groups_per_replica * pieces
    padded = -(-tokens // config.trainer.pad_multiple) * config.trainer.pad_multiple

    stem = 0
    computed = padded * microbatches
    if is_shared and not config.depth_first_obstacle:
        saved = saved_rows(pieces, prompt - 1)
        if saved >= MIN_SAVED_ROWS:
            stem = prompt - 1
            computed -= saved * config.groups_per_replica

    # Packing fills a microbatch up to its bound, unless one group's part is larger or all of them
    # together are smaller.
    packed = max(padded, config.microbatch.budget or 0)
    return Work(
        sequences=sequences,
        updates=config.schedule.updates_per_iteration,
        microbatches_per_replica=microbatches,
        microbatch_tokens=min(packed, padded * microbatches),
        prompt_tokens=(sequences + rows) * prompt,
        response_tokens=(sequences + rows) * response,
        computed_tokens=computed * config.mesh.data,
        stem_tokens=stem,
    )
