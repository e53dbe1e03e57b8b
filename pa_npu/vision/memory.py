"""Memory of decoded images goes back to the system once they are forgotten.

glibc takes arrays of up to 32 MiB from its heap as soon as one of their size has been freed, and
what lies between arrays that live longer stays with the process. With images of a megapixel, a
coordinator that keeps 256 MiB of pixels grew beyond 1.5 GiB within a thousand prompts, and has
330 MiB where such arrays have pages of their own (tools/bench_images.py).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# of malloc.h
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 512 * 1024
_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


@cache
def give_back_large_arrays() -> bool:
    """Lets this process's arrays from half a mebibyte on have pages of their own, which are given
    back when they are freed.

    Returns False where the C library is not glibc, or the user has set its threshold.
    """
    if _VARIABLE in os.environ:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
