"""From a call's datums to microbatches: what a loss needs is checked, datums that begin alike are packed once.

    datum      model_input  t0 t1 t2      target_tokens  u0 u1 u2
    packed     the input's rows, those of a common beginning once; row i predicts target i
    scored     every pair of a row and a target once, whichever datums have it

Datums are ordered by their tokens, so that those with a common beginning are neighbours, and cut
where a microbatch is full. Nothing but the call itself decides about that: a client gets the same
bits alone and beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pa_npu.attention.trie import pack
from pa_npu.samples.microbatch import Microbatch
from pa_npu.service.losses import MASK, OF_CALL, OWNER, PLACE, Loss
from pa_npu.service.wire import Datum, Refused

MIN_SHARED = 16
"""Tokens from which on a common beginning is kept once: a segment is a kernel call of its own."""
DEFAULT_TOKENS = 16384
"""Packed tokens of a microbatch where neither microbatch.tokens nor max_tokens says it."""
_MAX_TARGETS = 1024


def check_datums(data: Sequence[Datum], loss: Loss, *, vocab_size: int, max_tokens: int) -> None:
    """Raises Refused for a datum that the loss cannot be computed of: which one, what, the remedy.

    max_tokens: of one datum.
    """
    for number, datum in enumerate(data):
        name = f"data[{number}]"
        length = len(datum.tokens)
        if not 1 <= length <= max_tokens:
            raise Refused(
                f"{name}.model_input: {length} tokens; this server takes 1 to {max_tokens:,}"
            )
        _check_ids(datum.tokens, vocab_size, f"{name}.model_input")
        targets = datum.inputs.get("target_tokens")
        if targets is None:
            raise Refused(f"{name}.loss_fn_inputs: target_tokens is missing")
        if targets.dtype.kind != "i" or len(targets) != length:
            raise Refused(
                f"{name}.target_tokens: must be int64 with one row for each of {length} tokens of "
                f"model_input, found {targets.dtype.name} {list(targets.shape)}"
            )
        if targets.ndim == 2 and (loss.name != "cross_entropy" or targets.shape[1] > _MAX_TARGETS):
            raise Refused(
                f"{name}.target_tokens: {list(targets.shape)}; several targets at a place, up to "
                f"{_MAX_TARGETS}, are served with cross_entropy alone"
            )
        if not targets.size:
            raise Refused(f"{name}.target_tokens: it is empty")
        _check_ids(targets, vocab_size, f"{name}.target_tokens")
        _check_inputs(datum, loss, targets.shape, name)


def _check_ids(tokens: npt.NDArray[np.integer], vocab_size: int, name: str) -> None:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise Refused(f"{name}: token ids must be from 0 to {vocab_size - 1}")


def _check_inputs(datum: Datum, loss: Loss, shape: tuple[int, ...], name: str) -> None:
    for key, array in datum.inputs.items():
        if key == "target_tokens":
            continue
        if key not in loss.reads:
            known = ", ".join(("target_tokens", *loss.reads))
            raise Refused(
                f"{name}.loss_fn_inputs: {loss.name} reads no {key[:60]!r}; it reads {known}"
            )
        if array.shape != shape:
            raise Refused(
                f"{name}.{key}: must have the shape {list(shape)} of target_tokens, found "
                f"{list(array.shape)}"
            )
        if array.dtype.kind != "f" and key != MASK:
            raise Refused(f"{name}.{key}: must be float32, found {array.dtype.name}")
        if not np.isfinite(array).all():
            raise Refused(f"{name}.{key}: values must be finite")
    for key in loss.reads:
        if key not in datum.inputs and key not in loss.optional:
            raise Refused(f"{name}.loss_fn_inputs: {loss.name} needs {key}")
    if MASK in loss.reads and not np.any(datum.inputs[MASK]):
        raise Refused(f"{name}.{MASK}: it marks no token")


def microbatches(
    data: Sequence[Datum],
    loss: Loss,
    *,
    max_tokens: int,
    shared: bool,
    pad_multiple: int = 1,
    share: Callable[[Iterable[int]], list[int]] | None = None,
) -> list[Microbatch]:
    """Returns a call's microbatches; `sources` of each are (0, number of the datum in the call).

    Args:
        max_tokens: packed tokens of a microbatch; a longer datum is alone.
        shared: whether a common beginning is kept once.
        pad_multiple: packed lengths are multiples of it.
        share: returns which of the datums of these lengths are packed here, where ranks share a
            call; None: all.
    """
    order = sorted(range(len(data)), key=lambda number: data[number].tokens.astype(">i4").tobytes())
    if not shared:
        order = list(range(len(data)))
    if share is not None:
        order = [order[place] for place in share(len(data[number].tokens) for number in order)]
    pieces: list[list[int]] = []
    used = 0
    for number in order:
        tokens = data[number].tokens
        begun = _common(data[pieces[-1][-1]].tokens, tokens) if pieces and shared else 0
        added = len(tokens) - (begun if begun >= MIN_SHARED else 0)
        if not pieces or used + added > max_tokens:
            pieces.append([])
            used, added = 0, len(tokens)
        pieces[-1].append(number)
        used += added
    return [_packed(data, piece, loss, shared, pad_multiple) for piece in pieces]


def _common(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    shorter = min(len(first), len(second))
    differs = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _packed(
    data: Sequence[Datum], numbers: Sequence[int], loss: Loss, shared: bool, pad_multiple: int
) -> Microbatch:
    sequences = [data[number].tokens for number in numbers]
    longest = max(len(tokens) for tokens in sequences)
    packed = pack(sequences, min_shared=MIN_SHARED if shared else longest + 1)
    layout = packed.layout.pad(pad_multiple)
    rows = []
    lengths = []
    for number, leaf in zip(numbers, packed.leaves, strict=True):
        targets = data[number].inputs["target_tokens"]
        width = 1 if targets.ndim == 1 else targets.shape[1]
        rows.append(packed.layout.path_rows(leaf).repeat_interleave(width).numpy())
        lengths.append(targets.size)
    flat = [data[number].inputs["target_tokens"].reshape(-1) for number in numbers]
    scored = _scored_once(np.concatenate(rows), np.concatenate(flat))
    owners = np.repeat(np.arange(len(numbers)), lengths)
    # those that are scored for a datum first, in the order of datums
    own_lengths = np.bincount(owners[scored.first], minlength=len(numbers)).tolist()
    total = len(scored.first)
    columns = {
        "logprobs": torch.zeros(total),
        "advantages": torch.zeros(total),
        PLACE: torch.from_numpy(scored.place),
        OWNER: torch.from_numpy(owners),
    }
    for key in loss.reads:
        arrays = [data[number].inputs.get(key) for number in numbers]
        filled = [
            np.ones(length, np.float32) if array is None else array.reshape(-1)
            for array, length in zip(arrays, lengths, strict=True)
        ]
        values = np.concatenate(filled).astype(np.float32)
        columns[f"{OF_CALL}{key}"] = torch.from_numpy(values)
    padding = torch.zeros(layout.padding, dtype=torch.int64)
    return Microbatch(
        layout=layout,
        tokens=torch.cat([packed.tokens, padding]),
        rows=torch.from_numpy(np.concatenate(rows)[scored.first]),
        targets=torch.from_numpy(np.concatenate(flat)[scored.first].astype(np.int64)),
        columns=columns,
        packed={},
        ages=torch.zeros(total),
        response_index=torch.from_numpy(owners[scored.first]),
        response_lengths=tuple(own_lengths),
        iteration=0,
        versions=(),
        group_indices=(0,),
        sources=tuple((0, number) for number in numbers),
        num_computed_tokens=layout.total - layout.padding,
        repeats=1.0,
    )


@dataclass(frozen=True, eq=False)
class _Scored:
    """first: where each different pair occurs first, ascending. place: of every pair, its number
    among the different ones.
    """

    first: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]


def _scored_once(rows: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> _Scored:
    """Finds the pairs of a row and a target that are the same: those of a common beginning."""
    keys = rows * (int(targets.max()) + 1) + targets
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return _Scored(first[order], number[place.reshape(-1)])
