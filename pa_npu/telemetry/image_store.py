"""Small copies of the images in kept samples: RUN/images/DIGEST.png, by the digest of the attachment."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIRECTORY = "images"  # of a run
LONGEST_SIDE = 256
_LARGEST_FILE_BYTES = 2**20
_DIGEST = re.compile(r"[0-9a-f]{32}")


def keep_image(run_dir: Path, digest: str, pixels: npt.NDArray[np.uint8]) -> None:
    """Writes a small copy of an image, unless there is one. pixels: uint8 [height, width, 3]."""
    from PIL import Image

    file = run_dir / DIRECTORY / f"{digest}.png"
    if file.exists():
        return
    file.parent.mkdir(exist_ok=True)
    image = Image.fromarray(pixels)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    temporary = file.with_suffix(".tmp")
    image.save(temporary, "PNG")
    temporary.replace(file)


def kept_image(run_dir: Path, digest: str) -> bytes | None:
    """Returns the file of an image; None for one that was not kept."""
    if _DIGEST.fullmatch(digest) is None:
        return None
    file = run_dir / DIRECTORY / f"{digest}.png"
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            return None
        return file.read_bytes()
    except OSError:
        return None
