"""Images of a dataset's rows: where their bytes are, what may be read, and their pixels on demand.

    row's value ──ImageReader.read──> ImageFile ──ImageReader.pixels──> pixels as the model sees them
    (path, bytes,                     digest, size;                     decoded when they are needed,
     {"bytes": ...}, ...)             no pixels in memory               the newest are kept

Memory is bounded: bytes that came inside a row go into one temporary file, of files only the path
is kept, and decoded pixels are kept up to KEPT_BYTES. A file that changes while the run goes on is
noticed by its digest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import tempfile
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.config.words import as_json
from pa_npu.errors import DataError
from pa_npu.vision.processor import ImageProcessor, Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

PIXELS = "pixels"
"""Name of the attachment with an image's pixels, uint8 [height, width, 3]. Trainers make patches of
them, which are eight times as many bytes.
"""
KEPT_BYTES = 256 * 2**20
"""Decoded pixels that are kept, 3 bytes each."""
LARGEST_FILE_BYTES = 64 * 2**20
LARGEST_PIXELS = 100_000_000
"""An image with more pixels is refused: decoding it takes 300 MB."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_DIGEST_BYTES = 16
_ORIENTATION = 0x0112
_KEYS = ("bytes", "path", "image", "url")


class BadImage(Exception):
    """An image cannot be used; says why, without the place of the row."""


@dataclass(frozen=True)
class ImageFile:
    """The bytes of an image as its row gives them.

    digest: of the bytes. width, height: before resizing, turned as the image says.
    path: the file; None for bytes that came inside a row. start, size: place of those.
    """

    digest: bytes
    width: int
    height: int
    path: str | None
    start: int = 0
    size: int = 0

    @property
    def label(self) -> str:
        """Names it in records and messages."""
        return self.path or f"{self.digest.hex()} ({self.size} bytes of a row)"


@dataclass(eq=False, repr=False)
class PixelCache:
    """Keeps decoded pixels by a key, the newest of them. May be used by several threads.

    max_bytes: of all pixels together, which a single image may exceed.
    """

    max_bytes: int
    _pixels: OrderedDict[bytes | str, Pixels] = field(default_factory=OrderedDict, init=False)
    num_bytes: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __len__(self) -> int:
        return len(self._pixels)

    def get(self, key: bytes | str) -> Pixels | None:
        with self._lock:
            pixels = self._pixels.get(key)
            if pixels is not None:
                self._pixels.move_to_end(key)
            return pixels

    def put(self, key: bytes | str, pixels: Pixels) -> None:
        with self._lock:
            if key not in self._pixels:
                self._pixels[key] = pixels
                self.num_bytes += pixels.nbytes
            while self.num_bytes > self.max_bytes and len(self._pixels) > 1:
                _, dropped = self._pixels.popitem(last=False)
                self.num_bytes -= dropped.nbytes

    def clear(self) -> None:
        with self._lock:
            self._pixels.clear()
            self.num_bytes = 0


@dataclass(eq=False, repr=False)
class ImageReader:
    """Reads the images of a run's datasets, or of one session of agents. Its methods may be called
    by several threads.

    kept: of all readers of a run.
    """

    processor: ImageProcessor
    kept: PixelCache = field(default_factory=lambda: PixelCache(KEPT_BYTES))
    _spool: IO[bytes] | None = field(default=None, init=False)
    _spooled: dict[bytes, ImageFile] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def apart(self) -> ImageReader:
        """Returns a reader for images that are needed for a while: the disk space of theirs is free
        again when it and they are forgotten.
        """
        return ImageReader(self.processor, self.kept)

    def read(self, value: Any, directory: Path) -> ImageFile:
        """Returns the image that a value of a row names or holds, after looking at its header.

        directory: of the dataset, to which paths are relative. Raises BadImage.
        """
        data, path = _source(value, directory)
        if data is not None:
            return self.read_bytes(data)
        content = _from_file(path)
        width, height = self._size(content)
        return ImageFile(_digest(content), width, height, str(path))

    def read_bytes(self, content: bytes) -> ImageFile:
        """Returns the image that these bytes are, after looking at its header. Raises BadImage."""
        digest = _digest(content)
        width, height = self._size(content)
        with self._lock:
            known = self._spooled.get(digest)
            if known is not None:
                return known
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(prefix="pa_npu-images-")  # noqa: SIM115  # for all reads
                weakref.finalize(self, self._spool.close)
            start = self._spool.seek(0, io.SEEK_END)
            self._spool.write(content)
            image = ImageFile(digest, width, height, None, start, len(content))
            self._spooled[digest] = image
            return image

    def _size(self, content: bytes) -> tuple[int, int]:
        """Returns width and height of an image that can be used. Raises BadImage."""
        with _opened(content) as image:
            width, height = image.size
            try:
                orientation = image.getexif().get(_ORIENTATION, 1)
            except (OSError, SyntaxError, ValueError) as error:  # a PNG may have it at its end
                raise BadImage(f"it cannot be read ({reason(error)}); restore the file") from None
            if orientation in (5, 6, 7, 8):  # turned by a quarter
                width, height = height, width
        if width * height > LARGEST_PIXELS:
            raise BadImage(
                f"{width} x {height} pixels are more than {LARGEST_PIXELS}; make it smaller"
            )
        try:
            self.processor.size_of(height, width)
        except ValueError as error:
            raise BadImage(f"{error}; cut it, or remove the row") from None
        return width, height

    def check(self, image: ImageFile) -> None:
        """Decodes an image without keeping anything. Raises BadImage."""
        _decoded(self.content(image))

    def pixels(self, image: ImageFile) -> Pixels:
        """Returns the pixels that the model sees of an image, read only.

        Raises DataError for a file that has changed or cannot be decoded.
        """
        kept = self.kept.get(image.digest)
        if kept is not None:
            return kept
        try:
            pixels = self.processor.resized(_decoded(self.content(image)))
        except BadImage as error:
            raise DataError(f"image {image.label}: {error}") from None
        pixels.flags.writeable = False
        self.kept.put(image.digest, pixels)
        return pixels

    def content(self, image: ImageFile) -> bytes:
        """Returns the image's bytes. Raises BadImage if they are not those of the beginning."""
        if image.path is None:
            with self._lock:
                assert self._spool is not None, "it was put there"
                self._spool.seek(image.start)
                return self._spool.read(image.size)
        content = _from_file(Path(image.path))
        if _digest(content) != image.digest:
            raise BadImage("the file has changed since the run began; restore it")
        return content


@dataclass(frozen=True, eq=False)
class ShownImage:
    """An image in a prompt: placeholder tokens [start, start + length) stand for it.

    grid: its patches along time, height and width.
    """

    start: int
    length: int
    grid: tuple[int, int, int]
    file: ImageFile
    reader: ImageReader

    @property
    def end(self) -> int:
        return self.start + self.length

    def moved(self, by: int) -> ShownImage:
        """Returns the same image in tokens that begin `by` tokens earlier."""
        return replace(self, start=self.start + by)

    @property
    def pixels(self) -> Pixels:
        """The pixels that the model sees; takes time unless they were needed shortly before."""
        return self.reader.pixels(self.file)

    @property
    def identity(self) -> bytes:
        """Tells it from another image, for the fingerprint of a dataset."""
        return self.file.digest + str((self.start, self.length, self.grid)).encode()

    @cached_property
    def key(self) -> str:
        """The name under which engines keep it: a digest of its pixels."""
        return pixels_key(self.pixels)

    def png(self) -> bytes:
        """Returns the pixels as a file that loses nothing, for engines."""
        return to_png(self.pixels)


def data_url(content: bytes) -> str:
    """Returns an image's bytes as a data URL, by which chat clients send it. Raises BadImage."""
    with _opened(content) as image:
        kind = str(image.format).lower()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def from_data_url(url: str) -> bytes:
    """Returns the bytes that a data URL holds. Raises BadImage."""
    _, _, encoded = url.partition(",")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise BadImage(f"{url[:40]!r} is no data URL of base64; write it again") from None


def pixels_key(pixels: Pixels) -> str:
    """Returns a digest of an image's pixels and size."""
    digest = hashlib.blake2b(str(pixels.shape).encode(), digest_size=_DIGEST_BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def to_png(pixels: Pixels) -> bytes:
    """Returns the pixels as a file that loses nothing."""
    from PIL import Image

    file = io.BytesIO()
    # level 1 takes a third of the usual time for a tenth more bytes
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def from_png(data: bytes) -> Pixels:
    """Returns the pixels of a file that `to_png` made. Raises BadImage."""
    with _opened(data) as image:
        if image.format != "PNG" or image.mode != "RGB":
            raise BadImage(f"a {image.format} of mode {image.mode}, where a PNG of RGB is expected")
        if image.width * image.height > LARGEST_PIXELS:
            raise BadImage(f"{image.width} x {image.height} pixels are too many")
        try:
            return np.array(image, np.uint8)
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"it cannot be decoded ({reason(error)})") from None


def _source(value: Any, directory: Path) -> tuple[bytes | None, Path]:
    """Returns the bytes that a row's value holds, or else the file that it names."""
    if isinstance(value, Mapping):
        known = [name for name in _KEYS if value.get(name) is not None]
        if not known:
            raise BadImage(f"{as_json(dict(value))} has none of {', '.join(_KEYS)}; give one")
        value = value[known[0]]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value), directory
    if not isinstance(value, str) or not value:
        raise BadImage(
            f"{as_json(value)} is no image; give a path, bytes, or an object with "
            f"{' or '.join(_KEYS[:2])}"
        )
    if value.startswith("data:"):
        return from_data_url(value), directory
    if value.startswith(("http://", "https://")):
        raise BadImage(f"{value[:80]} is not fetched from the network; download it first")
    return None, directory / value.removeprefix("file://")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _from_file(path: Path) -> bytes:
    try:
        return read_plain(path, LARGEST_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise BadImage(f"{path} cannot be read ({reason(error)}); restore the file") from None


def _opened(content: bytes) -> Image:
    """Returns the image of a file, of which only the header has been read. Raises BadImage."""
    from PIL import Image, UnidentifiedImageError

    if len(content) > LARGEST_FILE_BYTES:
        raise BadImage(
            f"{len(content)} bytes are more than {LARGEST_FILE_BYTES >> 20} MiB; make it smaller"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:
        raise BadImage(
            f"{len(content)} bytes are no image in one of the formats {', '.join(_FORMATS)}; "
            "convert it"
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadImage(f"its header cannot be read ({reason(error)}); restore the file") from None


def _decoded(content: bytes) -> Image:
    """Returns an image in RGB, turned as its file says. Raises BadImage."""
    from PIL import Image, ImageOps

    with _opened(content) as image:
        try:
            image.load()
            turned = ImageOps.exif_transpose(image)
            if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
                # what is transparent becomes white, as on paper
                layer = turned.convert("RGBA")
                white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                return Image.alpha_composite(white, layer).convert("RGB")
            return turned.convert("RGB")
        except (OSError, SyntaxError, ValueError, MemoryError) as error:
            raise BadImage(f"it cannot be decoded ({reason(error)}); restore the file") from None
