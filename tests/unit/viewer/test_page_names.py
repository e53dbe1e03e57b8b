"""Every name that the viewer's script uses is declared: a browser says it only where the line runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tree_sitter_javascript
from tree_sitter import Language, Node, Parser

from pa_npu.viewer.server import PAGE, SCRIPTS

FUNCTIONS = {
    "arrow_function",
    "function_declaration",
    "function_expression",
    "generator_function_declaration",
    "method_definition",
}
SCOPES = FUNCTIONS | {
    "catch_clause",
    "class_body",
    "for_in_statement",
    "for_statement",
    "program",
    "statement_block",
    "switch_body",
}
BROWSER_NAMES = """
    AbortController Array Blob Boolean CSS Date Element Error EventSource Infinity Intl JSON
    Map Math MutationObserver NaN Node Number Object Promise RegExp ResizeObserver Set String
    TextDecoder URL URLSearchParams WeakMap addEventListener arguments cancelAnimationFrame
    clearInterval clearTimeout console decodeURIComponent devicePixelRatio document
    encodeURIComponent fetch getComputedStyle globalThis history innerHeight innerWidth
    isFinite isNaN localStorage location matchMedia navigator parseFloat parseInt performance
    queueMicrotask removeEventListener requestAnimationFrame scrollTo scrollY sessionStorage
    setInterval setTimeout structuredClone undefined window
"""
OF_BROWSERS = set(BROWSER_NAMES.split())


def names_of(pattern: Node) -> Iterator[str]:
    """Yields what a pattern declares: {a, b: [c], ...rest} = default."""
    if pattern.type in ("identifier", "shorthand_property_identifier_pattern"):
        yield text_of(pattern)
    elif pattern.type in ("assignment_pattern", "object_assignment_pattern"):
        yield from names_of(child_of(pattern, "left"))
    elif pattern.type == "pair_pattern":
        yield from names_of(child_of(pattern, "value"))
    else:
        for child in pattern.named_children:
            yield from names_of(child)


def text_of(node: Node) -> str:
    assert node.text is not None
    return node.text.decode()


def child_of(node: Node, field: str) -> Node:
    child = node.child_by_field_name(field)
    assert child is not None, (node.type, field)
    return child


def nodes_in(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from nodes_in(child)


def scope_of(node: Node) -> Node:
    """Returns the innermost scope that holds a node, which is not the node itself."""
    outer = node.parent
    while outer is not None and outer.type not in SCOPES:
        outer = outer.parent
    assert outer is not None
    return outer


def undeclared(script: str) -> list[str]:
    """Returns `line: name` of each name that no scope around it declares."""
    tree = Parser(Language(tree_sitter_javascript.language())).parse(script.encode())
    assert not tree.root_node.has_error
    declared: dict[int, set[str]] = {}

    def declare(scope: Node, pattern: Node) -> None:
        declared.setdefault(scope.id, set()).update(names_of(pattern))

    for node in nodes_in(tree.root_node):
        if node.type == "variable_declarator" or node.type in (
            "function_declaration",
            "class_declaration",
        ):
            declare(scope_of(node), child_of(node, "name"))
        elif node.type == "for_in_statement":
            declare(node, child_of(node, "left"))
        elif node.type == "catch_clause" and node.child_by_field_name("parameter"):
            declare(node, child_of(node, "parameter"))
        if node.type in FUNCTIONS:
            for field in ("parameters", "parameter"):
                if (parameters := node.child_by_field_name(field)) is not None:
                    declare(node, parameters)

    def is_declared(node: Node) -> bool:
        outer: Node | None = node
        while outer is not None:
            if text_of(node) in declared.get(outer.id, set()):
                return True
            outer = outer.parent
        return text_of(node) in OF_BROWSERS

    return [
        f"{node.start_point.row + 1}: {text_of(node)}"
        for node in nodes_in(tree.root_node)
        if node.type in ("identifier", "shorthand_property_identifier") and not is_declared(node)
    ]


def test_every_name_of_the_script_is_declared() -> None:
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    assert not undeclared(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("const f = (a) => b;", "1: b"),
        ("function f({ a, b: [c] }) { return a + b + c; }", "1: b"),
        ("for (const a of []) {}\nlet c = { a };", "2: a"),
        ("if (document) { const a = 1; }\na;", "2: a"),
    ],
)
def test_a_name_that_its_scopes_do_not_declare_is_found(script: str, name: str) -> None:
    assert undeclared(script) == [name]
