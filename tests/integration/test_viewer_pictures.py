"""Pictures of the viewer's page in every state, wide and narrow, light and dark, to be looked at after a change.

PA_NPU_SCREENSHOTS=DIRECTORY keeps them there, and those of docs/view.md in DIRECTORY/documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.viewer.shelf import Shelf
from tests.helpers.browser import Browser, find_browser
from tests.helpers.viewer_site import PICTURES, make_site, served

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_browser() is None,
        reason="no Chromium here; install chromium, or name it in PA_NPU_BROWSER",
    ),
]

FORMS = {
    "wide_light": (1280, 900, False),
    "wide_dark": (1280, 900, True),
    "narrow_light": (400, 844, False),
    "narrow_dark": (400, 844, True),
}
SMALLEST_BYTES = 8000  # a picture of an empty page has less


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(Shelf(make_site(tmp_path_factory.mktemp("pictures") / "runs"))) as server:
        yield server.url


@pytest.mark.parametrize("form", FORMS)
def test_every_page_in_every_state_gives_a_picture(
    browser: Browser, site: str, tmp_path: Path, form: str
) -> None:
    width, height, dark = FORMS[form]
    browser.look(width, height, dark=dark)
    directory = Path(os.environ.get("PA_NPU_SCREENSHOTS") or tmp_path)
    for name, picture in PICTURES.items():
        browser.open(site + picture.address.replace(" ", "%20"))
        file = directory / form / f"{name}.png"
        browser.screenshot(file, whole=True)
        assert file.stat().st_size > SMALLEST_BYTES, f"{file} shows nothing"
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, (
            f"{name} is wider than the screen"
        )
        assert browser.problems == [], name
        if picture.document and form == "wide_light":
            browser.screenshot(directory / "documents" / f"{picture.document}.webp")
    print(f"pictures in {directory / form}")
