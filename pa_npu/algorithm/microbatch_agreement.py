"""How far a microbatch's log-probs are from those of the engines (I5), over all tokens and over stretches of long responses.

The sums are agreement_sums.py's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pa_npu.algorithm.agreement_sums import (
    NUM_MAXIMA,
    NUM_SUMS,
    UNCERTAINTY_FLOOR,
    difference_sums,
)
from pa_npu.algorithm.model_outputs import Targets
from pa_npu.config.schema import Config

NUM_STRETCHES = 8
"""Parts of the length of long responses that are compared with the engines' each for itself."""
# Tokens of a stretch: shorter responses do not reach positions that are far from others.
_MIN_STRETCH = 128


def measure(
    microbatch: Targets,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    config: Config,
    peers: torch.Tensor | None = None,
    *,
    is_drawn: bool = True,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns how far the trainers' log-probs are from `peers`, where None from the engines' (I5):
    see difference_sums.

    chosen: bool [N], the targets that count; None for all.
    """
    peers = microbatch.engine_logprobs if peers is None else peers
    index, ages = microbatch.response_index, microbatch.ages
    counted = microbatch.columns.get("written")
    if chosen is not None:
        counted = chosen if counted is None else counted & chosen
    if counted is not None:
        logprobs, peers, entropy = logprobs[counted], peers[counted], entropy[counted]
        index, ages = index[counted], ages[counted]
        if not len(index):
            return torch.zeros(NUM_SUMS + NUM_MAXIMA, device=index.device)
    responses_here = len(microbatch.response_lengths) / max(1, len(microbatch.group_indices))
    # a piece of a group does not see how often its tokens stand in the others
    copies = microbatch.repeats * max(
        1.0, config.rollout.responses_per_prompt / max(1.0, responses_here)
    )
    return difference_sums(
        logprobs.detach().float(),
        peers.float(),
        entropy.detach().float(),
        index,
        len(microbatch.response_lengths),
        ages,
        floor=UNCERTAINTY_FLOOR[config.model.dtype],
        copies=copies,
        is_drawn=is_drawn,
    )


def stretches(microbatch: Targets) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each eighth of the length of the longest response: which tokens lie in it, in words
    and as bool [N]. None of responses that are short.

    An end that turns far positions otherwise than the other agrees with it at near ones, which
    outweigh the others in a sum over all.
    """
    length = max(microbatch.response_lengths, default=0) // NUM_STRETCHES
    if length < _MIN_STRETCH:
        return
    index = microbatch.response_index
    lengths = torch.tensor(microbatch.response_lengths, device=index.device)
    firsts = lengths.cumsum(0) - lengths
    places = torch.arange(len(index), device=index.device) - firsts[index]
    for number in range(NUM_STRETCHES):
        start = number * length
        is_in = places >= start
        if number < NUM_STRETCHES - 1:
            is_in &= places < start + length
        yield f"tokens of responses from {start:,} on", is_in
