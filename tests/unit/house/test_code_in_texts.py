"""Code inside texts (programs that tests start, examples in documents, scripts) imports names that exist."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.house import modules

ROOT = Path(__file__).resolve().parents[3]
MODULES = modules()
SUFFIXES = {".md", ".sh", ".yaml", ".ipynb"}
IMPORT = re.compile(
    r"from (pa_npu(?:\.\w+)*) import (\([^)]*\)|\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)"
)


def texts(file: Path) -> Iterator[str]:
    """Yields what may hold code that no type checker reads: a document, or strings of a module."""
    text = file.read_text()
    if file.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for each name that code in the text imports from the package."""
    for module, names in IMPORT.findall(text):
        for name in names.strip("()\n ").split(","):
            if name := name.split(" as ")[0].strip():
                yield module, name


def at_top(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a module that run when it is imported, those inside `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from at_top(child)


def names_of(module: str) -> set[str] | None:
    """Returns what a module defines or imports at its top, and its submodules; None if there is no such module."""
    if module not in MODULES:
        return None
    names = {name.removeprefix(f"{module}.") for name in MODULES if name.startswith(f"{module}.")}
    for statement in at_top(ast.parse(MODULES[module].read_text())):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif not isinstance(statement, ast.If | ast.Try):
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    return names


def missing(text: str) -> list[str]:
    found = []
    for module, name in imported(text):
        names = names_of(module)
        if names is None or name not in names:
            found.append(f"from {module} import {name}")
    return found


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [file for file in files if file.suffix in SUFFIXES | {".py"} and file.exists()]


def test_names_that_code_in_texts_imports_exist() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("files are listed by git")
    problems = {
        str(file.relative_to(ROOT)): found
        for file in tracked_files()
        if (found := [problem for text in texts(file) for problem in missing(text)])
    }
    assert not problems


def test_a_name_that_moved_is_found() -> None:
    reward = "from pa_npu.config.sections.reward import (\n    RewardConfig,\n    RewardFunction as F,\n)"
    assert not missing(reward)
    assert not missing("from pa_npu.config import schema")
    elsewhere = "rollout"
    old = f"x\nfrom pa_npu.config.sections.{elsewhere} import RolloutConfig, RewardConfig\n"
    assert missing(old) == [f"from pa_npu.config.sections.{elsewhere} import RewardConfig"]
    assert len(missing(f"from pa_npu.{'no'}where import anything")) == 1
