"""Leaves tokens of a group out that its reader can put back, and puts them back.

A sample's leading tokens that the one before it has too are sent once, and columns of trained
tokens have no values elsewhere (wire.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pa_npu.samples.columns import Column, GroupFormatError
from pa_npu.samples.group import Group

# A group of more tokens than this is damage, not data.
_MAX_TOKENS = 2**31 - 1


def shared_lengths(group: Group) -> list[int]:
    """Returns how many tokens before the first that the policy wrote each sample has in common with
    the sample before it.
    """
    keys = group.prefix_keys
    prompt_lengths = group.prompt_lengths()
    starts = group.offsets().tolist()[:-1]
    previous = keys[: prompt_lengths[0]].tobytes()
    shared = [0]
    for start, length in zip(starts[1:], prompt_lengths[1:], strict=True):
        prompt = keys[start : start + length].tobytes()
        if prompt == previous:  # nearly always
            shared.append(length)
        else:
            shared.append(_num_common_keys(previous, prompt, keys.dtype))
        previous = prompt
    return shared


def _num_common_keys(first: bytes, second: bytes, dtype: np.dtype[Any]) -> int:
    """Returns the number of leading keys that two prompts share."""
    shorter = min(len(first), len(second)) // dtype.itemsize
    differs = np.frombuffer(first, dtype, shorter) != np.frombuffer(second, dtype, shorter)
    return int(differs.argmax()) if differs.any() else shorter


def full_column(
    column: Column, values: np.ndarray, num_tokens: int, rows: np.ndarray
) -> np.ndarray:
    """Returns the column of all tokens, [num_tokens, *shape].

    values: those of the trained tokens, which are at `rows`, or of all tokens, as the column
    declares; without dimensions, one value for all trained tokens.
    """
    expected = len(rows) if column.tokens == "trained" else num_tokens
    if values.ndim and len(values) != expected:
        raise GroupFormatError(
            f"group bytes: {column.name} has {len(values)} values for {expected} {column.tokens} "
            "tokens"
        )
    if column.tokens == "all":
        return values.copy()
    full = column.blank(num_tokens)
    full[rows] = values
    return full


def restored(name: str, lengths: list[int], shared: list[int], unshared: np.ndarray) -> np.ndarray:
    """Returns all samples' tokens, or a column of them, [sum of lengths, ...].

    shared: how many leading tokens each sample has in common with the one before it. unshared: the
    values of all other tokens.
    """
    previous_length = 0
    for length, common in zip(lengths, shared, strict=True):
        if not 0 <= common <= min(previous_length, length):
            raise GroupFormatError(
                f"group bytes: shared {shared[:8]} does not fit to lengths {lengths[:8]}: a sample "
                f"of {length} tokens, after one of {previous_length}, shares {common}"
            )
        previous_length = length
    total = sum(lengths)
    if total > _MAX_TOKENS or total - sum(shared) != len(unshared):
        raise GroupFormatError(
            f"group bytes: {len(unshared)} {name}, but samples of {total} tokens that share "
            f"{sum(shared)} need {total - sum(shared)}"
        )
    values = np.empty((total, *unshared.shape[1:]), unshared.dtype)
    previous_start = 0
    start = 0
    position = 0  # in `unshared`
    for length, common in zip(lengths, shared, strict=True):
        num_unshared = length - common
        middle = start + common
        end = start + length
        values[start:middle] = values[previous_start : previous_start + common]
        values[middle:end] = unshared[position : position + num_unshared]
        previous_start = start
        start = end
        position += num_unshared
    return values


def trained_rows(runs: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64 [N], where the runs' tokens are in the group, and int64 [R], the runs' lengths.

    Raises GroupFormatError unless the runs follow one another within num_tokens tokens.
    """
    starts = runs[:, 0].astype(np.int64)
    lengths = runs[:, 1].astype(np.int64)
    ends = starts + lengths
    if (
        not len(runs)
        or (lengths < 1).any()
        or starts[0] < 0
        or (starts[1:] < ends[:-1]).any()
        or ends[-1] > num_tokens
    ):
        raise GroupFormatError(
            f"group bytes: runs {runs[:8, :2].tolist()} of trained tokens must follow one another "
            f"within {num_tokens} tokens"
        )
    # the k-th trained token of the group is token `start + k - first` of it, where `first` trained
    # tokens come before its run
    num_trained = int(lengths.sum())
    firsts = np.cumsum(lengths) - lengths
    return np.arange(num_trained) + np.repeat(starts - firsts, lengths), lengths
