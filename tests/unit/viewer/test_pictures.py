"""The pictures of the viewer are a documented list."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.viewer_site import PICTURES

DOCS = Path(__file__).parents[3] / "docs"


def test_every_picture_to_look_at_is_in_the_document_that_lists_them() -> None:
    text = (
        (DOCS / "testing.md")
        .read_text()
        .partition("## Pictures of the viewer")[2]
        .partition("\n## ")[0]
    )
    rows = [
        re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")
    ]
    assert rows[1:] == [[name, picture.look_at] for name, picture in PICTURES.items()]


def test_every_picture_of_the_page_about_the_viewer_is_made_anew_with_them() -> None:
    shown = re.findall(r"\(pictures/(\w+)\.webp\)", (DOCS / "view.md").read_text())
    made = {picture.document for picture in PICTURES.values()} - {""}
    assert made == set(shown), "a picture that no test makes grows old"
