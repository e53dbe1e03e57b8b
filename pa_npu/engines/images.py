"""Images of requests to engines: sent once to each engine, by their key alone after that.

    {"place": 17, "key": "9f..", "data": "iVBOR..."}     the first time, and when the engine forgot it
    {"place": 17, "key": "9f..", "data": ""}             later

An image is its pixels as the model sees them, as a PNG, and its key is their digest. Tokens have one
placeholder an image, at `place`; the engine expands them and answers with what it made of them.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pa_npu.engines.protocol import EngineError
from pa_npu.vision.images import (
    KEPT_BYTES,
    BadImage,
    PixelCache,
    ShownImage,
    from_png,
    pixels_key,
)
from pa_npu.vision.placeholders import collapsed
from pa_npu.vision.processor import Pixels

UNKNOWN_IMAGE = "Unknown image"
"""Begins this package's engine's refusal of the key of an image that it does not have."""
_UNKNOWN_TO_VLLM = "Cache miss for image"
_MAX_KNOWN = 4096


class RequestImage(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """An image of a request.

    place: of its placeholder among the request's tokens. key: of its pixels. data: them as a PNG in
    base64; empty if the engine has them.
    """

    place: int
    key: str
    data: str = ""


@dataclass(eq=False)
class SentImages:
    """The images that an engine has been sent by one client."""

    _keys: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False)

    def parts(self, images: Sequence[ShownImage], places: Sequence[int]) -> list[RequestImage]:
        """Returns the images of a request. Decodes and encodes images, which takes time."""
        parts = []
        for image, place in zip(images, places, strict=True):
            data = ""
            if image.key not in self._keys:
                data = base64.b64encode(image.png()).decode()
            parts.append(RequestImage(place, image.key, data))
        return parts

    def have_arrived(self, images: Sequence[ShownImage]) -> None:
        """Notes that the engine has answered a request with these images."""
        for image in images:
            self._keys[image.key] = None
            self._keys.move_to_end(image.key)
        while len(self._keys) > _MAX_KNOWN:
            self._keys.popitem(last=False)

    def forget(self, images: Sequence[ShownImage]) -> None:
        """Notes that the engine does not have one of these images."""
        for image in images:
            self._keys.pop(image.key, None)


def short_tokens(
    tokens: npt.NDArray[np.int32], images: Sequence[ShownImage]
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Returns the tokens of a request with one placeholder an image, and where these are."""
    return collapsed(tokens, [(image.start, image.length) for image in images])


def check_expanded(
    expanded: npt.NDArray[np.integer[Any]] | None, tokens: npt.NDArray[np.int32], engine: str
) -> None:
    """Raises EngineError unless an engine says that it made these tokens of a request.

    expanded: DecodedAnswer.prompt_tokens.
    """
    if expanded is None:
        raise EngineError(
            f"engine {engine}: it does not say how it expanded an image's placeholder; serve a "
            "release that returns prompt_token_ids"
        )
    if not np.array_equal(expanded, tokens):
        raise EngineError(
            f"engine {engine}: it made {len(expanded)} tokens of a prompt with images that has "
            f"{len(tokens)}; give engine and coordinator the same model directory, with the same "
            "preprocessor_config.json"
        )


def is_unknown_image(refusal: str) -> bool:
    """Returns whether an engine refuses a request since it does not have one of its images."""
    return UNKNOWN_IMAGE in refusal or _UNKNOWN_TO_VLLM in refusal


class UnknownImage(Exception):
    """A request names an image that is not kept."""


@dataclass(eq=False, repr=False)
class KeptImages:
    """The images that an engine keeps, the newest. May be used by several threads."""

    _kept: PixelCache = field(default_factory=lambda: PixelCache(KEPT_BYTES), init=False)

    def pixels(self, image: RequestImage) -> Pixels:
        """Returns an image's pixels.

        Raises UnknownImage for one that was not sent, BadImage for one that cannot be decoded or
        has another key.
        """
        kept = self._kept.get(image.key)
        if kept is not None:
            return kept
        if not image.data:
            raise UnknownImage(image.key)
        try:
            pixels = from_png(base64.b64decode(image.data, validate=True))
        except (binascii.Error, ValueError):
            raise BadImage("its data is no base64") from None
        if pixels_key(pixels) != image.key:
            raise BadImage(f"its pixels do not have the key {image.key:.40}")
        self._kept.put(image.key, pixels)
        return pixels

    def clear(self) -> None:
        """Forgets all images."""
        self._kept.clear()


def as_fields(parts: Sequence[RequestImage]) -> list[dict[str, Any]]:
    """Returns the images as the fields of a request's body."""
    return [{"place": part.place, "key": part.key, "data": part.data} for part in parts]
