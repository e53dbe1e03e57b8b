"""Device memory is host memory over the stub libraries."""

from __future__ import annotations

import ctypes


def memcpy(target: int, size: int, source: int, count: int, kind: int) -> int:
    ctypes.memmove(target, source, count)
    return 0
