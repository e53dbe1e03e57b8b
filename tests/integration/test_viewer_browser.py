"""The viewer's page in a headless browser: every view, wide and narrow, light and dark, by keyboard, with hostile texts.

PA_NPU_SCREENSHOTS=DIRECTORY writes the pictures of docs/view.md there.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import ViewServer, export
from tests.helpers.browser import Browser, find_browser
from tests.helpers.finished_run import ENGINES, GROUPS, RESPONSES, make_run, metrics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_browser() is None, reason="no Chromium here; install chromium, or name it in PA_NPU_BROWSER"
    ),
]

VIEWS = ("overview", "timeline", "samples", "evaluation", "configuration", "processes")
SIZES = ((1280, 900), (390, 844))
LOW_CONTRAST = (Path(__file__).parents[1] / "helpers" / "low_contrast.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    started = Browser(program)
    yield started
    started.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("browser")
    run = make_run(directory / "grpo_math")
    other = make_run(directory / "grpo_math_lr1e-6", optimizer={"learning_rate": 2e-6})
    with served(RunDirectory(run), RunDirectory(other)) as server:
        yield server.url


class served:
    """A ViewServer in a thread."""

    def __init__(self, *runs: RunDirectory) -> None:
        self._server = ViewServer(runs)
        self._thread = threading.Thread(target=self._server.serve_forever, name="viewer")

    def __enter__(self) -> ViewServer:
        self._thread.start()
        return self._server

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES, ids=["wide", "narrow"])
def test_every_view_fits_is_legible_and_asks_for_nothing_outside(
    browser: Browser, url: str, size: tuple[int, int], dark: bool
) -> None:
    browser.look(*size, dark=dark)
    for view in VIEWS:
        browser.open(f"{url}#{view}?i=1&c=difference")
        assert browser.evaluate("document.querySelector('#main').dataset.view") == view
        assert browser.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert browser.evaluate("document.documentElement.scrollWidth") <= size[0], f"{view} is wider than the screen"
        assert browser.evaluate("document.querySelector('#main').innerText.length") > 80, f"{view} is empty"
        assert browser.evaluate("document.querySelector('.empty')?.innerText || ''") == "", view
        assert browser.evaluate(LOW_CONTRAST) == [], f"{view}: too little contrast"
        assert browser.problems == [], view
        outside = [address for address in browser.requests if not address.startswith((url, "about:", "data:"))]
        assert outside == [], view
        pictures = os.environ.get("PA_NPU_SCREENSHOTS")
        if pictures and size[0] > 600 and not dark:
            browser.screenshot(Path(pictures) / f"view_{view}.webp")
        elif pictures and dark and size[0] < 600 and view == "overview":
            browser.screenshot(Path(pictures) / f"view_{view}_narrow.webp")


def test_curves_have_axes_with_units_and_values_by_arrow_keys(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#overview")
    titles = browser.evaluate("[...document.querySelectorAll('.chart h2')].map((node) => node.textContent)")
    assert {"Reward", "Accuracy", "Entropy", "Gradient norm", "Idle", "Time", "Throughput"} <= set(titles)
    assert (
        browser.evaluate("document.querySelector('[data-topic=tpspd] .unit').textContent")
        == "tokens per second per device"
    )
    browser.wait_for("document.querySelector('[data-topic=entropy] text')")  # drawn once its size is known
    ticks = browser.evaluate(
        "[...document.querySelectorAll('[data-topic=entropy] text')].map((node) => node.textContent)"
    )
    assert "iteration" in ticks and "0.4" in ticks
    browser.evaluate("document.querySelector('[data-topic=entropy] svg.plot').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight")
    legend = browser.evaluate("document.querySelector('[data-topic=entropy] .legend').textContent")
    assert "iteration 2" in legend and f"{metrics(2)['entropy']:.4g}" in legend
    browser.press("Enter")
    browser.wait_for("document.querySelector('#main').dataset.view === 'samples'")
    assert browser.evaluate("document.querySelector('#iteration').value") == "2", "the samples of that iteration"


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
    assert browser.evaluate("document.activeElement.dataset.group") == "2", "focus stays on the group that is shown"
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "search"
    browser.write("12 x 4")
    browser.wait_for("document.querySelectorAll('.groups button').length === 1")
    assert browser.evaluate("document.querySelectorAll('.responses mark').length") == RESPONSES
    browser.press("Escape", "t")
    assert browser.evaluate("document.querySelector('#theme').getAttribute('aria-label')") == "colours: light"
    browser.press("t", "t")
    browser.press("1")
    browser.wait_for("document.querySelector('#main').dataset.view === 'overview'")
    seen = set()
    for _ in range(12):
        browser.press("Tab")
        seen.add(
            browser.evaluate("document.activeElement.tagName + '.' + document.activeElement.getAttribute('class')")
        )
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "what has the focus shows it"
    assert "svg.plot" in seen, "curves are reached by Tab"


def test_the_timeline_shows_who_waited(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#timeline?i=5")
    text = browser.evaluate("document.querySelector('#main').innerText")
    assert "Trainers waited 3 s (30 %) for groups" in text and "1 s (10 %) at the border" in text
    browser.wait_for(f"document.querySelectorAll('svg.gantt rect.k-generate').length == {GROUPS}")
    bars = browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length")
    assert bars == GROUPS and ENGINES[0].removeprefix("http://") in text
    browser.evaluate("document.querySelector('svg.gantt').focus()")
    browser.press("+", "+")
    assert browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length") < bars, (
        "zoomed into a part"
    )
    browser.press("0")
    assert browser.evaluate("document.querySelectorAll('svg.gantt rect.k-generate').length") == bars


def test_samples_are_filtered_and_their_tokens_coloured_by_difference(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=0&c=difference&g=2")
    colours = browser.evaluate(
        "[...document.querySelectorAll('.response')[0].querySelectorAll('.token')].map((n) => n.style.backgroundColor)"
    )
    assert len(colours) == 9 and "230, 120, 0" in colours[0] and "0, 114, 200" in colours[-1], (
        "orange below, blue above the engine's"
    )
    assert "trainer likelier" in browser.evaluate("document.querySelector('.scale').textContent")
    for wanted, groups in (("equal", [1]), ("right", [1]), ("cut", [3]), ("errors", [0]), ("mixed", [0, 2, 3, 4, 5])):
        browser.open(f"{url}#samples?i=0&f={wanted}")
        found = browser.evaluate(
            "[...document.querySelectorAll('.groups button')].map((node) => Number(node.dataset.group))"
        )
        assert found == groups, wanted
    facts = browser.evaluate("document.querySelector('.response .facts + .facts').innerText")
    assert "reward" in facts and "my_reward:brevity" in facts and "advantage" in facts


def test_evaluations_have_every_set_and_number_with_its_interval(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#evaluation")
    assert browser.evaluate("[...document.querySelectorAll('.chart h2')].map((node) => node.textContent)") == [
        "gsm8k",
        "aime24",
    ]
    rows = browser.evaluate("[...document.querySelectorAll('tbody tr')].map((row) => row.innerText)")
    assert len(rows) == 4 and "31 %" in rows[0] and "25 % to 38 %" in rows[0] and "cut short" in rows[1]
    assert "+20 % (+16 % to +24 %)" in rows[1] and rows[0].split("\t")[3].strip() == "", "paired, against version 0"
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
            "processes?p=coordinator",
            "overview",
        ):
            browser.open(f"{page}#{view}")
            assert browser.evaluate("window.hacked") is None
            assert browser.evaluate("document.querySelectorAll('#main img, #main script, #main b b').length") == 0
            text = browser.evaluate("document.querySelector('#main').textContent")
            assert "\x1b" not in text and "\u202e" not in text and "\x00" not in text
            assert browser.problems == []
        browser.open(f"{page}#samples?i=0&g=0")
        assert browser.evaluate("document.querySelectorAll('.turns [data-turn]').length") == 0
        browser.open(f"{page}#samples?i=0&g=2")
        assert browser.evaluate("document.querySelectorAll('.turns [data-turn]').length") == 5, "three of one session"
        assert browser.evaluate("document.querySelectorAll('.turns .turns').length") == 2, "its two branches"
        browser.open(f"{page}#samples?i=0&g=0")
        assert "<script>window.hacked=2</script>" in browser.evaluate(
            "document.querySelector('.response .text').textContent"
        )
        assert browser.evaluate("[...document.querySelectorAll('.control')].map((n) => n.textContent)")[:1] == [
            "U+202E"
        ]
    assert [address for address in browser.requests if not address.startswith(("file:", "about:", "data:"))] == []


def test_the_difference_to_another_run_names_the_keys_that_differ(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#configuration")
    keys = browser.evaluate(
        "[...document.querySelectorAll('tbody tr td:first-child .mono')].map((node) => node.textContent)"
    )
    assert keys == ["run.dir", "optimizer.learning_rate"]


def test_new_iterations_appear_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", iterations=3)
    browser.look(1280)
    with served(RunDirectory(run)) as server:
        browser.open(f"{server.url}#overview")
        assert "3 of 12 iterations done: 0 to 2" in browser.evaluate("document.querySelector('header').innerText")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(3)) + "\n")
        browser.wait_for("document.querySelector('header').innerText.includes('4 of 12 iterations done')")
        browser.wait_for(
            "document.querySelector('[data-topic=entropy] svg.plot').getAttribute('aria-label').includes('first')"
        )
        assert browser.problems == []
    browser.wait_for("document.querySelector('header').innerText.includes('no answer from pa-npu view since')")
    browser.problems.clear()


def test_curves_can_be_smoothed_and_drawn_over_time_and_runs_have_their_own_hue(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#overview")
    lines = (
        "[...document.querySelectorAll('[data-topic=entropy] path.series')].map((node) => node.getAttribute('class'))"
    )
    browser.wait_for(f"{lines}.length === 2")
    assert [name.split()[1] for name in browser.evaluate(lines)] == ["c-blue", "c-orange"]
    for control, value in (("smoothing", "0.9"), ("x", "time")):
        browser.evaluate(
            f"(() => {{ const choice = document.getElementById('{control}'); choice.value = '{value}'; "
            f"choice.dispatchEvent(new Event('change')); }})()"
        )
        browser.wait_for(f"location.hash.includes('{control}={value}')")
    browser.wait_for(f"{lines}.length === 4")  # each with its raw points behind it
    assert "hours since the first iteration" in browser.evaluate(
        "document.querySelector('[data-topic=entropy] svg.plot').textContent"
    )


def test_a_share_is_all_or_nothing_only_where_it_is(browser: Browser, url: str) -> None:
    browser.open(f"{url}#overview")
    shares = [0, 0.0004, 0.05, 0.5, 0.995, 0.9999, 1]
    assert browser.evaluate(f"{shares}.map((share) => format(share, 'share'))") == [
        *("0 %", "< 0.1 %", "5.0 %", "50 %", "99.5 %", "99.9 %", "100 %"),
    ]


def test_the_checks_of_every_view_find_what_they_look_for(browser: Browser, url: str) -> None:
    """Controls: a text too pale, a view too wide, an error, a request to elsewhere, an image made of a text."""
    browser.look(390)
    browser.open(f"{url}#overview")
    browser.evaluate("void document.querySelector('#main').append(h('p', { id: 'pale' }, 'too pale to read'))")
    browser.evaluate("void (document.querySelector('#pale').style.color = '#c8ccd0')")
    assert any("too pale" in line for line in browser.evaluate(LOW_CONTRAST))
    browser.evaluate("void (document.querySelector('#pale').style.width = '900px')")
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    browser.evaluate(
        "void document.querySelector('#main').insertAdjacentHTML('beforeend', '<img src=http://198.51.100.1/x onerror=alert(1)>')"
    )
    browser.wait_for("document.querySelectorAll('#main img').length === 1")
    assert any("Content Security Policy" in problem for problem in browser.problems), "and the policy stops both"
