"""The package's imports as data: who imports whom, at import time, inside functions, or for types only."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pa_npu"


@dataclass(frozen=True)
class Import:
    """source: a module of the package. target: the module that it names; for `from a import b` a.b
    where that is a module.

    at_import: it runs when `source` is imported, not in a function and not for type checkers only.
    """

    source: str
    target: str
    line: int
    at_import: bool

    def __str__(self) -> str:
        return f"{self.source} line {self.line} imports {self.target}"


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module by its dotted name."""
    actual = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        actual[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return actual


def imports(source: str, text: str, known: Iterable[str]) -> Iterator[Import]:
    """All imports in a module's text; known: modules of the package, to tell them from names inside
    modules.
    """
    known = set(known)
    for node, at_import in _statements(ast.parse(text), True):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom) and not node.level and node.module, (
                f"{source}: relative import"
            )
            targets = [
                name if (name := f"{node.module}.{alias.name}") in known else node.module
                for alias in node.names
            ]
        yield from (
            Import(source, target, node.lineno, at_import) for target in dict.fromkeys(targets)
        )


def _statements(
    node: ast.AST, at_import: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        else:
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _statements(child, at_import and not is_later and not is_for_types)


@functools.cache
def package_imports() -> list[Import]:
    known = modules()
    return [
        actual for name, file in known.items() for actual in imports(name, file.read_text(), known)
    ]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than
    one node).
    """
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
        graph.setdefault(target, set())
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    actual: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for another in sorted(graph[node]):
            if another not in index:
                visit(another)
                low[node] = min(low[node], low[another])
            elif another in stack:
                low[node] = min(low[node], index[another])
        if low[node] == index[node]:
            at = stack.index(node)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1:
                actual.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return actual


def uses(text: str, dotted: str) -> list[int]:
    """Lines on which the expression `dotted`, such as torch.cuda, or an attribute of it is written."""
    if dotted.rpartition(".")[2] not in text:  # most files are not read at all
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted
    ]
