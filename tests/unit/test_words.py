"""Docstrings begin with a verb or a noun: one that begins with Of, What or Where leaves out its subject."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.house import PACKAGE

ROOT = PACKAGE.parent
OPENINGS = {"of", "what", "where"}


def broken(text: str) -> Iterator[str]:
    """Yields line and first line of every docstring in a module's text that begins with one of OPENINGS, those of names too."""
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            said = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                first = said.value.strip().split("\n")[0]
                if first.split(" ")[0].strip(".,:;").lower() in OPENINGS:
                    yield f"{said.lineno}: {first}"


@pytest.mark.parametrize("folder", ["pa_npu", "tools", "ops", "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in broken(file.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a verb or a noun:\n" + "\n".join(found)


def test_an_opening_without_a_subject_is_found() -> None:
    assert list(
        broken('"""What it is."""\nN = 1\n"""Where."""\ndef a():\n    """Of all."""\nclass B:\n    """Whatever."""\n')
    ) == [
        "1: What it is.",
        "3: Where.",
        "5: Of all.",
    ]
