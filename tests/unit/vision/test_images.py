"""Images of rows are read in every form that datasets have; what cannot be used says so in one line; memory is bounded."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pa_npu.errors import DataError
from pa_npu.vision import images
from pa_npu.vision.images import BadImage, ImageReader, from_png, to_png
from pa_npu.vision.processor import ImageProcessor
from tests.helpers.vision import picture

PNG = to_png(np.array(picture(1)))


@pytest.fixture
def reader() -> ImageReader:
    return ImageReader(ImageProcessor())


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "value",
    [
        "a.png",
        "file://{directory}/a.png",
        PNG,
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "a.png"},
        {"image": "{directory}/a.png"},
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
    ],
    ids=["path", "file URL", "bytes", "struct of bytes", "struct of a path", "verl's", "data URL"],
)
def test_every_form_gives_the_same_pixels(value: Any, reader: ImageReader, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    placed = {"directory": str(tmp_path)}
    if isinstance(value, str):
        value = value.format(**placed)
    elif isinstance(value, dict) and "image" in value:
        value = {"image": value["image"].format(**placed)}
    image = reader.read(value, tmp_path)
    assert (image.width, image.height) == (84, 56)
    assert np.array_equal(reader.pixels(image), ImageProcessor().resized(picture(1)))


def test_an_image_is_turned_and_put_on_white_as_its_file_says(reader: ImageReader) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = reader.read(encoded(picture(2), "JPEG", quality=95, exif=exif), Path())
    assert (turned.width, turned.height) == (56, 84)
    assert reader.pixels(turned).shape == (84, 56, 3)

    layer = Image.new("RGBA", (56, 56), (255, 0, 0, 0))
    seen = reader.pixels(reader.read(encoded(layer), Path()))
    assert (seen == 255).all()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("none.png", "none.png cannot be read (No such file or directory); restore the file"),
        (b"text", "4 bytes are no image in one of the formats PNG"),
        (PNG[:60], "cannot be"),
        (b"", "0 bytes are no image"),
        ({"name": 1}, "has none of bytes, path, image, url; give one"),
        (7, "7 is no image; give a path, bytes, or an object with bytes or path"),
        ("http://example.org/a.png", "is not fetched from the network; download it first"),
        ("data:image/png;base64,%", "is no data URL of base64; write it again"),
        (
            encoded(Image.new("RGB", (5000, 4))),
            "its longer side is more than 200 times the shorter",
        ),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(
    value: Any, reason: str, reader: ImageReader, tmp_path: Path
) -> None:
    with pytest.raises(BadImage) as refused:
        reader.check(reader.read(value, tmp_path))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_image_with_too_many_pixels_is_refused_by_its_header(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "LARGEST_PIXELS", 1000)
    with pytest.raises(BadImage, match="84 x 56 pixels are more than 1000; make it smaller"):
        reader.read(PNG, Path())


def test_a_file_that_changes_while_the_run_goes_on_is_noticed(
    reader: ImageReader, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    image = reader.read("a.png", tmp_path)
    file.write_bytes(to_png(np.array(picture(9))))
    with pytest.raises(DataError, match="has changed since the run began; restore it"):
        reader.pixels(image)


def test_pixels_that_are_kept_are_bounded_and_bytes_of_rows_are_not_in_memory(
    reader: ImageReader,
) -> None:
    size = reader.processor.resized(picture(0)).nbytes
    reader.kept.max_bytes = 3 * size
    files = [reader.read(to_png(np.array(picture(seed))), Path()) for seed in range(8)]
    first = [reader.pixels(file).copy() for file in files]
    assert len(reader.kept) == 3 and reader.kept.num_bytes == 3 * size
    for file, pixels in zip(files, first, strict=True):  # decoded again from the temporary file
        assert np.array_equal(reader.pixels(file), pixels)
    again = reader.read(to_png(np.array(picture(3))), Path())
    assert again is files[3], "equal bytes are kept once"


def test_pixels_come_back_from_a_png_to_the_bit() -> None:
    pixels = np.array(picture(4))
    assert np.array_equal(from_png(to_png(pixels)), pixels)
    with pytest.raises(BadImage, match="a JPEG of mode RGB, where a PNG of RGB is expected"):
        from_png(encoded(picture(4), "JPEG"))
