"""Images that a prompt or a session shows, as attachments of their placeholders."""

from __future__ import annotations

from collections.abc import Sequence

from pa_npu.samples.attachments import Attachment, Placeholders
from pa_npu.vision.images import PIXELS, ShownImage


def attached(images: Sequence[ShownImage]) -> tuple[Placeholders, ...]:
    """Returns the images as attachments of their placeholders. Decodes images, which takes time."""
    runs = []
    for image in images:
        pixels = Attachment(PIXELS, image.pixels)
        runs.append(Placeholders(image.start, image.length, (pixels,)))
    return tuple(runs)
