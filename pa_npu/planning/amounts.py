"""How many sequences, microbatches and tokens an iteration has at most: every prompt and response at its longest."""

from __future__ import annotations

from dataclasses import dataclass

from pa_npu.config.schema import Config


@dataclass(frozen=True)
class Work:
    """Upper bounds of one iteration's work: every prompt and response at its longest."""

    sequences: int
    updates: int
    microbatches_per_replica: int
    microbatch_tokens: int
    prompt_tokens: int
    response_tokens: int
    computed_tokens: int


def work(config: Config) -> Work:
    """Tokens of an iteration as TPSPD counts them (the prompt once per response) and as they are
    computed.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    group_size = config.rollout.responses_per_prompt
    # rows of data may begin alike, and need not
    shared = config.attention.shared_prompt and config.has_engines
    sequences = config.schedule.prompts_per_iteration * group_size
    pieces = config.groups_per_replica * config.microbatches_per_group
    responses = config.microbatch_responses
    piece = prompt * (1 if shared else responses) + response * responses
    piece = -(-piece // config.pad_multiple) * config.pad_multiple
    return Work(
        sequences=sequences,
        updates=config.schedule.updates_per_iteration,
        microbatches_per_replica=pieces,
        # packing fills a microbatch up to max_tokens, unless one piece is larger or all together
        # are smaller
        microbatch_tokens=min(max(piece, config.microbatch.max_tokens or 0), piece * pieces),
        prompt_tokens=sequences * prompt,
        response_tokens=sequences * response,
        computed_tokens=piece * pieces * config.mesh.data,
    )
