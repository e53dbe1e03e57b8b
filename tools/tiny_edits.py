"""Tasks and a teacher for examples/edit_files_agent.py: files of one function with a wrong sign, each with three tests.

The teacher reads the file, writes it with a sign (mostly the one that stood there) and says that it
is done. Which sign its tests want is what reinforcement learning has to find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

QUESTION = "The file has a mistake. Correct it, so that the tests pass."
# Held-out tasks have names of their own, in which the supervised phase teaches to write all the
# same.
NAMES = ("total", "change", "reach", "score", "level", "price", "count", "speed")
HELD_OUT_NAMES = ("width", "height", "depth", "weight", "share", "limit", "balance", "rate")
MISTAKES = (("+", "-"), ("-", "*"), ("*", "+"))  # right, wrong
SIGNS = "+-*"
PAIRS = ((7, 3), (12, 5), (20, 9))
# How often the teacher leaves the sign as it is.
LEFT_RATE = 0.6
# One token each: a model of this size does not learn to copy over as many tokens as these have
# letters.
PARTS = (
    f"{QUESTION}\nFiles:\n",
    ".py\nTests:\nfrom ",
    "\nfrom ",
    " import ",
    "; assert ",
    *(f"{pair} == " for pair in PAIRS),
    "def ",
    "(a, b):\n    return a ",
    " b\n",
    '<tool_call>{"name": "read_file", "arguments": {"name": "',
    '.py"}}</tool_call>',
    '<tool_call>{"name": "write_file", "arguments": {"name": "',
    '.py", "text": "def ',
    "(a, b):\\n    return a ",
    ' b\\n"}}</tool_call>',
    *(f"{name}{ending}" for name in (*NAMES, *HELD_OUT_NAMES) for ending in ("", "s")),
)
VOCAB_SIZE = 384

Piece = tuple[str, bool]


def tasks(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns rows of a dataset, three of each name."""
    return [_task(name, right, wrong) for right, wrong in MISTAKES for name in names]


def _task(name: str, right: str, wrong: str) -> dict[str, Any]:
    text = f"def {name}(a, b):\n    return a {{}} b\n"
    values = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[right]
    return {
        "question": QUESTION,
        "answer": text.format(right),
        "files": {f"{name}s.py": text.format(wrong)},
        "tests": [
            f"from {name}s import {name}; assert {name}{pair} == {values(*pair)}" for pair in PAIRS
        ],
    }


def listed(task: Mapping[str, Any]) -> str:
    """Returns what the example's first message says."""
    return "\n".join([task["question"], "Files:", *task["files"], "Tests:", *task["tests"]])


def teacher_sign(task: Mapping[str, Any], order: random.Random) -> str:
    wrong = wrong_sign(task)
    return wrong if order.random() < LEFT_RATE else order.choice(SIGNS.replace(wrong, ""))


def edit_turns(task: Mapping[str, Any], sign: str, shown: tuple[str, str], end: str) -> list[Piece]:
    """Returns a session piece by piece, and whether the model writes each. shown: what stands
    before and behind a tool's answer; end: of a turn."""
    ((name, text),) = task["files"].items()
    read, write = (
        f"<tool_call>{json.dumps(call)}</tool_call>"
        for call in (
            {"name": "read_file", "arguments": {"name": name}},
            {
                "name": "write_file",
                "arguments": {"name": name, "text": text.replace(_sign_of(text), "@")},
            },
        )
    )
    before, behind = write.split("@")
    return [
        (read + end, True),
        (f"{shown[0]}{text}{shown[1]}", False),
        (f"{before}{sign}{behind}{end}", True),
        (f"{shown[0]}written{shown[1]}", False),
        (f"done{end}", True),
    ]


def wrong_sign(task: Mapping[str, Any]) -> str:
    """Returns the sign that stands in the file."""
    (text,) = task["files"].values()
    return _sign_of(text)


def _sign_of(text: str) -> str:
    return next(sign for sign in SIGNS if f" {sign} " in text)
