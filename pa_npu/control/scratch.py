"""Finds a short directory for sockets: their paths have 107 bytes at most, and TMPDIR alone may be longer than that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

_LONGEST_SOCKET_BYTES = 107
# DIRECTORY/pa-xxxxxxxx/ and vLLM's name of a socket, a UUID
LONGEST_DIRECTORY_BYTES = _LONGEST_SOCKET_BYTES - len("/pa-xxxxxxxx/") - 36
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def short_directories() -> Iterator[str]:
    """Directories for temporary files whose own paths leave room for a socket's, that of TMPDIR
    first.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= LONGEST_DIRECTORY_BYTES:
        yield usual
    for place in _SHORT:
        if place != usual and os.access(place, os.W_OK | os.X_OK):
            yield place
