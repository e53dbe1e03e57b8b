"""The viewer's page of a run on rows of data: a loss instead of rewards, and what of a row is trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pa_npu.viewer.run import RunDirectory
from tests.helpers.browser import CLIPPED, IN_A_BROWSER, Browser
from tests.helpers.finished_run import GROUPS, RESPONSES, make_supervised_run
from tests.helpers.viewer_site import served
from tests.integration.test_viewer_browser import LOW_CONTRAST, SIZES

pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def supervised_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = make_supervised_run(tmp_path_factory.mktemp("supervised") / "sft")
    with served(RunDirectory(directory)) as server:
        yield server.url


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow"])
def test_views_fit_are_legible_and_speak_of_no_reward(
    browser: Browser, supervised_url: str, size: tuple[int, int], dark: bool
) -> None:
    browser.look(*size, dark=dark)
    for view in ("overview", "samples", "evaluation"):
        browser.open(f"{supervised_url}#{view}?i=0")
        assert browser.evaluate("document.documentElement.scrollWidth") <= size[0], view
        text = browser.evaluate("document.querySelector('#main').innerText")
        for word in (
            "question by question",
            "reward",
            "accuracy",
            "engine",
            "wrong",
            "No evaluation",
        ):
            assert word.lower() not in text.lower(), (view, word)
        assert browser.evaluate(LOW_CONTRAST) == [], view
        assert browser.evaluate(CLIPPED) == [], view
        assert browser.problems == [], view


def test_tiles_have_loss_and_held_out_loss(browser: Browser, supervised_url: str) -> None:
    browser.open(f"{supervised_url}#overview")
    tiles = browser.evaluate(
        "[...document.querySelectorAll('.tile')].map((tile) => tile.innerText.replace(/\\n/g, ' '))"
    )
    assert "0.04295 loss, nats per token" in tiles
    assert "0.04123 held-out loss, from 0.6" in tiles
    assert "19.5 trained tokens per row" in tiles


def test_a_row_shows_what_is_trained_with_its_weight(browser: Browser, supervised_url: str) -> None:
    browser.open(f"{supervised_url}#samples?i=0")
    rows = "document.querySelectorAll('.response')"
    assert browser.evaluate(f"{rows}.length") == RESPONSES < GROUPS
    list_of_groups = "document.querySelector('.groups').innerText"
    assert browser.evaluate(list_of_groups).count(f"{RESPONSES} rows") == 2
    titles = browser.evaluate(
        f"[...{rows}[0].querySelectorAll('.text > span')].map((span) => span.title)"
    )
    assert titles == ["trained", "not trained", "trained, weight 0.5"]


def test_losses_have_a_curve_and_a_table_without_an_interval(
    browser: Browser, supervised_url: str
) -> None:
    browser.open(f"{supervised_url}#evaluation")
    heads = browser.evaluate("[...document.querySelectorAll('th')].map((cell) => cell.innerText)")
    assert heads == ["version", "loss", "since the first", "rows", "seconds"]
    last = browser.evaluate(
        "[...document.querySelectorAll('tbody tr:last-child td')].map((cell) => cell.innerText)"
    )
    assert last == ["12", "0.04123", "−0.5588", "200", "0.7"]
    assert browser.evaluate("document.querySelectorAll('svg.plot').length") == 2
