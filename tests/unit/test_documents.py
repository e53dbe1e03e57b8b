"""What the documents name exists: tests, files of the package, tools."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_PATHS = re.compile(r"`((?:tests|tools|launch|configs|docs|examples|ops)/[\w./-]+\.(?:py|sh|yaml|md))(?:::(\w+))?`")


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def _missing(text: str) -> list[str]:
    missing = []
    for path, name in _PATHS.findall(text):
        file = ROOT / path
        if not file.is_file() or (name and name not in _functions(file)):
            missing.append(f"{path}::{name}" if name else path)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    assert _missing(page.read_text(encoding="utf-8")) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert _missing(
        "see `tests/unit/test_documents.py::test_gone` and `tools/gone.py` and `tests/unit/test_documents.py`"
    ) == [
        "tests/unit/test_documents.py::test_gone",
        "tools/gone.py",
    ]


def test_the_page_on_exactness_names_a_test_for_every_assumption() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| A")
    ]
    assert [row.split("|")[1].strip() for row in rows] == [f"A{number}" for number in range(1, 7)]
    assert all("tests/" in row.split("|")[4] for row in rows)
