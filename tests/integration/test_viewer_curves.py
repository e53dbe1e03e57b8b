"""The viewer's curves in a headless browser: axes, units, cursor, zoom, smoothing, several runs."""

from __future__ import annotations

import json

import pytest

from tests.helpers.browser import CLIPPED, IN_A_BROWSER, Browser
from tests.helpers.finished_run import metrics

pytestmark = IN_A_BROWSER


def test_curves_have_axes_with_units_and_values_by_arrow_keys(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#overview")
    titles = browser.evaluate(
        "[...document.querySelectorAll('.chart h2')].map((node) => node.textContent)"
    )
    assert {"Reward", "Accuracy", "Entropy", "Gradient norm", "Idle", "Time", "Throughput"} <= set(
        titles
    )
    assert (
        browser.evaluate("document.querySelector('[data-topic=tpspd] .unit').textContent")
        == "tokens per second per device"
    )
    # drawn once its size is known
    browser.wait_for("document.querySelector('[data-topic=entropy] text')")
    ticks = browser.evaluate(
        "[...document.querySelectorAll('[data-topic=entropy] text')].map((node) => "
        "node.textContent)"
    )
    assert "iteration" in ticks and {"0.0", "0.2", "0.4", "0.6"} <= set(ticks), (
        "the ends of the axis have texts"
    )
    browser.evaluate("document.querySelector('[data-topic=entropy] svg.plot').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight")
    legend = browser.evaluate("document.querySelector('[data-topic=entropy] .legend').textContent")
    assert "iteration 2" in legend and f"{metrics(2)['entropy']:.4g}" in legend
    browser.press("Enter")
    browser.wait_for("document.querySelector('#main').dataset.view === 'samples'")
    assert browser.evaluate("document.querySelector('#iteration').value") == "2", (
        "the samples of that iteration"
    )


def test_curves_can_be_smoothed_and_drawn_over_time_and_runs_have_their_own_hue(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#overview")
    lines = (
        "[...document.querySelectorAll('[data-topic=entropy] path.series')].map((node) => "
        "node.getAttribute('class'))"
    )
    browser.wait_for(f"{lines}.length === 2")
    assert [name.split()[1] for name in browser.evaluate(lines)] == ["c-blue", "c-orange"]
    for control, value in (("smoothing", "0.9"), ("x", "time")):
        browser.evaluate(
            f"(() => {{ const choice = document.getElementById('{control}'); choice.value = "
            f"'{value}'; choice.dispatchEvent(new Event('change')); }})()"
        )
        browser.wait_for(f"location.hash.includes('{control}={value}')")
    browser.wait_for(f"{lines}.length === 4")  # each with its raw points behind it
    assert "hours since the first iteration" in browser.evaluate(
        "document.querySelector('[data-topic=entropy] svg.plot').textContent"
    )


AXIS = "[...document.querySelectorAll('.chart text.y')].map((node) => node.textContent)"


@pytest.mark.parametrize(
    ("values", "kind", "log", "texts"),
    [
        ([0, 0], "", False, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        ([0, 0], "share", False, ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ([1, 1], "share", False, ["90.0 %", "92.5 %", "95.0 %", "97.5 %", "100.0 %"]),
        ([0.99991, 0.99994], "share", False, ["99.991 %", "99.992 %", "99.993 %", "99.994 %"]),
        ([2e-6, 2e-6], "", False, ["1.8e-6", "1.9e-6", "2.0e-6", "2.1e-6", "2.2e-6"]),
        (
            [1234567.1, 1234567.4],
            "",
            False,
            ["1.2345671e6", "1.2345672e6", "1.2345673e6", "1.2345674e6"],
        ),
        ([-3, 4], "", False, ["-4", "-2", "0", "2", "4"]),
        ([1.2e-4, 1.3e-4], "", True, ["1e-4", "2e-4"]),
        ([1e-9, 1], "", True, ["1e-9", "1e-7", "1e-5", "1e-3", "0.1", "1"]),
    ],
)
def test_an_axis_ends_in_ticks_whose_texts_differ(
    browser: Browser, url: str, values: list[float], kind: str, log: bool, texts: list[str]
) -> None:
    browser.open(f"{url}#processes")
    spec = json.dumps(
        {
            "title": "t",
            "kind": kind,
            "log": log,
            "series": [{"name": "a", "x": [0, 1], "values": values}],
        }
    )
    browser.evaluate(f"void document.querySelector('#main').replaceChildren(chart({spec}))")
    browser.wait_for(f"{AXIS}.length > 0")
    actual = browser.evaluate(AXIS)
    assert actual == texts and len(set(actual)) == len(actual)
    assert browser.evaluate(CLIPPED) == [], "every text is inside its chart"


def test_all_charts_have_one_cursor_and_one_zoom(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#overview")
    browser.wait_for("document.querySelectorAll('[data-topic=entropy] text.x').length > 2")
    browser.evaluate("document.querySelector('[data-topic=entropy] svg.plot').focus()")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight")
    browser.wait_for(
        "document.querySelector('[data-topic=tpspd] .legend').textContent.includes('iteration 2')"
    )
    crosses = (
        "[...document.querySelectorAll('.cross')].filter((n) => n.getAttribute('visibility') "
        "=== 'visible').length"
    )
    assert browser.evaluate(crosses) == browser.evaluate(
        "document.querySelectorAll('.charts .chart').length"
    )
    browser.press("+")
    browser.wait_for("location.hash.includes('from=')")
    firsts = (
        "[...document.querySelectorAll('[data-topic=tpspd] text.x')].map((n) => "
        "Number(n.textContent))"
    )
    browser.wait_for(f"{firsts}.length > 1 && Math.max(...{firsts}) < 11")
    browser.evaluate("document.querySelector('[aria-label=\"show the whole run\"]').click()")
    browser.wait_for(f"!location.hash.includes('from=') && Math.max(...{firsts}) >= 10")
    box = browser.evaluate(
        "(() => { const b = document.querySelector('[data-topic=entropy] "
        "svg.plot').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    for kind, part, buttons in (
        ("mousePressed", 0.4, 1),
        ("mouseMoved", 0.6, 1),
        ("mouseReleased", 0.8, 0),
    ):
        place = {"x": box[0] + part * box[2], "y": box[1] + box[3] / 2}
        browser.call(
            "Input.dispatchMouseEvent",
            type=kind,
            button="left",
            buttons=buttons,
            clickCount=1,
            **place,
        )
    browser.wait_for("location.hash.includes('from=') && location.hash.startsWith('#overview')")
    assert browser.problems == []


def test_a_share_is_all_or_nothing_only_where_it_is(browser: Browser, url: str) -> None:
    browser.open(f"{url}#overview")
    shares = [0, 0.0004, 0.05, 0.5, 0.995, 0.9999, 1]
    assert browser.evaluate(f"{shares}.map((share) => format(share, 'share'))") == [
        "0 %",
        "< 0.1 %",
        "5.0 %",
        "50 %",
        "99.5 %",
        "99.9 %",
        "100 %",
    ]
