"""Answers are found where GSM8K and MATH put them, and equal means equal in value."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
import unittest.mock
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.rewards import answers
from pa_npu.rewards.answers import equal_answers, extract_answer, is_correct, last_boxed, parse_number
from tests.helpers.answer_table import ANSWERS

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


@pytest.fixture
def numeric_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if math-verify were not installed."""
    monkeypatch.setattr(answers, "_math_verify_available", lambda: False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-42", -42),
        ("+7", 7),
        ("1,234,567", 1234567),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        (r"\$18", 18),
        ("$18$", 18),
        ("50%", 50),
        (r"5\%", 5),
        ("18 dollars", 18),
        (r"5 \text{ cm}", 5),
        (r"10\,000", 10000),
        ("**42**", 42),
        ("42.", 42),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac{1}{2}", Fraction(1, 2)),
        ("1e999999999", None),
        ("1/0", None),
        ("2*3", None),
        ("4 2", None),
        ("2x", None),
        ("12 of 13", None),
        ("", None),
    ],
)
def test_parse_number(text: str, value: Fraction | int | None) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12+34=46\n#### 46", "46"),
        ("#### 1\nno, again\n#### 2\nthe end", "2"),
        (r"\boxed{7} and #### 8", "8"),
        ("####", None),
        (r"#### \boxed{9}", "9"),
        (r"####   " + "\n" + r"\boxed{9}", r"9"),
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("first 3, then 4.", "4"),
        ("a total of $1,200.", "$1,200"),
        ("3-5 = -2", "-2"),
        ("x=47-38", "38"),
        ("nothing", None),
    ],
)
def test_extract_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response, reference="46") == answer


def test_the_last_number_counts_only_for_a_numeric_reference() -> None:
    assert extract_answer("it is 5", reference="5") == "5"
    assert extract_answer("it is 5", reference="x+5") is None


def test_last_boxed_balances_braces_and_ignores_open_ones() -> None:
    assert last_boxed(r"\boxed{a{b}{c{d}}} \boxed{never closed") == "a{b}{c{d}}"
    assert last_boxed(r"\boxed{") is None


@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        ("#### 46", "46", True),
        ("#### 46.0", "46", True),
        ("#### 47", "46", False),
        ("#### 4 6", "46", False),
        ("#### 2*3", "23", False),
        ("#### x = 46", "46", True),
        ("#### 12+34=46", "46", True),
        ("#### 12+34", "46", False),
        ("#### 0.333333", "1/3", True),
        ("#### 0.3333", "1/3", False),
        ("#### 1000001", "1000000", False),
        (r"\boxed{B}", "B", True),
        (r"\boxed{\text{A}}", "B", False),
        (r"\boxed{\text{Monday}}", "monday", True),
        ("no answer at all", "46", False),
        ("", "46", False),
    ],
)
def test_is_correct_without_math_verify(response: str, reference: str, correct: bool, numeric_only: None) -> None:
    assert is_correct(response, reference) is correct


@needs_math_verify
@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        (r"\boxed{x+1}", "1+x", True),
        (r"\boxed{x+2}", "1+x", False),
        (r"\boxed{\frac{\sqrt{12}}{2}}", r"\sqrt{3}", True),
        (r"thus $\frac{\sqrt{3}}{2}$", r"\frac{\sqrt3}{2}", True),
        (r"\boxed{(2, 1)}", "(1,2)", False),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", True),
        (r"\boxed{2\sqrt{529}}", "46", True),
        ("#### 12+34", "46", False),
        (r"\boxed{2 \times 23}", "46", False),
        ("#### 4 6", "46", False),
    ],
)
def test_is_correct_with_math_verify(response: str, reference: str, correct: bool) -> None:
    assert is_correct(response, reference) is correct


@needs_math_verify
@pytest.mark.parametrize(("response", "reference", "correct"), ANSWERS)
def test_every_answer_of_the_table_is_judged_rightly(response: str, reference: str, correct: bool) -> None:
    assert is_correct(response, reference) is correct


@needs_math_verify
def test_the_table_has_fewer_false_verdicts_than_math_verify_alone_on_either_side() -> None:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    ours, theirs = Counter(), Counter()
    for response, reference, correct in ANSWERS:
        alone = math_verify.verify(math_verify.parse(f"\\boxed{{{reference}}}"), math_verify.parse(response))
        ours[is_correct(response, reference), correct] += 1
        theirs[bool(alone), correct] += 1
    assert len(ANSWERS) >= 300 and len({row[:2] for row in ANSWERS}) == len(ANSWERS)
    # Controls: the table is hard enough to tell a judge from another, and has enough of both kinds.
    assert theirs[True, False] >= 5 and theirs[False, True] >= 10
    assert min(theirs[True, True], theirs[False, False]) >= 100
    assert ours[True, False] <= theirs[True, False] and ours[False, True] <= theirs[False, True]


def test_without_math_verify_no_wrong_answer_of_the_table_is_rewarded(numeric_only: None) -> None:
    verdicts = Counter((is_correct(response, reference), correct) for response, reference, correct in ANSWERS)
    assert verdicts[True, False] == 0
    assert verdicts[True, True] >= 0.8 * (verdicts[True, True] + verdicts[False, True]), verdicts


@given(value=st.fractions(max_denominator=10**6), other=st.fractions(max_denominator=10**6))
def test_numbers_are_equal_exactly_however_they_are_written(value: Fraction, other: Fraction) -> None:
    top, bottom = value.numerator, value.denominator
    sign = "-" if value < 0 else ""
    for text in (
        f"{top}/{bottom}",
        f"({top}/{bottom})",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\dfrac{{{abs(top):,}}}{{{bottom}}}".replace(",", "{,}"),
        f"{sign}({abs(top)}/{bottom})".replace("-", "\u2212"),
    ):
        assert parse_number(text) == value, text
        assert equal_answers(text, f"{other.numerator}/{other.denominator}") is (value == other)
        assert is_correct(f"The answer is ${text}$.", f"{value}"), text


@given(text=st.text(alphabet="0123456789.,-+/()${}%\\ =<>x^fracboxed#&\u2212\u00b0 \n", max_size=60))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    with unittest.mock.patch.object(answers, "_math_verify_available", lambda: False):
        for response in (text, f"\\boxed{{{text}}}", f"#### {text}", f"The answer is {text}"):
            assert is_correct(response, "46") in (True, False)
            assert is_correct("\\boxed{46}", text) in (True, False)


@needs_math_verify
def test_math_verify_also_works_outside_the_main_thread() -> None:
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(equal_answers("2y+x", "x+2y")), name="verdict")
    thread.start()
    thread.join(30)
    assert verdicts == [True]


HOSTILE = [
    *(r"\boxed{" * 20_000, "1" * 100_000, "1," * 50_000, "- " * 50_000, "3/" * 50_000, "(" * 100_000),
    *("#### " * 20_000, "\\boxed{" + "(" * 50_000 + "1", "answer is 1+" * 8_000, "$1" * 50_000, "1 and " * 20_000),
]


@pytest.mark.parametrize("response", HOSTILE)
def test_hostile_responses_cost_little_time(response: str) -> None:
    start_s = time.process_time()
    assert not is_correct(response, "46")
    assert time.process_time() - start_s < 2.0


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not here")
def test_gsm8k_references_are_numbers_and_agree_with_themselves_only(numeric_only: None) -> None:
    rows = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()]
    for row in rows:
        final = row["answer"].rpartition("#### ")[2]
        value = parse_number(final)
        assert value is not None, row
        assert is_correct(row["answer"], final)
        assert is_correct(f"The answer is ${final}.", final)
        assert not is_correct(f"#### {value + 1}", final)
