"""Microbatch: one packed sequence of responses with all that the loss needs; how groups are cut into pieces and packed.

A piece is some consecutive responses of one group; a microbatch is one piece, or several up to a budget of tokens.
Packed with shared prompt (P=2, R=[2, 1]): tokens p0 p1 | a0 a1 | b0, one prompt for all responses of the piece.
Without it (the measured baseline): p0 p1 a0 a1 | p0 p1 b0, separate sequences and no padding between them.
Either way the targets are the response tokens in the order of the responses; the layout says which row predicts which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.samples.group import Group


@dataclass(frozen=True, eq=False)
class Microbatch:
    """T packed tokens of which N = sum(response_lengths) are targets.

    tokens: int64 [T], padding included. rows: int64 [N], the packed row whose hidden state predicts targets: int64 [N].
    engine_logprobs, advantages: float32 [N]. response_index: int64 [N], the response's number in this microbatch, from 0.
    response_lengths: tokens of each response. num_prompt_tokens: the prompt counted once per response, as TPSPD does.
    group_indices: dispatch indices of the groups that the responses come from, each once.
    sources: of each response its group's dispatch index and its number in the group.
    """

    layout: PrefixLayout
    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor
    response_index: torch.Tensor
    response_lengths: tuple[int, ...]
    num_prompt_tokens: int
    iteration: int
    version: int
    group_indices: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]

    @property
    def num_sequences(self) -> int:
        """Responses in this microbatch."""
        return len(self.response_lengths)

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


@dataclass(frozen=True, eq=False)
class Piece:
    """Responses first .. last - 1 of a group: what packing puts together and never cuts."""

    group: Group
    first: int
    last: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each response, int64."""
        return self.group.response_lengths[self.first : self.last].astype(np.int64)

    @property
    def span(self) -> slice:
        """Where the responses stand in the group's arrays of response tokens."""
        offsets = self.group.response_offsets()
        return slice(int(offsets[self.first]), int(offsets[self.last]))

    def num_tokens(self, shared_prompt: bool) -> int:
        """Packed tokens, without padding."""
        prompts = 1 if shared_prompt else self.last - self.first
        return prompts * len(self.group.prompt_tokens) + int(self.lengths.sum())

    def packed(self, shared_prompt: bool) -> tuple[np.ndarray, np.ndarray]:
        """Its packed tokens, and at which of them the response tokens stand, both int64."""
        prompt, lengths = self.group.prompt_tokens, self.lengths
        responses = self.group.response_tokens[self.span]
        positions = np.arange(len(responses)) + len(prompt)
        if shared_prompt:
            return np.concatenate([prompt, responses]).astype(np.int64), positions
        parts = np.split(responses, np.cumsum(lengths)[:-1])
        packed = np.concatenate([half for response in parts for half in (prompt, response)])
        return packed.astype(np.int64), positions + np.repeat(np.arange(len(lengths)), lengths) * len(prompt)


def cut(group: Group, responses: int) -> list[Piece]:
    """The group in pieces of `responses` consecutive responses. Raises ValueError when that does not divide the group."""
    if responses < 1 or group.num_responses % responses:
        raise ValueError(
            f"{group}: {group.num_responses} responses cannot be cut into microbatches of {responses}; "
            f"microbatch.responses must divide rollout.responses_per_prompt"
        )
    return [Piece(group, start, start + responses) for start in range(0, group.num_responses, responses)]


def pack(pieces: Sequence[Piece], shared_prompt: bool, pad_multiple: int) -> Microbatch:
    """One microbatch of pieces of one iteration, in their order, padded to a multiple of pad_multiple tokens."""
    parts: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    groups: list[tuple[int, list[int]]] = []
    start = 0
    for piece in pieces:
        tokens, inside = piece.packed(shared_prompt)
        parts.append(tokens)
        positions.append(start + inside)
        groups.append((len(piece.group.prompt_tokens), piece.lengths.tolist()))
        start += len(tokens)
    if shared_prompt:
        layout = PrefixLayout.from_groups(groups)
    else:
        layout = PrefixLayout.from_sequences(prompt + length for prompt, responses in groups for length in responses)
    layout = layout.pad(pad_multiple)
    lengths = np.concatenate([piece.lengths for piece in pieces])
    padding = np.zeros(layout.padding, np.int64)
    return Microbatch(
        layout=layout,
        tokens=torch.from_numpy(np.concatenate([*parts, padding])),
        rows=layout.predictor_rows()[torch.from_numpy(np.concatenate(positions))],
        targets=_joined([piece.group.response_tokens[piece.span] for piece in pieces], np.int64),
        engine_logprobs=_joined([piece.group.logprobs[piece.span] for piece in pieces], np.float32),
        advantages=_joined(
            [np.repeat(piece.group.advantages[piece.first : piece.last], piece.lengths) for piece in pieces], np.float32
        ),
        response_index=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        response_lengths=tuple(lengths.tolist()),
        num_prompt_tokens=sum(prompt * len(responses) for prompt, responses in groups),
        iteration=pieces[0].group.iteration,
        version=pieces[0].group.version,
        group_indices=tuple(dict.fromkeys(piece.group.index for piece in pieces)),
        sources=tuple((piece.group.index, number) for piece in pieces for number in range(piece.first, piece.last)),
    )


def build_microbatches(
    group: Group, responses_per_microbatch: int, shared_prompt: bool, pad_multiple: int
) -> list[Microbatch]:
    """Every piece of a group as a microbatch of its own. Raises ValueError as `cut` does."""
    return [pack([piece], shared_prompt, pad_multiple) for piece in cut(group, responses_per_microbatch)]


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    """A tensor of its own memory, also of a single part."""
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
