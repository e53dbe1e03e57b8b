"""Hypothesis strategies for input that is nearly right: valid trees and bytes with a few things changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]

NESTED: Any = [[[[[[[[{"a": [[[[[[[]]]]]]]}]]]]]]]]
# What parsers trip over: types, signs, sizes, numbers no integer type holds, text no UTF-8 file
# holds.
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**40,
    0.0,
    -0.0,
    0.5,
    1.5,
    -3.25,
    1e-320,
    1e39,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    "x",
    "0",
    "1e999",
    "nan",
    "####",
    "\x00",
    "\ud800",
    "\U0001f600",
    "é" * 3,
    "a\nb",
    "x" * 5000,
    [],
    {},
    [1],
    [""],
    [None],
    [[]],
    {"a": 1},
    {"": ""},
    {"role": "user", "content": "x"},
    NESTED,
]
BYTES = [
    b"",
    b"\x00",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"\n",
]
BYTES += [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 4400,
    b"\\ud800",
    b"\\u0000",
    b"[" * 1200,
    b'{"a":' * 1200,
    b"null",
    b"0x1",
    b"1_0",
]


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the path of every node, the root's () first."""
    yield path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        yield from places(value, (*path, key))


def get(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def changed_tree(
    draw: st.DrawFn, tree: Any, values: list[Any] | None = None, max_changes: int = 3
) -> Any:
    """`tree` (dictionaries, lists, scalars) with 1 to `max_changes` nodes replaced, removed, repeated,
    wrapped or swapped.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, max_changes))):
        paths = list(places(tree))
        path = draw(st.sampled_from(paths))
        action = draw(
            st.sampled_from(["replace", "replace", "remove", "repeat", "wrap", "swap", "rename"])
        )
        old = get(tree, path)
        if action == "wrap":
            new: Any = [old]
        elif action == "swap":
            new = copy.deepcopy(get(tree, draw(st.sampled_from(paths))))
        elif action == "repeat" and isinstance(old, list):
            new = old * draw(st.integers(2, 3))
        elif action == "repeat" and isinstance(old, (int, float, str)):
            new = old * (
                2 if isinstance(old, str) and len(old) > 20 else draw(st.sampled_from([2, 1000]))
            )
        else:
            new = copy.deepcopy(draw(st.sampled_from(values or VALUES)))
        if not path:
            tree = new
            continue
        parent = get(tree, path[:-1])
        if action == "remove":
            del parent[path[-1]]
        elif action == "rename" and isinstance(parent, dict):
            parent[
                draw(st.sampled_from(["", "x", path[-1].upper(), path[-1] + "s", "__class__"]))
            ] = parent.pop(path[-1])
        else:
            parent[path[-1]] = new
    return tree


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, max_changes: int = 3) -> bytes:
    """`data` with 1 to `max_changes` bits flipped, ranges cut, repeated or replaced, or hostile bytes put
    in.
    """
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, max_changes))):
        at = draw(st.integers(0, len(changed)))
        end = min(len(changed), at + draw(st.integers(0, 40)))
        action = draw(st.sampled_from(["flip", "cut", "insert", "replace", "repeat", "truncate"]))
        if action == "flip" and at < len(changed):
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "cut":
            del changed[at:end]
        elif action == "insert":
            changed[at:at] = draw(st.sampled_from(BYTES))
        elif action == "replace":
            changed[at:end] = draw(st.sampled_from(BYTES))
        elif action == "repeat":
            changed[at:at] = changed[at:end] * draw(st.sampled_from([1, 2, 50]))
        elif action == "truncate":
            del changed[at:]
    return bytes(changed)


def to_json(tree: Any) -> bytes:
    """Also what JSON does not allow: NaN, lone surrogates as escapes."""
    return json.dumps(tree).encode()


def json_near(tree: Any, max_changes: int = 3) -> st.SearchStrategy[bytes]:
    """JSON text of a changed tree, or changed JSON text (duplicate keys, broken UTF-8, cuts, deep
    nesting).
    """
    return changed_tree(tree, max_changes=max_changes).map(to_json) | changed_bytes(
        to_json(tree), max_changes
    )
