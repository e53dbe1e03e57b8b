r"""Final answers with a definite truth (answers.tsv), and who judges how many of them wrongly.

python -m tests.helpers.answer_table      the table of docs/rewards.md
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """truth: whether the response's final answer equals the reference. prompt: what the response
    was written to, if it matters.
    """

    section: str
    response: str
    reference: str
    truth: bool
    prompt: str = ""


def _read() -> tuple[Row, ...]:
    rows, section = [], ""
    for line in Path(__file__).with_name("answers.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
            continue
        truth, reference, response, *prompt = line.split("\t")
        response, prompt_text = (text.replace("⏎", "\n") for text in (response, "".join(prompt)))
        rows.append(
            Row(section, response, reference, {"right": True, "wrong": False}[truth], prompt_text)
        )
    return tuple(rows)


ANSWERS = _read()
_PATIENCE_S = 120  # of wall clock, as math-verify counts: its own 5 s are over on a busy machine


def math_verify_alone(response: str, reference: str) -> bool:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    expected, actual = (
        math_verify.parse(text, parsing_timeout=_PATIENCE_S)
        for text in (f"\\boxed{{{reference}}}", response)
    )
    return bool(math_verify.verify(expected, actual, timeout_seconds=_PATIENCE_S))


@functools.cache
def is_judged_right(row: Row) -> bool:
    """Returns what the `math` reward says of a row."""
    from pa_npu.rewards.answers import is_correct

    return is_correct(row.response, row.reference, row.prompt)


def table(*, of_both: bool = True) -> list[str]:
    """Lines of markdown: per section the pairs, and the false positives and false negatives of both
    judges, or without math-verify alone, which takes most of the time.
    """
    theirs = functools.cache(lambda row: math_verify_alone(row.response, row.reference))

    def wrong(judge: Callable[[Row], bool], rows: list[Row]) -> str:
        counts = Counter(row.truth for row in rows if judge(row) != row.truth)
        return f"{counts[False]} / {counts[True]}"

    def line(name: str, rows: list[Row]) -> str:
        right = sum(row.truth for row in rows)
        cells = [name, right, len(rows) - right, wrong(is_judged_right, rows)]
        if of_both:
            cells.append(wrong(theirs, rows))
        return f"| {' | '.join(map(str, cells))} |"

    sections = [(name, list(rows)) for name, rows in groupby(ANSWERS, key=lambda row: row.section)]
    head = [
        "| answers | right | wrong | `math`: false positives / negatives | math-verify alone |",
        "|---|---:|---:|---:|---:|",
    ]
    return [*head, *(line(name, rows) for name, rows in sections), line("all", list(ANSWERS))]


if __name__ == "__main__":
    print("\n".join(table()))
