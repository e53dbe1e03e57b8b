"""The viewer's page in a headless browser: every view, wide and narrow, light and dark, by keyboard, with hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pa_npu.viewer.run import RunDirectory
from pa_npu.viewer.server import export
from pa_npu.viewer.shelf import Shelf
from tests.helpers.browser import Browser, find_browser
from tests.helpers.chained_run import step, write_chain
from tests.helpers.finished_run import GROUPS, HOSTILE, ITERATIONS, RESPONSES, make_run, metrics
from tests.helpers.viewer_site import (
    DAMAGED_ITERATION,
    FLIPPED_GROUP,
    FLIPPED_ITERATION,
    FLIPPED_RESPONSE,
    make_chained,
    make_states,
    served,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_browser() is None,
        reason="no Chromium here; install chromium, or name it in PA_NPU_BROWSER",
    ),
]

VIEWS = ("overview", "timeline", "samples", "evaluation", "configuration", "processes")
SIZES = ((1280, 900), (400, 844))
CLIPPED = """[...document.querySelectorAll('svg.plot text')].filter((node) => {
  const box = node.getBBox(), svg = node.ownerSVGElement.viewBox.baseVal;
  return box.x < -0.5 || box.x + box.width > svg.width + 0.5 || box.y < 0 || box.y + box.height > svg.height;
}).map((node) => node.textContent)"""
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
    another = make_run(directory / "grpo_math_lr1e-6", optimizer={"learning_rate": 2e-6})
    for directory in (run, another):
        write_chain(directory, [step(number) for number in range(ITERATIONS)])
    with served(RunDirectory(run), RunDirectory(another)) as server:
        yield server.url


@pytest.fixture(scope="module")
def folder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a folder of runs in each state."""
    folder = make_states(tmp_path_factory.mktemp("folder") / "runs")
    with served(Shelf(folder)) as server:
        yield server.url


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


def test_samples_are_filtered_and_their_tokens_coloured_by_difference(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=0&c=difference&g=2")
    colours = browser.evaluate(
        "[...document.querySelectorAll('.response')[0].querySelectorAll('.token')].map((n) => "
        "n.style.backgroundColor)"
    )
    assert len(colours) == 9 and "230, 120, 0" in colours[0] and "0, 114, 200" in colours[-1], (
        "orange below, blue above the engine's"
    )
    assert "trainer likelier" in browser.evaluate("document.querySelector('.scale').textContent")
    for wanted, groups in (
        ("equal", [1]),
        ("right", [1]),
        ("cut", [3]),
        ("errors", [0]),
        ("mixed", [0, 2, 3, 4, 5]),
    ):
        browser.open(f"{url}#samples?i=0&f={wanted}")
        actual = browser.evaluate(
            "[...document.querySelectorAll('.groups button')].map((node) => "
            "Number(node.dataset.group))"
        )
        assert actual == groups, wanted
    browser.wait_for("document.querySelector('.response .facts + .facts')")
    facts = browser.evaluate("document.querySelector('.response .facts + .facts').innerText")
    assert "reward" in facts and "my_reward:brevity" in facts and "advantage" in facts


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


def test_questions_gained_and_lost_are_listed_with_the_answers_of_both_versions(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#evaluation")
    text = browser.evaluate("document.querySelector('.questions').innerText")
    assert "5 gained, 1 lost, 3 right and 1 wrong both times" in text
    listed = (
        "[...document.querySelectorAll('.questions .groups button')].map((node) => "
        "Number(node.dataset.question))"
    )
    assert browser.evaluate(listed) == [0, 4, 5, 6, 7, 8]
    for kind, questions in (("lost", [0]), ("right", [1, 2, 3]), ("wrong", [9])):
        browser.open(f"{url}#evaluation?k={kind}")
        assert browser.evaluate(listed) == questions
    browser.open(f"{url}#evaluation?n=0")
    titles = browser.evaluate(
        "[...document.querySelectorAll('.answers h3')].map((node) => node.innerText)"
    )
    assert titles == ["version 12", "version 0", "grpo_math_lr1e-6, version 12"]
    answers = browser.evaluate(
        "[...document.querySelectorAll('.answers .badge')].map((node) => node.innerText)"
    )
    assert answers == ["✗ wrong", "✓ right", "✗ wrong"]


def test_prompts_and_answers_are_messages_by_role(browser: Browser, url: str) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=0&g=4")
    roles = (
        "[...document.querySelectorAll('.detail > .panel:first-child .bubble')].map((node) => "
        "node.dataset.role)"
    )
    assert browser.evaluate(roles) == ["system", "user"]
    assert "<|im_start|>" not in browser.evaluate("document.querySelector('.detail').innerText")
    browser.open(f"{url}#samples?i=0&g=4&l=raw")
    assert "<|im_start|>system" in browser.evaluate("document.querySelector('.detail').innerText")
    browser.open(f"{url}#samples?i=0&g=2")
    roles = (
        "[...document.querySelectorAll('[data-session=\"0\"] .bubble')].map((node) => "
        "node.dataset.role)"
    )
    assert browser.evaluate(roles) == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    turns = "document.querySelectorAll('.detail > .responses [data-response=\"0\"] .bubble').length"
    assert browser.evaluate(turns) == 2, "a card has its branch turn by turn"


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (
            "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n",
            ["system", "user"],
        ),
        ("<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>", ["tool"]),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", ["user"]),
        ("<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n", ["user"]),
        (
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>user<|message|>b<|end|>",
            ["assistant", "user"],
        ),
        ("<|user|>What is 2+2?<|assistant|>", ["user"]),
        (
            "<\uff5cbegin\u2581of\u2581sentence\uff5c>be "
            "brief<\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c>yes",
            ["", "user", "assistant"],
        ),
        ("<s>[INST] hi [/INST] yes</s>", ["user", "assistant"]),
        ("no marks at all <b>user</b>", [""]),
        ("", []),
    ],
)
def test_messages_of_known_chat_templates(
    browser: Browser, url: str, text: str, roles: list[str]
) -> None:
    if browser.evaluate("typeof messagesOf") != "function":
        browser.open(f"{url}#processes")
    assert (
        browser.evaluate(f"messagesOf({json.dumps(text)}).map((message) => message.role)") == roles
    )


def test_samples_are_chosen_and_ordered_by_reward_and_two_runs_answers_stand_side_by_side(
    browser: Browser, url: str
) -> None:
    browser.look(1280)
    browser.open(f"{url}#samples?i=1")
    bars = (
        "[...document.querySelectorAll('.histogram button')].map((node) => "
        "node.getAttribute('aria-label'))"
    )
    assert browser.evaluate(bars) == ["0.2: 10", "1.2: 14"]
    browser.evaluate("document.querySelectorAll('.histogram button')[0].click()")
    groups = (
        "[...document.querySelectorAll('.groups button')].map((node) => Number(node.dataset.group))"
    )
    browser.wait_for(f"JSON.stringify({groups}) === '[0,2,3,4,5]'")  # group 1 has no such reward
    browser.open(f"{url}#samples?i=1&s=high&g=4")
    browser.wait_for("document.querySelectorAll('.peer .response').length > 0")
    numbers = (
        "[...document.querySelectorAll('.detail > .responses .response')].map((n) => "
        "Number(n.dataset.response))"
    )
    assert browser.evaluate(numbers) == [1, 3, 0, 2], "right answers first"
    assert browser.evaluate("document.querySelector('.peer').dataset.peer") == "grpo_math_lr1e-6"
    assert browser.evaluate("document.querySelectorAll('.peer .response').length") == RESPONSES


def test_a_share_is_all_or_nothing_only_where_it_is(browser: Browser, url: str) -> None:
    browser.open(f"{url}#overview")
    shares = [0, 0.0004, 0.05, 0.5, 0.995, 0.9999, 1]
    assert browser.evaluate(f"{shares}.map((share) => format(share, 'share'))") == [
        *("0 %", "< 0.1 %", "5.0 %", "50 %", "99.5 %", "99.9 %", "100 %"),
    ]


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
