"""Finds the boxes of a response, `\\boxed{...}` and `\\fbox{...}`."""

from __future__ import annotations

import re

from pa_npu.rewards.equal_answers import SEVERAL

# how many \boxed from the end are tried, which bounds the time for a response full of open ones
_MAX_BOXES = 4
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_SIMPLE_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;&*]|\\[,;: "
    r"]|\\\\|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\\[()\[\]]|[A-Za-z](?:_\{?\d+\}?)?\s*=)*"
)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$.,;]+)|\\boxed(\d+)")


def several_boxes(text: str) -> str | None:
    """Returns the contents of the last boxes as a list, if only "," "and" or "or" separates them.

    Otherwise returns the content of the last box.
    """
    last = last_boxed(text)
    if last is None or SEVERAL.search(last):
        return last
    boxes = list(_SIMPLE_BOX.finditer(text))
    contents: list[str] = []
    begin = None
    for box in reversed(boxes):
        if begin is not None and not _BETWEEN_BOXES.fullmatch(text[box.end() : begin]):
            break
        contents.insert(0, box[1])
        begin = box.start()
    if len(contents) > 1 and contents[-1].strip() == last:
        return ", ".join(contents)
    return last


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} that is complete and not empty."""
    boxes = list(_BOX.finditer(text))[-_MAX_BOXES:]
    for box in reversed(boxes):
        depth = 0
        for position in range(box.end(), len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                content = text[box.end() + 1 : position].strip()
                if content:
                    return content
                break
    if boxes:
        return None
    bare = list(_BARE_BOX.finditer(text))
    if not bare:
        return None
    return bare[-1][1] or bare[-1][2]
