"""The viewer's page in a headless browser: every view, wide and narrow, light and dark, by keyboard, with hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import export
from pa_npu.viewer.shelf import Shelf
from tests.helpers.browser import CLIPPED, IN_A_BROWSER, Browser
from tests.helpers.finished_run import GROUPS, HOSTILE, ITERATIONS, RESPONSES, make_run, metrics
from tests.helpers.viewer_site import (
    DAMAGED_ITERATION,
    FLIPPED_GROUP,
    FLIPPED_ITERATION,
    FLIPPED_RESPONSE,
    make_chained,
    served,
)

pytestmark = IN_A_BROWSER

VIEWS = ("overview", "timeline", "samples", "evaluation", "configuration", "processes")
SIZES = ((1280, 900), (400, 844))
LOW_CONTRAST = (Path(__file__).parents[1] / "helpers" / "low_contrast.js").read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow"])
def test_every_view_fits_is_legible_and_asks_for_nothing_outside(
    browser: Browser, url: str, size: tuple[int, int], dark: bool
) -> None:
    browser.look(*size, dark=dark)
    for view in VIEWS:
        browser.open(f"{url}#{view}?i=1&c=difference")
        assert browser.evaluate("document.querySelector('#main').dataset.view") == view
        assert browser.evaluate("document.documentElement.dataset.theme") == (
            "dark" if dark else "light"
        )
        assert browser.evaluate("document.documentElement.scrollWidth") <= size[0], (
            f"{view} is wider than the screen"
        )
        assert browser.evaluate("document.querySelector('#main').innerText.length") > 80, (
            f"{view} is empty"
        )
        assert browser.evaluate("document.querySelector('.empty')?.innerText || ''") == "", view
        assert browser.evaluate(LOW_CONTRAST) == [], f"{view}: too little contrast"
        assert browser.evaluate(CLIPPED) == [], f"{view}: a text is cut"
        assert browser.problems == [], view
        outside = [
            address
            for address in browser.requests
            if not address.startswith((url, "about:", "data:"))
        ]
        assert outside == [], view


def test_a_whole_visit_by_keyboard(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(url)
    for number, view in enumerate(VIEWS, start=1):
        browser.press(str(number))
        browser.wait_for(f"document.querySelector('#main').dataset.view === '{view}'")
    browser.press("3")
    browser.wait_for("document.querySelector('#main').dataset.view === 'samples'")
    before = browser.evaluate("document.querySelector('#iteration').value")
    browser.press("[")
    browser.wait_for(f"document.querySelector('#iteration').value === '{int(before) - 1}'")
    browser.evaluate("document.querySelector('.groups button').focus()")
    browser.press("ArrowDown", "ArrowDown")
    assert browser.evaluate("document.activeElement.dataset.group") == "2", (
        "focus stays on the group that is shown"
    )
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "search"
    browser.write("12 x 4")
    browser.wait_for("document.querySelectorAll('.groups button').length === 1")
    browser.wait_for(
        f"document.querySelectorAll('.detail > .responses mark').length === {RESPONSES}"
    )
    browser.press("Escape", "t")
    assert (
        browser.evaluate("document.querySelector('#theme').getAttribute('aria-label')")
        == "colours: light"
    )
    browser.press("t", "t")
    browser.press("1")
    browser.wait_for("document.querySelector('#main').dataset.view === 'overview'")
    seen = set()
    for _ in range(12):
        browser.press("Tab")
        seen.add(
            browser.evaluate(
                "document.activeElement.tagName + '.' + "
                "document.activeElement.getAttribute('class')"
            )
        )
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "what has the focus shows it"
    assert "svg.plot" in seen, "curves are reached by Tab"


def test_the_timeline_shows_who_waited(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#timeline?i=5")
    text = browser.evaluate("document.querySelector('#main').innerText")
    assert "idle for 40 % of the iteration: they waited 3 s (30 %) for groups" in text
    assert "1 s (10 %) at the border" in text and "Engines were idle for 27 %" in text
    browser.wait_for(f"document.querySelectorAll('svg.gantt rect.k-generate').length == {GROUPS}")
    bars = browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length")
    assert bars == GROUPS and "engine-0" in text and "8100" not in text
    browser.evaluate("document.querySelector('svg.gantt').focus()")
    browser.press("+", "+")
    assert (
        browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length") < bars
    ), "zoomed into a part"
    browser.press("0")
    assert browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length") == bars


def test_evaluations_have_every_set_and_number_with_its_interval(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#evaluation")
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart h2')].map((node) => node.textContent)"
    ) == [
        "gsm8k",
        "aime24",
    ]
    rows = browser.evaluate(
        "[...document.querySelectorAll('table.list tbody tr')].map((row) => row.innerText)"
    )
    assert (
        len(rows) == 4
        and "31 %" in rows[0]
        and "25 % to 38 %" in rows[0]
        and "cut short" in rows[1]
    )
    assert "+20 % (+16 % to +24 %)" in rows[1] and rows[0].split("\t")[3].strip() == "", (
        "paired, against version 0"
    )
    browser.open(f"{url}#evaluation?set=aime24/maj@8")
    assert "maj@8" in browser.evaluate("document.querySelector('thead').innerText")
    assert browser.evaluate("document.querySelector('tbody tr').innerText").split()[1] == "15"


def test_hostile_texts_are_texts(browser: Browser, url: str, tmp_path: Path) -> None:
    browser.look(1280)
    run = make_run(tmp_path / "<b>run&")
    export([RunDirectory(run)], tmp_path / "page.html")
    for page in (url, (tmp_path / "page.html").as_uri()):
        for view in (
            "samples?i=0&g=0",
            "samples?i=0&g=0&c=difference",
            "samples?i=0&g=2",
            "samples?i=0&g=2&c=difference",
            "samples?i=0&g=0&l=raw",
            "evaluation?n=0",
            "processes?p=coordinator",
            "overview",
        ):
            browser.open(f"{page}#{view}")
            browser.wait_for("document.querySelector('#main').innerText.length > 80")
            assert browser.evaluate("window.hacked") is None
            assert (
                browser.evaluate(
                    "document.querySelectorAll('#main img, #main script, #main b b').length"
                )
                == 0
            )
            text = browser.evaluate("document.querySelector('#main').textContent")
            assert "\x1b" not in text and "\u202e" not in text and "\x00" not in text
            assert browser.problems == []
        browser.open(f"{page}#samples?i=0&g=0")
        assert browser.evaluate("document.querySelectorAll('.turns [data-turn]').length") == 0
        browser.open(f"{page}#samples?i=0&g=2")
        assert browser.evaluate("document.querySelectorAll('.turns [data-turn]').length") == 5, (
            "three of one session"
        )
        assert browser.evaluate("document.querySelectorAll('.turns .turns').length") == 2, (
            "its two branches"
        )
        browser.open(f"{page}#samples?i=0&g=0")
        browser.wait_for("document.querySelector('.response .text')")
        assert "<script>window.hacked=2</script>" in browser.evaluate(
            "document.querySelector('.response .text').textContent"
        )
        assert browser.evaluate(
            "[...document.querySelectorAll('.control')].map((n) => n.textContent)"
        )[:1] == ["U+202E"]
    assert [
        address
        for address in browser.requests
        if not address.startswith(("file:", "about:", "data:"))
    ] == []


def test_the_difference_to_another_run_names_the_keys_that_differ(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#configuration")
    keys = browser.evaluate(
        "[...document.querySelectorAll('tbody tr td:first-child .mono')].map((node) => "
        "node.textContent)"
    )
    assert keys == ["run.dir", "optimizer.learning_rate"]


def test_new_iterations_appear_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", iterations=3)
    browser.look(1280)
    with served(RunDirectory(run)) as server:
        browser.open(f"{server.url}#overview")
        assert "3 of 12 iterations done: 0 to 2" in browser.evaluate(
            "document.querySelector('header').innerText"
        )
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(3)) + "\n")
        browser.wait_for(
            "document.querySelector('header').innerText.includes('4 of 12 iterations done')"
        )
        browser.wait_for(
            "document.querySelector('[data-topic=entropy] "
            "svg.plot').getAttribute('aria-label').includes('first')"
        )
        assert browser.problems == []
    browser.wait_for(
        "document.querySelector('header').innerText.includes('no answer from pa-npu view since')"
    )
    browser.problems.clear()


def test_the_cause_of_an_end_is_on_top(browser: Browser, folder_url: str) -> None:
    browser.look(1280)
    for run, words in (
        ("crashed", "The run has failed: trainer-1 ended"),
        ("stopped", "The run was stopped by SIGTERM"),
    ):
        browser.open(f"{folder_url}{run}/#overview")
        first = browser.evaluate(
            "document.querySelector('#main > div').firstElementChild.innerText"
        )
        assert words in first, run
        state = browser.evaluate("document.querySelector('header .chip').innerText")
        assert state == {"crashed": "failed", "stopped": "stopped"}[run]
        assert browser.evaluate("window.hacked") is None and browser.problems == []
    browser.open(f"{folder_url}crashed/#overview")
    assert "out of memory" in browser.evaluate("document.querySelector('.ended pre').innerText")


def test_the_header_says_what_the_run_is_and_its_curves_where_it_was_resumed(
    browser: Browser, folder_url: str
) -> None:
    browser.look(1280)
    browser.open(f"{folder_url}resumed/#overview")
    header = browser.evaluate("document.querySelector('.run-facts').innerText").replace("\n", " ")
    for words in (
        "models/tiny",
        "group-std advantages",
        "train.jsonl",
        "2 trainers + 2 engines",
        "started",
        "for",
    ):
        assert words in header, words
    browser.wait_for("document.querySelectorAll('[data-topic=entropy] .mark-resume').length === 1")
    assert (
        browser.evaluate(
            "document.querySelectorAll('[data-topic=entropy] .mark-checkpoint').length"
        )
        == 3
    )
    assert "resumed" in browser.evaluate("document.querySelector('.legend.marks').innerText")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow"])
def test_the_table_of_runs_is_sorted_searched_opened_and_compared(
    browser: Browser, folder_url: str, size: tuple[int, int], dark: bool
) -> None:
    browser.look(*size, dark=dark)
    browser.open(folder_url)
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert browser.evaluate(LOW_CONTRAST) == [] and browser.problems == []
    names = "[...document.querySelectorAll('tbody td.name')].map((node) => node.innerText)"
    assert len(browser.evaluate(names)) == 5
    browser.evaluate("document.querySelector('#sort-iterations').click()")
    browser.wait_for(f"{names}[4].includes('at work')")
    browser.evaluate("document.querySelector('#sort-iterations').click()")
    browser.wait_for(f"{names}[0].includes('at work')")
    assert browser.evaluate(
        "document.querySelector('th[aria-sort=ascending]').innerText"
    ).startswith("iterations")
    browser.evaluate("document.querySelector('#search').focus()")
    browser.write("sigterm")
    browser.wait_for(f"{names}.length === 1 && {names}[0] === 'stopped'")
    browser.open(folder_url)
    hostile = json.dumps({"name": HOSTILE, "cause": HOSTILE, "model": HOSTILE})
    browser.evaluate(
        f"void (({{ name, cause, model }}) => {{ const [run] = state.runs.runs; run.name = name; "
        f"run.state.cause = cause; run.facts.model = model; draw(); }})({hostile})"
    )
    browser.wait_for("document.querySelector('#main').textContent.includes('window.hacked=1')")
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('#main img, #main script').length") == 0
    browser.open(folder_url)
    for name in ("good", "stopped"):
        browser.evaluate(f"document.querySelector('[aria-label=\"compare {name}\"]').click()")
    browser.evaluate("document.querySelector('#compare').click()")
    browser.wait_for(
        "document.documentElement?.dataset.ready === 'yes' && location.search.includes('with=')"
    )
    assert "beside" in browser.evaluate("document.querySelector('header').textContent")


@pytest.fixture(scope="module")
def chained_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a folder of runs with chains."""
    with served(Shelf(make_chained(tmp_path_factory.mktemp("chained") / "runs"))) as server:
        yield server.url


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow"])
def test_the_chain_is_whole_or_not_and_each_other_run_has_since_when_it_differs_and_in_what_first(
    browser: Browser, chained_url: str, size: tuple[int, int], dark: bool
) -> None:
    browser.look(*size, dark=dark)

    def text(selector: str) -> str:
        value = browser.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText || ''")
        assert isinstance(value, str)
        return value.replace("\n", " ")

    def check() -> None:
        assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert browser.evaluate(LOW_CONTRAST) == [] and browser.problems == []
        assert browser.evaluate("document.querySelectorAll('.chain b').length") == 0, (
            "texts are no markup"
        )

    browser.open(f"{chained_url}whole/?with=equal&with=flipped&with=upgraded&with=without#overview")
    assert "✓ The chain is whole" in text(".chain h2")
    assert f"Iterations 0 to {ITERATIONS - 1}. The newest line's digest is " in text(".chain")
    assert "✓ equal" in text("[data-run=equal]") and "equal to the bit" in text("[data-run=equal]")
    flipped = text("[data-run=flipped]")
    place = f"response {FLIPPED_RESPONSE} of group {FLIPPED_GROUP}"
    assert "▲ different" in flipped
    assert (
        f"they differ in iteration {FLIPPED_ITERATION}, first in the rewards: the reward of "
        f"{place} is" in flipped
    )
    assert "and therefore in: advantages" in flipped
    assert "≈ within rounding" in text("[data-run=upgraded]") and "vllm 0.12.0 <b>" in text(
        "[data-run=upgraded]"
    )
    assert "– not compared" in text("[data-run=without]") and "chain.jsonl" in text(
        "[data-run=without]"
    )
    check()
    browser.evaluate("document.querySelector('[data-run=flipped] a').click()")
    browser.wait_for("document.querySelector('#main').dataset.view === 'samples'")
    assert browser.evaluate("document.querySelector('#iteration').value") == str(FLIPPED_ITERATION)
    group = "document.querySelector('.groups [aria-current=true]')?.dataset.group"
    assert browser.evaluate(group) == str(FLIPPED_GROUP), "what differs is opened"

    browser.open(f"{chained_url}damaged/#overview")
    assert (
        f"not whole: the line of iteration {DAMAGED_ITERATION} is not the one that was written"
        in text(".chain h2")
    )
    assert browser.evaluate("document.querySelector('.chain h2').getAttribute('role')") == "alert"
    assert f"Iterations 0 to {DAMAGED_ITERATION - 1}. " in text(".chain")
    check()
    browser.open(f"{chained_url}without/#overview")
    assert text(".chain") == "", "nothing is said of a chain that the run does not have"


def test_the_checks_of_every_view_find_what_they_look_for(browser: Browser, url: str) -> None:
    """Controls: a text too pale, a view too wide, an error, a request to elsewhere, an image made
    of a text.
    """
    browser.look(390)
    browser.open(f"{url}#overview")
    browser.evaluate(
        "void document.querySelector('#main').append(h('p', { id: 'pale' }, 'too pale to read'))"
    )
    browser.evaluate("void (document.querySelector('#pale').style.color = '#c8ccd0')")
    assert any("too pale" in line for line in browser.evaluate(LOW_CONTRAST))
    browser.evaluate("void (document.querySelector('#pale').style.width = '900px')")
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    browser.evaluate(
        "void document.querySelector('#main').insertAdjacentHTML('beforeend', '<img "
        "src=http://198.51.100.1/x onerror=alert(1)>')"
    )
    browser.wait_for("document.querySelectorAll('#main img').length === 1")
    assert any("Content Security Policy" in problem for problem in browser.problems), (
        "and the policy stops both"
    )
