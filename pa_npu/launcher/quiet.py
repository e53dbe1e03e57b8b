"""Keeps warnings and progress bars of libraries off the screen while a sub-command works; this program's own lines stay.

with quiet_libraries():
    export_checkpoint(...)        what libraries write goes to a file, and to the screen only where
                                  the block fails unexpectedly
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from pa_npu.errors import PaNpuError

_PACKAGE = "pa_npu"
_SHOWN_CHARACTERS = 4000  # of the end of what was written
_STREAMS = (1, 2)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Sends standard output and errors of everything in the block to a file, libraries in C
    included.

    Lines of this program's loggers go to standard error as ever. An exception that is no
    PaNpuError, and no interruption, has the end of the file printed before it, since it may say
    why.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    screen = sys.stderr
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        kept = {number: os.dup(number) for number in _STREAMS}
        screen_descriptor = os.dup(kept[2])
        handler = logging.StreamHandler(_screen(screen, screen_descriptor))
        logger = logging.getLogger(_PACKAGE)
        has_propagated = logger.propagate
        try:
            for number in _STREAMS:
                os.dup2(file.fileno(), number)
            logger.addHandler(handler)
            logger.propagate = False
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        except Exception as error:
            if not isinstance(error, PaNpuError):
                print(_end_of(file), end="", file=handler.stream, flush=True)
            raise
        finally:
            file.flush()
            logger.removeHandler(handler)
            logger.propagate = has_propagated
            handler.close()
            if handler.stream is not screen:
                handler.stream.close()
            for number, descriptor in kept.items():
                os.dup2(descriptor, number)
                os.close(descriptor)


def _screen(stream: IO[str], descriptor: int) -> IO[str]:
    """Returns where this program's lines go: standard error as it was, or the stream that somebody
    has put in its place.
    """
    try:
        is_descriptor = stream.fileno() == 2
    except (OSError, ValueError):
        is_descriptor = False
    if is_descriptor:
        return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
    os.close(descriptor)
    return stream


def _end_of(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()[-_SHOWN_CHARACTERS:]
