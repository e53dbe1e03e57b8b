"""Floating-point operations that training a group takes: what replicas are balanced by."""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec


class GroupWork:
    """Operations of a group's microbatches as they are packed: linear layers by token, attention by pair, head by prediction.

    Tokens alone would call 8 responses of 1,000 and 1 of 8,000 the same, whose attention differs by a factor of 8. Packed
    sequences' padding and the passes of frozen models, which have the same shape, are left out.
    """

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self._flops = spec.definition.flops(spec)
        self._responses = config.microbatch_responses
        self._shared_prompt = config.attention.shared_prompt

    def __call__(self, prompt_length: int, response_lengths: Sequence[int]) -> float:
        """Forward and backward of all microbatches of a group with these lengths, in tokens."""
        pieces = [
            response_lengths[start : start + self._responses]
            for start in range(0, len(response_lengths), self._responses)
        ]
        return sum(self._flops.group(prompt_length, lengths, shared=self._shared_prompt) for lengths in pieces)
