"""Opens files of other people: regular files of bounded size only, and no Git LFS pointers.

Opening never waits, as it would for a named pipe. Anything else raises OSError with the reason as
its `strerror`.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def open_plain(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """Opens the file for reading in binary. Raises OSError."""
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


def read_plain(path: str | Path, max_bytes: int) -> bytes:
    """Returns the content. Raises OSError, also if the file is larger than `max_bytes`."""
    with open_plain(path) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return content


def reason(error: BaseException) -> str:
    """Returns why a file could not be read, in a few words without the file's name."""
    text = getattr(error, "strerror", None) or error
    return " ".join(str(text).split())[:200]
