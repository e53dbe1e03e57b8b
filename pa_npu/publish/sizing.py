"""How large the buckets of a publish should be, by arithmetic (planning/publish_time.py: how long it takes)."""

from __future__ import annotations

# A publish keeps up to four buckets in the leader's memory: two on the wire, two being gathered over TP. With this share
# of the free memory for each they take a 64th. What is free is asked before the optimizer has made its state.
SHARE_OF_FREE_MEMORY = 1 / 256
SMALLEST_BUCKET_BYTES = 4 * 2**20


def auto_bucket_bytes(free_bytes: int, largest_bytes: int) -> int:
    """publish.bucket_mib=auto on a device with `free_bytes`, where larger ones than `largest_bytes` gain nothing."""
    return min(largest_bytes, max(SMALLEST_BUCKET_BYTES, int(free_bytes * SHARE_OF_FREE_MEMORY)))
