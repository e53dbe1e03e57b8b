"""Images of kept samples: small copies, asked for one by one, as data and never as a path."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pa_npu.telemetry.image_store import DIRECTORY, keep_image
from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.samples import _groups
from pa_npu.viewer.server import answer

DIGEST = "0123456789abcdef" * 2


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    pixels = np.zeros((500, 1000, 3), np.uint8)
    pixels[:, 500:] = 255
    keep_image(tmp_path, DIGEST, pixels)
    (tmp_path / "metrics.jsonl").write_text("")
    return RunDirectory(tmp_path)


def test_a_small_copy_is_served_by_its_digest(run: RunDirectory) -> None:
    reply = answer([run], f"image/{DIGEST}")
    image = Image.open(io.BytesIO(base64.b64decode(reply["png"])))
    assert image.size == (256, 128) and image.format == "PNG"
    assert image.getpixel((10, 64)) == (0, 0, 0) and image.getpixel((250, 64)) == (255, 255, 255)


@pytest.mark.parametrize(
    "name", ["", "0" * 32, "../run", f"../{DIRECTORY}/{DIGEST}", f"{DIGEST}.png"]
)
def test_nothing_else_is(name: str, run: RunDirectory) -> None:
    assert answer([run], f"image/{name}") is None


def test_a_file_that_is_not_small_is_not_served(run: RunDirectory) -> None:
    (run.directory / DIRECTORY / f"{DIGEST}.png").write_bytes(bytes(2**20 + 1))
    assert answer([run], f"image/{DIGEST}") is None


def test_a_group_shows_the_images_of_all_its_sessions() -> None:
    def row(response: int, *digests: str) -> dict[str, object]:
        attachments = [{"name": "pixels", "digest": digest} for digest in digests]
        return {"index": 0, "response": response, "attachments": attachments}

    rows = json.loads(json.dumps([row(0, "a", "b"), row(1, "a", "c"), row(2)]))
    (group,) = _groups(rows)
    assert group["images"] == ["a", "b", "c"]
