"""Packing of token sequences into a trie: common prefixes are kept once.

Sequences are told apart by their tokens, or by keys where tokens do not say all: those of two
images are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pa_npu.attention.layout import PrefixLayout


@dataclass(frozen=True)
class PackedSequences:
    """Token sequences packed with shared prefixes.

    layout: one leaf per sequence; a sequence that ends inside another one has an empty leaf of its
    own.
    tokens: int64 [layout.total], on the host.
    leaves: segment that each sequence, in the order given, ends in; `layout.path_rows(leaf)` are
    its rows.
    """

    layout: PrefixLayout
    tokens: torch.Tensor
    leaves: tuple[int, ...]


def pack(
    sequences: Sequence[Sequence[int] | np.ndarray],
    min_shared: int = 1,
    prompts: Sequence[int] | None = None,
    keys: Sequence[np.ndarray] | None = None,
) -> PackedSequences:
    """Builds the trie. A segment is shared only if it has at least `min_shared` tokens.

    prompts: tokens at the beginning of each sequence that are shared however few they are; what is
    common behind them is kept once only if that alone has `min_shared` tokens.
    keys: of each sequence, integers [tokens]; two tokens are the same where their keys and those
    before them are. None: the tokens are the keys.
    Raises ValueError naming the sequence that is empty, not one-dimensional or not of integers.
    """
    if min_shared < 1:
        raise ValueError(f"min_shared: {min_shared} must be at least 1")
    arrays = [_as_tokens(number, sequence) for number, sequence in enumerate(sequences)]
    if not arrays:
        raise ValueError("sequence 0: at least one sequence is needed")
    compared = arrays if keys is None else list(keys)

    lengths: list[int] = []
    parents: list[int] = []
    pieces: list[np.ndarray] = []
    leaves = [-1] * len(arrays)

    def emit(tokens: np.ndarray, parent: int) -> int:
        lengths.append(len(tokens))
        parents.append(parent)
        pieces.append(tokens)
        return len(lengths) - 1

    # A task is a set of sequences that agree on [0, agreed), of which [0, start) is packed already
    # under `parent`. The stack keeps depth-first order; it is explicit because tries of many
    # sequences are deeper than Python's stack.
    tasks = [(list(range(len(arrays))), 0, 0, -1)]
    while tasks:
        members, start, agreed, parent = tasks.pop()
        if len(members) == 1:
            leaves[members[0]] = emit(arrays[members[0]][start:], parent)
            continue
        end = agreed
        if prompts is not None:
            common = min(agreed, min(prompts[member] for member in members))
            end = agreed if agreed - max(start, common) >= min_shared else common
        if end - start >= (min_shared if prompts is None else 1):
            parent = emit(arrays[members[0]][start:end], parent)
            start = end
        branches: dict[int, list[int]] = {}
        ended: list[int] = []
        for member in members:
            of_member = compared[member]
            if len(of_member) == agreed:
                ended.append(member)
            else:
                branches.setdefault(int(of_member[agreed]), []).append(member)
        for branch in reversed(branches.values()):
            agreement = _agreement([compared[member] for member in branch], agreed)
            tasks.append((branch, start, agreement, parent))
        tasks.extend(([member], start, agreed, parent) for member in reversed(ended))
    return PackedSequences(
        PrefixLayout(tuple(lengths), tuple(parents)),
        torch.from_numpy(np.concatenate(pieces)),
        tuple(leaves),
    )


def _agreement(arrays: list[np.ndarray], known: int) -> int:
    """Returns the length of the longest common prefix, at least `known`."""
    end = min(len(tokens) for tokens in arrays)
    window = np.stack([tokens[known:end] for tokens in arrays])
    differs = np.flatnonzero((window != window[0]).any(axis=0))
    return known + int(differs[0]) if len(differs) else end


def _as_tokens(number: int, sequence: Sequence[int] | np.ndarray) -> np.ndarray:
    tokens = np.asarray(sequence)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"sequence {number}: must be a non-empty list of integers, not {tokens.dtype} "
            f"{tokens.shape}"
        )
    return tokens.astype(np.int64)
