"""Nobody but the algorithms, their registry and the declaration of keys knows an algorithm by its name."""

from __future__ import annotations

import ast
import re
from typing import get_args

from pa_npu.algorithm.advantages import KNOWN_ADVANTAGES
from pa_npu.algorithm.registry import KINDS
from pa_npu.config.presets import PresetName
from tests.helpers.house import PACKAGE, modules

NAMES = {*KINDS, *KNOWN_ADVANTAGES, *get_args(PresetName)}
# Files that declare keys with their values and defaults, or translate those of other systems.
DECLARATIONS = {
    "config/sections/learning.py": "the keys, their defaults and what --help says of them",
    "config/presets.py": "the values that algorithm.name fills in",
    "config/removed.py": "values of earlier releases",
    "config/foreign_names.py": "keys of other systems",
    "service/losses.py": "the losses of the service's wire, which clients ask for by name",
}


def named_in(text: str) -> set[str]:
    """Algorithms that a source names: as a value, or behind the key that a message shows.

    Docstrings do not count.
    """
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, documented)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if (
            not (isinstance(node, ast.Constant) and isinstance(node.value, str))
            or node.value in docstrings
        ):
            continue
        if node.value in NAMES:
            found.add(node.value)
        shown = re.findall(r"algorithm\.(?:loss|advantage|name) ?[=:] ?([\w+-]+)", node.value)
        found |= NAMES & set(shown)
    return found


def test_no_file_outside_knows_an_algorithm_by_name() -> None:
    for file in modules().values():
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("algorithm/") and path not in DECLARATIONS:
            assert not named_in(file.read_text()), f"{path}: ask the Algorithm instead"


def test_the_search_finds_names() -> None:
    """Controls."""
    assert named_in("if config.algorithm.loss == 'dpo': pass") == {"dpo"}
    assert named_in("x = f'set algorithm.loss=clip'") == {"clip"}
    assert named_in("""def f():\n    'of algorithm.loss=dpo'\n    return 1""") == set()
    assert named_in((PACKAGE / "algorithm" / "registry.py").read_text()) >= {"dpo", "gspo"}
    assert all((PACKAGE / path).is_file() for path in DECLARATIONS)
