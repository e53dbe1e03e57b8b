"""Finds a short directory for sockets, whose paths have at most 107 bytes; TMPDIR may be longer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

_LONGEST_SOCKET_BYTES = 107
# a socket's path is DIRECTORY/pa-xxxxxxxx/NAME, and vLLM's name of a socket is a UUID
LONGEST_DIRECTORY_BYTES = _LONGEST_SOCKET_BYTES - len("/pa-xxxxxxxx/") - 36
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def short_directories() -> Iterator[str]:
    """Yields directories for temporary files that are short enough for sockets, TMPDIR first."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_DIRECTORY_BYTES:
        yield usual
    for place in _SHORT:
        if place != usual and os.access(place, os.W_OK | os.X_OK):
            yield place
