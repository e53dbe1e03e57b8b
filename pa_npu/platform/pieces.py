"""Passes keys and values between the ranks of a context group, a few heads at a time.

Attention gathers by this, and the planner counts the memory that it takes, without importing torch.
"""

from __future__ import annotations

from itertools import pairwise

# The keys and values of a layer are gathered in at most so many pieces. A piece that is smaller
# than this is not worth a collective of its own.
_MAX_PIECES = 4
_MIN_PIECE_BYTES = 2**20


def pieces_of_heads(kv_heads: int, num_bytes: int) -> list[slice]:
    """Returns the key/value heads that are gathered together, piece after piece.

    num_bytes: of all heads' keys and values, of the whole sequence.
    """
    count = max(1, min(kv_heads, _MAX_PIECES, num_bytes // _MIN_PIECE_BYTES))
    bounds = [kv_heads * piece // count for piece in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]
