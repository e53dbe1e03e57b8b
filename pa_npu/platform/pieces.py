"""Passes keys and values between the ranks of a context group, a few heads at a time.

Attention gathers by this, and the planner counts the memory that it takes, without importing torch.
"""

from __future__ import annotations

from itertools import pairwise

# The keys and values of a layer are gathered in at most so many pieces. A piece that is smaller
# than this is not worth a collective of its own.
_MAX_PIECES = 4
_MIN_PIECE_BYTES = 2**20
_SUM_BYTES = 4  # gradients are summed over calls and ranks in fp32


def pieces_of_heads(kv_heads: int, num_bytes: int) -> list[slice]:
    """Returns the key/value heads that are gathered together, piece after piece.

    num_bytes: of all heads' keys and values, of the whole sequence.
    """
    count = max(1, min(kv_heads, _MAX_PIECES, num_bytes // _MIN_PIECE_BYTES))
    bounds = [kv_heads * piece // count for piece in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def gathering_bytes(kv_heads: int, head_dim: int, rows: int, element_bytes: int) -> int:
    """Returns the bytes as long as the whole sequence at the peak of one layer's backward.

    Beside a piece in packed order there are gradients in the model's type and their sums in fp32;
    with several pieces also the next one as it arrives, and a copy of the last one's sums on its
    way to the other ranks. The only piece is released when this copy is made.

    kv_heads: of this rank, among whose pieces the widest counts. rows: of the whole sequence.
    """
    per_head = 2 * rows * head_dim
    pieces = pieces_of_heads(kv_heads, kv_heads * per_head * element_bytes)
    widest = max(piece.stop - piece.start for piece in pieces)
    if len(pieces) == 1:
        per_value = max(2 * element_bytes + _SUM_BYTES, 2 * _SUM_BYTES)
    else:
        per_value = 3 * element_bytes + 2 * _SUM_BYTES
    return widest * per_head * per_value
