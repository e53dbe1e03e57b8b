"""Opens files that somebody else wrote: regular ones of bounded size only, and never the pointer that Git LFS left in place of one.

Opening never waits, as it would for a named pipe; what is no such file raises OSError with the
reason as its `strerror`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_plain(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """The file to read in binary. Raises OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK
    if not follow_links:
        flags |= os.O_NOFOLLOW
    stream = os.fdopen(os.open(path, flags), "rb")
    try:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise OSError(
                errno.EINVAL,
                "it is a Git LFS pointer, not the file itself: `git lfs pull` gets it",
                str(path),
            )
        stream.seek(0)
    except BaseException:
        stream.close()
        raise
    return stream


def read_plain(path: str | Path, most_bytes: int) -> bytes:
    """The content. Raises OSError, also for a file that is larger than `most_bytes`."""
    with open_plain(path) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(path))
    return content


def reason(error: BaseException) -> str:
    """Why a file could not be read, in a few words without its name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
