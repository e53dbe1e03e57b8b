"""Microbatch: one packed sequence with all that the loss needs; how groups are cut into pieces and packed.

A piece is a group with some consecutive samples of it; a microbatch is one piece, or several up to
a budget of tokens. Packed with shared prefixes (prompt of 2, responses of 2 and 1): p0 p1 | a0 a1 |
b0, the prompt once for all samples of the piece. Without (the measured baseline): p0 p1 a0 a1 | p0
p1 b0, separate sequences and no padding between them.
Which prefixes there are is found from the tokens, and from the arrays that placeholder tokens stand
for. Either way the targets are the trained tokens, sample by sample; `rows` says which packed row
predicts each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from pa_npu.algorithm.objective import Targets
from pa_npu.attention import PrefixLayout
from pa_npu.attention.trie import PackedSequences
from pa_npu.attention.trie import pack as pack_trie
from pa_npu.samples.attachments import Placeholders, within
from pa_npu.samples.columns import ADVANTAGES, LOGPROBS, Column
from pa_npu.samples.group import Group

# Behind the prompts, samples share a prefix (as branches of one response do) only from so many
# tokens on: each segment is a kernel call of its own, and responses that begin alike by chance
# would be cut into crumbs.
_LEAST_COMMON = 64


@dataclass(frozen=True, eq=False)
class PackedAttachments:
    """What some packed rows stand for: one run's arrays, such as an image's pixels and its grid,
    once however often its samples show them.

    A model that makes an embedding [length, hidden] of the arrays puts embedding[places] into rows.

    arrays: by name, of any shape, shared with other runs that show the same array; do not write to
    them. digests: of each, bytes [16].
    length: placeholder tokens of one run. rows: int64 [R], the packed rows that are such tokens,
    ascending; places: int64 [R], each row's place in its run, from 0. R is `length` where all
    samples share the run, and larger where some do not.
    """

    arrays: dict[str, torch.Tensor]
    digests: dict[str, bytes]
    length: int
    rows: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class Microbatch(Targets):
    """T packed tokens of which N are targets: the trained tokens of its samples.

    tokens: int64 [T], padding included. rows: int64 [N], the packed row whose hidden state predicts
    targets: int64 [N].
    packed: declared columns of all tokens, [T, *shape] by name, beside `tokens`; a shared prefix
    has its first sample's.
    attachments: those that its rows need, in the order in which its samples show them.
    """

    layout: PrefixLayout
    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    packed: dict[str, torch.Tensor]
    attachments: tuple[PackedAttachments, ...] = field(default=(), kw_only=True)

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def is_filler(self) -> bool:
        """Whether it belongs to no response: one that is computed so that other ranks may go on."""
        return not self.response_lengths

    def to(self, device: torch.device | str) -> Microbatch:
        """The same with its tensors on device; the layout stays on the host and caches its own
        per-device indices.
        """
        moved = {
            name: getattr(self, name).to(device)
            for name in ("tokens", "rows", "targets", "ages", "response_index")
        }
        columns, packed = (
            {name: tensor.to(device) for name, tensor in by_name.items()}
            for by_name in (self.columns, self.packed)
        )
        attachments = _attachments_on(device, self.attachments)
        return replace(self, **moved, columns=columns, packed=packed, attachments=attachments)


def _attachments_on(
    device: torch.device | str, attachments: Sequence[PackedAttachments]
) -> tuple[PackedAttachments, ...]:
    """The same on device; an array of several runs is copied once."""
    copies: dict[bytes, torch.Tensor] = {}
    moved = []
    for packed in attachments:
        arrays = {}
        for name, array in packed.arrays.items():
            digest = packed.digests[name]
            if digest not in copies:
                copies[digest] = array.to(device)
            arrays[name] = copies[digest]
        rows, places = packed.rows.to(device), packed.places.to(device)
        moved.append(replace(packed, arrays=arrays, rows=rows, places=places))
    return tuple(moved)


def filler(tokens: int, device: torch.device) -> Microbatch:
    """A microbatch of so many tokens that belongs to no response.

    Its loss is nothing, and no check hears of it.
    """
    none, one = torch.zeros(0, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    return Microbatch(
        layout=PrefixLayout.from_sequences([tokens]),
        tokens=torch.zeros(tokens, dtype=torch.int64, device=device),
        rows=one,
        targets=one,
        columns={},
        packed={},
        ages=none,
        response_index=none.long(),
        response_lengths=(),
        iteration=0,
        versions=(0, 0),
        group_indices=(),
        sources=(),
        num_computed_tokens=tokens,
        repeats=1.0,
    )


def cut(group: Group, samples: int) -> list[Group]:
    """The group in pieces of up to `samples` consecutive samples; the last has what is left."""
    return [group[start : start + samples] for start in range(0, group.num_samples, samples)]


def num_packed_tokens(piece: Group, shared_prompt: bool) -> int:
    """Packed tokens of a piece, without padding."""
    return _packed(piece, shared_prompt).layout.total


def pack(pieces: Sequence[Group], shared_prompt: bool, pad_multiple: int) -> Microbatch:
    """One microbatch of pieces of one iteration, in their order, padded to a multiple of
    pad_multiple tokens.
    """
    packed = [_packed(piece, shared_prompt) for piece in pieces]
    layout = _joined_layout([one.layout for one in packed]).pad(pad_multiple)
    starts = [0, *np.cumsum([one.layout.total for one in packed]).tolist()]
    trained = [piece.trained for piece in pieces]
    lengths = np.concatenate([piece.trained_lengths for piece in pieces])
    versions = [version for piece in pieces for version in piece.version_range]
    leading = np.concatenate([piece.leading_lengths for piece in pieces])
    padding = torch.zeros(layout.padding, dtype=torch.int64)
    return Microbatch(
        layout=layout,
        tokens=torch.cat([*(one.tokens for one in packed), padding]),
        rows=torch.cat(
            [
                start + _predictors(one, piece)
                for start, one, piece in zip(starts, packed, pieces, strict=False)
            ]
        ),
        targets=_joined(
            [piece.tokens[own] for piece, own in zip(pieces, trained, strict=True)], np.int64
        ),
        columns={
            **{
                column.name: torch.from_numpy(
                    np.concatenate(
                        [
                            piece.per_token[column][own]
                            for piece, own in zip(pieces, trained, strict=True)
                        ]
                    )
                )
                for column in (LOGPROBS, ADVANTAGES, *pieces[0].columns)
            },
            **_datum_columns(pieces, trained),
        },
        packed={
            column.name: _of_rows(column, pieces, packed, starts, layout.total)
            for column in pieces[0].columns
            if column.tokens != "trained"
        },
        ages=_joined(
            [_ages(piece)[own] for piece, own in zip(pieces, trained, strict=True)], np.float32
        ),
        response_index=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        response_lengths=tuple(lengths.tolist()),
        iteration=pieces[0].iteration,
        versions=(min(versions), max(versions)) if versions else (),
        group_indices=tuple(dict.fromkeys(piece.index for piece in pieces)),
        sources=tuple(
            (piece.index, piece.first + number)
            for piece in pieces
            for number in range(piece.num_samples)
        ),
        num_computed_tokens=layout.total - layout.padding,
        repeats=_repeats(pieces),
        leading_lengths=None if np.array_equal(leading, lengths) else tuple(leading.tolist()),
        attachments=_packed_attachments(pieces, packed, starts),
    )


@dataclass(frozen=True, eq=False)
class _RunRows:
    """Where runs of the same content are packed. run: one of them. spans: the rows of each."""

    run: Placeholders
    spans: list[torch.Tensor] = field(default_factory=list)


def _packed_attachments(
    pieces: Sequence[Group], packed: Sequence[PackedSequences], starts: Sequence[int]
) -> tuple[PackedAttachments, ...]:
    """What the pieces' placeholders stand for, each set of arrays once for all pieces."""
    by_content: dict[tuple[int, bytes], _RunRows] = {}
    for start, sequences, piece in zip(starts, packed, pieces, strict=False):
        if not piece.placeholders:
            continue
        spans = pairwise(piece.offsets().tolist())
        for leaf, span in zip(sequences.leaves, spans, strict=True):
            of_sample = start + sequences.layout.path_rows(leaf)
            for run in within(piece.placeholders, *span):
                of_content = by_content.setdefault((run.length, run.content), _RunRows(run))
                of_content.spans.append(of_sample[run.start : run.end])
    tensors: dict[bytes, torch.Tensor] = {}
    return tuple(_with_rows(of_content, tensors) for of_content in by_content.values())


def _with_rows(of_content: _RunRows, tensors: dict[bytes, torch.Tensor]) -> PackedAttachments:
    """tensors: of the arrays so far, by digest."""
    run, spans = of_content.run, of_content.spans
    # samples that share a run have it at the same rows, and a row has one place whoever shares it
    rows, first = np.unique(torch.cat(spans).numpy(), return_index=True)
    for attachment in run.attachments:
        if attachment.digest not in tensors:
            array = attachment.array
            # torch warns of memory that it could write to and must not
            tensors[attachment.digest] = torch.from_numpy(
                array if array.flags.writeable else array.copy()
            )
    return PackedAttachments(
        arrays={a.name: tensors[a.digest] for a in run.attachments},
        digests={a.name: a.digest for a in run.attachments},
        length=run.length,
        rows=torch.from_numpy(rows),
        places=torch.from_numpy(first % run.length),
    )


def _datum_columns(
    pieces: Sequence[Group], trained: Sequence[np.ndarray]
) -> dict[str, torch.Tensor]:
    """What the datum says of the targets where it is not what it usually is: another component than
    1, another weight than 1, a token that the policy did not write."""
    parts = list(zip(pieces, trained, strict=True))
    columns: dict[str, np.ndarray] = {}
    if any((piece.component > 1).any() for piece in pieces):
        columns["component"] = np.concatenate([piece.component[own] for piece, own in parts])
    if any(piece.weight is not None for piece in pieces):
        weights = [
            np.ones(len(p.tokens), np.float32) if p.weight is None else p.weight for p in pieces
        ]
        columns["weight"] = np.concatenate(
            [weight[own] for weight, own in zip(weights, trained, strict=True)]
        )
    if not all(piece.is_all_written for piece in pieces):
        columns["written"] = np.concatenate([piece.written[own] for piece, own in parts])
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def _ages(piece: Group) -> np.ndarray:
    """int32 [tokens]: by how many versions a token is behind; 0 for one without a version."""
    ages = piece.iteration - piece.versions
    return ages if piece.is_all_written else np.where(piece.written, ages, 0)


def _repeats(pieces: Sequence[Group]) -> float:
    """Returns Targets.repeats: 1 where no two responses of a group have anything in common, all of
    them where they are equal.
    """
    num_tokens = num_repetitions = 0
    for piece in pieces:
        tokens, is_written = piece.tokens.astype(np.int64), piece.written
        before = np.concatenate([tokens[:1], tokens[:-1]])
        lengths = np.add.reduceat(is_written, piece.offsets()[:-1], dtype=np.int64)
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # distinct numbers for distinct triples, as no vocabulary has 2^21 tokens and no response as
        # many
        keys = (places << 42) | (before[is_written] << 21) | tokens[is_written]
        counts = np.unique(keys, return_counts=True)[1]
        num_tokens += int(lengths.sum())
        num_repetitions += int((counts * counts).sum())
    return num_repetitions / num_tokens if num_tokens else 1.0


def filled(sizes: Sequence[int], max_tokens: int | None, pad_multiple: int) -> list[int]:
    """Returns how many pieces each microbatch has if all are there when packing begins.

    Each takes the next pieces as long as they fit; a piece that is larger than `max_tokens` goes
    alone, and so does every piece where that is None.

    Args:
        sizes: packed tokens of each piece, without padding.
        max_tokens: of a microbatch, its padding to a multiple of pad_multiple included.
    """
    budget = (max_tokens or 0) // pad_multiple * pad_multiple
    counts: list[int] = []
    num_tokens = 0
    for size in sizes:
        if counts and num_tokens + size <= budget:
            counts[-1] += 1
            num_tokens += size
        else:
            counts.append(1)
            num_tokens = size
    return counts


def build_microbatches(
    group: Group, responses_per_microbatch: int, shared_prompt: bool, pad_multiple: int
) -> list[Microbatch]:
    """Every piece of a group as a microbatch of its own."""
    return [
        pack([piece], shared_prompt, pad_multiple) for piece in cut(group, responses_per_microbatch)
    ]


def _packed(piece: Group, shared_prompt: bool) -> PackedSequences:
    """The piece's layout and packed tokens, found once."""

    def build() -> PackedSequences:
        if shared_prompt:
            keys = None
            if piece.placeholders:
                keys = np.split(piece.prefix_keys, piece.offsets()[1:-1])
            return pack_trie(piece.sequences(), _LEAST_COMMON, piece.prompt_lengths(), keys)
        layout = PrefixLayout.from_sequences(piece.lengths.tolist())
        return PackedSequences(
            layout, torch.from_numpy(piece.tokens.astype(np.int64)), tuple(range(piece.num_samples))
        )

    return piece.cached(f"packed {shared_prompt}", build)


def _predictors(packed: PackedSequences, piece: Group) -> torch.Tensor:
    """int64 [N]: the packed row before each trained token of its sample."""
    rows = []
    for leaf, trained in zip(
        packed.leaves, np.split(piece.trained, piece.offsets()[1:-1]), strict=True
    ):
        positions = torch.from_numpy(np.flatnonzero(trained))
        rows.append(packed.layout.path_rows(leaf)[positions - 1])
    return torch.cat(rows)


def _of_rows(
    column: Column,
    pieces: Sequence[Group],
    packed: Sequence[PackedSequences],
    starts: Sequence[int],
    total: int,
) -> torch.Tensor:
    """[total, *shape]: the column of every packed token."""
    values = column.blank(total)
    for start, one, piece in zip(starts, packed, pieces, strict=False):
        spans = pairwise(piece.offsets().tolist())
        # the first sample's stay
        for leaf, (first, last) in reversed(list(zip(one.leaves, spans, strict=True))):
            values[start + one.layout.path_rows(leaf).numpy()] = piece.columns[column][first:last]
    return torch.from_numpy(values)


def _joined_layout(layouts: Sequence[PrefixLayout]) -> PrefixLayout:
    """Layouts one after another, none of which sees another."""
    lengths: list[int] = []
    parents: list[int] = []
    for layout in layouts:
        first = len(lengths)
        lengths += layout.lengths
        parents += [parent + first if parent >= 0 else -1 for parent in layout.parents]
    return PrefixLayout(tuple(lengths), tuple(parents))


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    """A tensor of its own memory, also of a single part."""
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
