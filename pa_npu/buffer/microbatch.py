"""Microbatch: one packed sequence of responses of a group with all that the loss needs, and how groups are cut.

Packed with shared prompt (P=2, R=[2, 1]): tokens p0 p1 | a0 a1 | b0, one prompt for all responses of the microbatch.
Without it (the measured baseline): p0 p1 a0 a1 | p0 p1 b0, separate sequences and no padding between them.
Either way the targets are the response tokens in the order of the responses; the layout says which row predicts which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.buffer.group import Group


@dataclass(frozen=True, eq=False)
class Microbatch:
    """T packed tokens of which N = sum(response_lengths) are targets.

    tokens: int64 [T], padding included. rows: int64 [N], the packed row whose hidden state predicts targets: int64 [N].
    engine_logprobs, advantages: float32 [N]. response_index: int64 [N], the response's number inside its group.
    response_lengths: tokens of each response of this microbatch; prompt_length: tokens of the prompt they share.
    """

    layout: PrefixLayout
    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    response_index: torch.Tensor
    response_lengths: tuple[int, ...]
    prompt_length: int
    iteration: int
    version: int
    group_index: int

    @property
    def num_sequences(self) -> int:
        """Responses in this microbatch."""
        return len(self.response_lengths)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens with the prompt counted once per response, as TPSPD counts them."""
        return self.prompt_length * self.num_sequences

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_lengths)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self.layout.total - self.layout.padding

    def to(self, device: torch.device | str) -> Microbatch:
        """The same with its tensors on device; the layout stays on the host and caches its own per-device indices."""
        names = ("tokens", "rows", "targets", "engine_logprobs", "advantages", "response_index")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def build_microbatches(
    group: Group, responses_per_microbatch: int, shared_prompt: bool, pad_multiple: int
) -> list[Microbatch]:
    """Cuts a group into microbatches of consecutive responses, padding each to a multiple of pad_multiple tokens.

    Raises ValueError when responses_per_microbatch does not divide the group.
    """
    if responses_per_microbatch < 1 or group.num_responses % responses_per_microbatch:
        raise ValueError(
            f"{group}: {group.num_responses} responses cannot be cut into microbatches of {responses_per_microbatch}; "
            f"microbatch.responses must divide rollout.responses_per_prompt"
        )
    starts = range(0, group.num_responses, responses_per_microbatch)
    return [_build(group, start, start + responses_per_microbatch, shared_prompt, pad_multiple) for start in starts]


def _build(group: Group, first: int, last: int, shared_prompt: bool, pad_multiple: int) -> Microbatch:
    """The microbatch of responses first .. last - 1."""
    lengths = group.response_lengths[first:last].astype(np.int64)
    offsets = group.response_offsets()
    span = slice(offsets[first], offsets[last])
    responses = group.response_tokens[span]
    prompt = group.prompt_tokens
    local_index = np.repeat(np.arange(last - first), lengths)
    positions = np.arange(len(responses)) + len(prompt)
    if shared_prompt:
        layout = PrefixLayout.from_groups([(len(prompt), lengths.tolist())])
        packed = np.concatenate([prompt, responses])
    else:
        layout = PrefixLayout.from_sequences((lengths + len(prompt)).tolist())
        parts = np.split(responses, np.cumsum(lengths)[:-1])
        packed = np.concatenate([piece for response in parts for piece in (prompt, response)])
        positions += local_index * len(prompt)
    layout = layout.pad(pad_multiple)
    tokens = np.zeros(layout.total, dtype=np.int64)
    tokens[: len(packed)] = packed
    index = first + local_index
    return Microbatch(
        layout=layout,
        tokens=torch.from_numpy(tokens),
        rows=layout.predictor_rows()[torch.from_numpy(positions)],
        targets=torch.from_numpy(responses.astype(np.int64)),
        engine_logprobs=torch.from_numpy(group.logprobs[span].astype(np.float32)),
        advantages=torch.from_numpy(group.advantages[index]),
        response_index=torch.from_numpy(index),
        response_lengths=tuple(lengths.tolist()),
        prompt_length=len(prompt),
        iteration=group.iteration,
        version=group.version,
        group_index=group.index,
    )
