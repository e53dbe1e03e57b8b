"""Names in the documents exist: tests, files of the package, tools; and the commands that they show are run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.documented_commands import (
    AS_WRITTEN,
    ELSEWHERE,
    NOT_RUN,
    PAGES_NOT_RUN,
    PLANNED,
    commands,
    documented,
)

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_PATHS = re.compile(
    r"`((?:tests|tools|launch|configs|docs|examples|ops)/[\w./-]+\.(?:py|sh|yaml|md))(?:::(\w+))?`"
)


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


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
        "see `tests/unit/docs/test_documents.py::test_gone` and `tools/gone.py` and "
        "`tests/unit/docs/test_documents.py`"
    ) == [
        "tests/unit/docs/test_documents.py::test_gone",
        "tools/gone.py",
    ]


def test_every_command_that_a_page_shows_is_run_by_a_test_or_said_not_to_be() -> None:
    shown = documented()
    known = {**AS_WRITTEN, **PLANNED, **ELSEWHERE, **NOT_RUN}
    unknown = {
        command: pages
        for command, pages in shown.items()
        if command not in known and not all(page in PAGES_NOT_RUN for page in pages)
    }
    assert not unknown, (
        f"run these as written, or say in tests/helpers/documented_commands.py why not: {unknown}"
    )
    assert not known.keys() - shown.keys(), "no page shows these any more"
    assert len(known) == sum(map(len, (AS_WRITTEN, PLANNED, ELSEWHERE, NOT_RUN))), (
        "each in one place"
    )
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file() and (not name or name in _functions(ROOT / file)), test
    assert len(AS_WRITTEN) + len(PLANNED) + len(ELSEWHERE) > len(NOT_RUN)


def test_commands_are_found_with_continued_lines_and_without_comments() -> None:
    shown = (
        "# first\nexport A=1 B=$PWD\npa-npu run a=1 \\\n    'b=[#x]'     # and so on\nsource x\n"
    )
    page = f"```bash\n{shown}```\n```python\nno\n```\n"
    assert commands(page) == ["pa-npu run a=1 'b=[#x]'"]
