"""Microbatch: one packed sequence with all that the loss needs, made of pieces of groups.

A piece is some consecutive samples of a group; a microbatch is one piece, or several up to a budget
of tokens. For a prompt of two tokens and responses of two and one:

    shared prefixes                           p0 p1 | a0 a1 | b0          the prompt once
    separate sequences (measured baseline)    p0 p1 a0 a1 | p0 p1 b0      no padding between them

The shared prefixes follow from the tokens, and from the arrays that placeholder tokens stand for.
Either way the targets are the trained tokens, sample by sample; `rows` says which packed row
predicts each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from pa_npu.algorithm.model_outputs import Targets
from pa_npu.attention import PrefixLayout
from pa_npu.attention.stems import PathRows
from pa_npu.attention.trie import PackedSequences
from pa_npu.attention.trie import pack as pack_trie
from pa_npu.config.pieces import samples_of_pieces
from pa_npu.samples.attachments import Placeholders, within
from pa_npu.samples.columns import ADVANTAGES, LOGPROBS, Column
from pa_npu.samples.group import Group

# Behind the prompts, samples share a prefix (as branches of one response do) only if it has so many
# tokens or more: each segment is a kernel call of its own, and responses that begin alike by chance
# would be cut into crumbs.
_MIN_COMMON = 64


@dataclass(frozen=True, eq=False)
class PackedAttachments:
    """The arrays of one run, such as an image's pixels and its grid, and the packed rows that stand
    for them. There is one of these however many samples show the run.

    A model that makes an embedding [length, hidden] of the arrays puts embedding[places] into rows.

    arrays: by name, of any shape, shared with other runs that show the same array; do not write to
    them. digests: bytes [16] of each array, by name.
    length: number of placeholder tokens of the run.
    rows: int64 [R], the packed rows that are such tokens, ascending. R is `length` if all samples
    share the run, and larger if some do not.
    places: int64 [R], each row's place in its run, from 0.
    """

    arrays: dict[str, torch.Tensor]
    digests: dict[str, bytes]
    length: int
    rows: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class Microbatch(Targets):
    """T packed tokens, of which N are targets: the trained tokens of its samples.

    tokens: int64 [T], padding included.
    targets: int64 [N], the trained tokens.
    rows: int64 [N], the packed row whose hidden state predicts each target.
    packed: by name, the declared columns that all tokens have, [T, *shape]; a shared prefix has
    the values of its first sample.
    attachments: those of its rows, in the order in which its samples show them.
    before: the stems that are computed before it, whose rows it is behind (samples.stems); they
    stay on the host.
    ends_stems: whether it is the last one behind them.
    """

    layout: PrefixLayout | PathRows
    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    packed: dict[str, torch.Tensor]
    attachments: tuple[PackedAttachments, ...] = field(default=(), kw_only=True)
    before: tuple[Microbatch, ...] = field(default=(), kw_only=True)
    ends_stems: bool = field(default=False, kw_only=True)

    @property
    def whole_layout(self) -> PrefixLayout:
        """The layout of a microbatch that has all rows of its sequences. Raises ValueError for one
        with stems before it.
        """
        if isinstance(self.layout, PathRows):
            raise ValueError(
                f"a microbatch of groups {self.group_indices} is behind stems; give one that is whole"
            )
        return self.layout

    @property
    def is_stem(self) -> bool:
        """Returns whether it is the beginning of others, which belongs to no response itself."""
        return isinstance(self.layout, PathRows) and self.layout.own is not None

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def is_filler(self) -> bool:
        """Returns whether it belongs to no response, and is computed only so that other ranks may
        go on.
        """
        return not self.response_lengths

    def to(self, device: torch.device | str) -> Microbatch:
        """Returns the microbatch with its tensors on a device; the layout stays on the host and
        caches its own per-device indices.
        """
        return replace(
            self,
            tokens=self.tokens.to(device),
            rows=self.rows.to(device),
            targets=self.targets.to(device),
            ages=self.ages.to(device),
            response_index=self.response_index.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
            packed={name: column.to(device) for name, column in self.packed.items()},
            attachments=_attachments_on(device, self.attachments),
        )

    def whole(self) -> Microbatch:
        """Returns the microbatch with the rows of its stems, which needs no pass before it."""
        if not isinstance(self.layout, PathRows):
            return self
        device = self.tokens.device
        before = [stem.to(device) for stem in self.before]
        packed = {}
        for name, column in self.packed.items():
            packed[name] = torch.cat([*(stem.packed[name] for stem in before), column])
        return replace(
            self,
            layout=self.layout.layout,
            tokens=torch.cat([*(stem.tokens for stem in before), self.tokens]),
            rows=self.rows + self.layout.first,
            packed=packed,
            num_computed_tokens=self.layout.layout.total - self.layout.layout.padding,
            before=(),
            ends_stems=False,
        )


def _attachments_on(
    device: torch.device | str, attachments: Sequence[PackedAttachments]
) -> tuple[PackedAttachments, ...]:
    """Returns the attachments on a device; an array of several runs is copied once."""
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
    """Returns a microbatch of so many tokens that belongs to no response.

    It adds nothing to the loss, and no check counts it.
    """
    no_targets = torch.zeros(0, device=device)
    zero_index = torch.zeros(1, dtype=torch.int64, device=device)
    return Microbatch(
        layout=PrefixLayout.from_sequences([tokens]),
        tokens=torch.zeros(tokens, dtype=torch.int64, device=device),
        rows=zero_index,
        targets=zero_index,
        columns={},
        packed={},
        ages=no_targets,
        response_index=no_targets.long(),
        response_lengths=(),
        iteration=0,
        versions=(0, 0),
        group_indices=(),
        sources=(),
        num_computed_tokens=tokens,
        repeats=1.0,
    )


def cut(group: Group, samples: int) -> list[Group]:
    """Cuts the group into pieces of `samples` consecutive samples; the last has those left over."""
    return [group[start : start + samples] for start in range(0, group.num_samples, samples)]


def cut_to_fit(group: Group, samples: int, tokens: int, shared_prompt: bool) -> list[Group]:
    """Cuts the group into pieces of consecutive samples, at most `samples` of them and `tokens`
    packed tokens each; a longer sample is a piece of its own.
    """
    lengths = group.lengths.tolist()
    shared = shared_prompts(group) if shared_prompt else [0] * len(lengths)
    pieces = []
    start = 0
    for count in samples_of_pieces(lengths, shared, samples, tokens):
        pieces.append(group[start : start + count])
        start += count
    return pieces


def shared_prompts(group: Group) -> list[int]:
    """Returns the tokens of each sample's prompt that the sample before it begins with too."""
    shared = [0]
    lengths = group.prompt_lengths()
    keys = np.split(group.prefix_keys, group.offsets()[1:-1])
    for (before, sample), length in zip(pairwise(keys), lengths[1:], strict=True):
        max_shared = min(len(before), int(length))
        differs = np.flatnonzero(before[:max_shared] != sample[:max_shared])
        shared.append(int(differs[0]) if len(differs) else max_shared)
    return shared


def num_packed_tokens(piece: Group, shared_prompt: bool) -> int:
    """Returns the number of packed tokens of a piece, without padding."""
    return _packed(piece, shared_prompt).layout.total


def pack(pieces: Sequence[Group], shared_prompt: bool, pad_multiple: int) -> Microbatch:
    """Returns one microbatch of pieces of one iteration, in their order, padded to a multiple of
    pad_multiple tokens.
    """
    packed = [_packed(piece, shared_prompt) for piece in pieces]
    layouts = [sequences.layout for sequences in packed]
    layout = _joined_layout(layouts).pad(pad_multiple)
    starts = [0, *accumulate(one_layout.total for one_layout in layouts[:-1])]
    padding = torch.zeros(layout.padding, dtype=torch.int64)
    predictors = []
    sources: list[tuple[int, int]] = []
    versions: list[int] = []
    for start, sequences, piece in zip(starts, packed, pieces, strict=True):
        predictors.append(start + _predictors(sequences, piece))
        sources += [(piece.index, piece.first + number) for number in range(piece.num_samples)]
        versions += piece.version_range
    lengths = np.concatenate([piece.trained_lengths for piece in pieces])
    leading = np.concatenate([piece.leading_lengths for piece in pieces])
    packed_columns = {}
    for column in pieces[0].columns:
        if column.tokens != "trained":
            packed_columns[column.name] = _packed_column(
                column, pieces, packed, starts, layout.total
            )
    return Microbatch(
        layout=layout,
        tokens=torch.cat([*(sequences.tokens for sequences in packed), padding]),
        rows=torch.cat(predictors),
        targets=_of_targets(pieces, [piece.tokens for piece in pieces], np.int64),
        columns=_target_columns(pieces),
        packed=packed_columns,
        ages=_of_targets(pieces, [_ages(piece) for piece in pieces], np.float32),
        response_index=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        response_lengths=tuple(lengths.tolist()),
        iteration=pieces[0].iteration,
        versions=(min(versions), max(versions)) if versions else (),
        group_indices=tuple(dict.fromkeys(piece.index for piece in pieces)),
        sources=tuple(sources),
        num_computed_tokens=layout.total - layout.padding,
        repeats=_repeats(pieces),
        leading_lengths=None if np.array_equal(leading, lengths) else tuple(leading.tolist()),
        attachments=_packed_attachments(pieces, packed, starts),
    )


def _of_targets(
    pieces: Sequence[Group], values: Sequence[np.ndarray], dtype: type[np.generic] | None = None
) -> torch.Tensor:
    """Returns the values of all targets, [N, ...], in memory of their own.

    values: of all tokens of each piece. dtype: None keeps the values' type.
    """
    parts = []
    for piece, piece_values in zip(pieces, values, strict=True):
        parts.append(piece_values[piece.trained])
    joined = np.concatenate(parts)
    return torch.from_numpy(joined if dtype is None else joined.astype(dtype))


@dataclass(frozen=True, eq=False)
class _RunRows:
    """The rows of runs with the same content. run: any of them. spans: the rows of each."""

    run: Placeholders
    spans: list[torch.Tensor] = field(default_factory=list)


def _packed_attachments(
    pieces: Sequence[Group], packed: Sequence[PackedSequences], starts: Sequence[int]
) -> tuple[PackedAttachments, ...]:
    """Returns what the pieces' placeholders stand for, each set of arrays once for all pieces."""
    by_content: dict[tuple[int, bytes], _RunRows] = {}
    for start, sequences, piece in zip(starts, packed, pieces, strict=True):
        if not piece.placeholders:
            continue
        spans = pairwise(piece.offsets().tolist())
        for leaf, span in zip(sequences.leaves, spans, strict=True):
            sample_rows = start + sequences.layout.path_rows(leaf)
            for run in within(piece.placeholders, *span):
                run_rows = by_content.setdefault((run.length, run.content), _RunRows(run))
                run_rows.spans.append(sample_rows[run.start : run.end])
    tensors: dict[bytes, torch.Tensor] = {}
    return tuple(_packed_run(run_rows, tensors) for run_rows in by_content.values())


def _packed_run(run_rows: _RunRows, tensors: dict[bytes, torch.Tensor]) -> PackedAttachments:
    """Returns a run's arrays and rows. tensors: arrays of earlier runs by digest, and afterwards
    this run's too.
    """
    run = run_rows.run
    # samples that share a run have it at the same rows, and a row has one place whoever shares it
    rows, first = np.unique(torch.cat(run_rows.spans).numpy(), return_index=True)
    arrays = {}
    digests = {}
    for attachment in run.attachments:
        if attachment.digest not in tensors:
            array = attachment.array
            # torch warns of memory that it could write to and must not
            if not array.flags.writeable:
                array = array.copy()
            tensors[attachment.digest] = torch.from_numpy(array)
        arrays[attachment.name] = tensors[attachment.digest]
        digests[attachment.name] = attachment.digest
    return PackedAttachments(
        arrays=arrays,
        digests=digests,
        length=run.length,
        rows=torch.from_numpy(rows),
        places=torch.from_numpy(first % run.length),
    )


def _target_columns(pieces: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Returns the columns of the targets by name.

    `component` and `weight` are there only if some target's is not 1, and `written` only if the
    policy did not write some target.
    """
    columns = {}
    for column in (LOGPROBS, ADVANTAGES, *pieces[0].columns):
        columns[column.name] = _of_targets(pieces, [piece.per_token[column] for piece in pieces])
    if any((piece.component > 1).any() for piece in pieces):
        columns["component"] = _of_targets(pieces, [piece.component for piece in pieces])
    if any(piece.weight is not None for piece in pieces):
        columns["weight"] = _of_targets(pieces, [_weights(piece) for piece in pieces])
    if not all(piece.is_all_written for piece in pieces):
        columns["written"] = _of_targets(pieces, [piece.written for piece in pieces])
    return columns


def _weights(piece: Group) -> np.ndarray:
    """Returns float32 [tokens]: the piece's weights, which are 1 if it has no such column."""
    if piece.weight is None:
        return np.ones(len(piece.tokens), np.float32)
    return piece.weight


def _ages(piece: Group) -> np.ndarray:
    """Returns int32 [tokens]: by how many versions each token is behind; 0 for tokens without a
    version.
    """
    ages = piece.iteration - piece.versions
    if piece.is_all_written:
        return ages
    return np.where(piece.written, ages, 0)


def _repeats(pieces: Sequence[Group]) -> float:
    """Returns Targets.repeats: 1 if no two responses of a group have anything in common, and the
    number of responses if all are equal.
    """
    num_tokens = num_repetitions = 0
    for piece in pieces:
        tokens = piece.tokens.astype(np.int64)
        is_written = piece.written
        previous = np.concatenate([tokens[:1], tokens[:-1]])
        lengths = np.add.reduceat(is_written, piece.offsets()[:-1], dtype=np.int64)
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # distinct numbers for distinct triples, as no vocabulary has 2^21 tokens and no response as
        # many
        keys = (places << 42) | (previous[is_written] << 21) | tokens[is_written]
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
    """Returns every piece of a group as a microbatch of its own."""
    return [
        pack([piece], shared_prompt, pad_multiple) for piece in cut(group, responses_per_microbatch)
    ]


def _packed(piece: Group, shared_prompt: bool) -> PackedSequences:
    """Returns the piece's layout and packed tokens, which are computed once."""

    def build() -> PackedSequences:
        if shared_prompt:
            keys = None
            if piece.placeholders:
                keys = np.split(piece.prefix_keys, piece.offsets()[1:-1])
            return pack_trie(piece.sequences(), _MIN_COMMON, piece.prompt_lengths(), keys)
        layout = PrefixLayout.from_sequences(piece.lengths.tolist())
        return PackedSequences(
            layout, torch.from_numpy(piece.tokens.astype(np.int64)), tuple(range(piece.num_samples))
        )

    return piece.cached(f"packed {shared_prompt}", build)


def _predictors(packed: PackedSequences, piece: Group) -> torch.Tensor:
    """Returns int64 [N]: the packed row before each trained token of its sample."""
    rows = []
    trained_by_sample = np.split(piece.trained, piece.offsets()[1:-1])
    for leaf, trained in zip(packed.leaves, trained_by_sample, strict=True):
        positions = torch.from_numpy(np.flatnonzero(trained))
        rows.append(packed.layout.path_rows(leaf)[positions - 1])
    return torch.cat(rows)


def _packed_column(
    column: Column,
    pieces: Sequence[Group],
    packed: Sequence[PackedSequences],
    starts: Sequence[int],
    total: int,
) -> torch.Tensor:
    """Returns the column of every packed token, [total, *shape]."""
    values = column.blank(total)
    for start, sequences, piece in zip(starts, packed, pieces, strict=True):
        spans = pairwise(piece.offsets().tolist())
        # backwards, so that a shared prefix keeps the values of its first sample
        for leaf, (first, last) in reversed(list(zip(sequences.leaves, spans, strict=True))):
            rows = start + sequences.layout.path_rows(leaf).numpy()
            values[rows] = piece.columns[column][first:last]
    return torch.from_numpy(values)


def _joined_layout(layouts: Sequence[PrefixLayout]) -> PrefixLayout:
    """Returns the layout of these layouts one after another, none of which sees another."""
    lengths: list[int] = []
    parents: list[int] = []
    for layout in layouts:
        first = len(lengths)
        lengths += layout.lengths
        parents += [parent + first if parent >= 0 else -1 for parent in layout.parents]
    return PrefixLayout(tuple(lengths), tuple(parents))
