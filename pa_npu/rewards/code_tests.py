"""Reads the tests of a row for the reward `code`; refuses those that test nothing.

The layouts of published datasets are known:
    {"inputs": [...], "outputs": [...]}                   standard input and output (APPS, TACO,
                                                          CodeContests, verl)
    the same with "fn_name": NAME                         arguments and result of NAME, or of
                                                          Solution().NAME
    [{"input": text, "output": text}, ...]                standard input and output (LiveCodeBench,
                                                          DeepCoder)
    the same with "testtype": "functional"                arguments and result; the name is in the
                                                          test, or in the row's metadata
    ["assert f(1) == 2", ...]                             assertions (MBPP), behind the row's
                                                          test_imports and test_setup_code
    {"assert_case": [...], "import_prefix": text}         assertions (verl)
    {"functional": text}                                  a program text (verl's users)
    "def check(candidate): ..." and entry_point           assertions in a function (HumanEval)
    "def test_it(): ..."                                  assertions in functions; `solution` is the
                                                          program (KodCode)
    "class TestCases(unittest.TestCase): ..."             run by unittest (BigCodeBench), or by
                                                          pytest (code_suites.py)
    any other program text that asserts something         run behind the program, as it is

A layout may be JSON text, or the text of a Python list or dictionary as CSV files hold it.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pa_npu.config.sections.reward import MOST_TESTS
from pa_npu.errors import DataError
from pa_npu.rewards.code_suites import (
    Suite,
    is_importable,
    missing_modules,
    read_suite,
    text_for_pytest,
    without_guards,
)

# under these a layout holds the name of the function to call
_NAMES = ("fn_name", "func_name", "function_name")
_STDIN_TYPES = frozenset({"stdin", "stdin_stdout", "stdio", "standard_input"})
_CALL_TYPES = frozenset({"functional", "function_call", "call", "call_based"})
_PAIRS = (("inputs", "outputs"), ("input", "output"))
_BUILTINS = frozenset(dir(builtins))
_BASE64 = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")
_ENTRY_POINT = re.compile(r"([A-Za-z_]\w*)(?:\(\))?(?:\.[A-Za-z_]\w*)*")
_ACTIVE = (ast.Assert, ast.Raise, ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_MAX_DECODED = 3  # texts inside texts: some datasets hold JSON of JSON


@dataclass(frozen=True)
class CodeTest:
    """One test of a program.

    kind: `stdin` gives `content` to the program as its input and compares what it prints with the
        text in `wanted`. `call` calls the function `name` with the arguments `content` and compares
        its result with the values in `wanted`, of which one must be equal. `assertion` runs the
        program text `content`, which must not fail.
    whole_keys: whether keys of dictionaries among the arguments are whole numbers, which JSON can
        only hold as text.
    cases: of an assertion, the classes of unittest that it defines and that have to pass.
    by_pytest: of an assertion, whether pytest runs the text.
    needed: names that a program must define for this test.
    """

    kind: Literal["stdin", "call", "assertion"]
    content: Any
    wanted: tuple[Any, ...] = ()
    name: str = ""
    whole_keys: bool = False
    cases: tuple[str, ...] = ()
    by_pytest: bool = False
    needed: frozenset[str] = frozenset()


class _NoTest(ValueError):
    """A test that no program can pass, or that every program passes."""


def row_tests(row: Mapping[str, Any], column: str) -> list[CodeTest]:
    """Returns the first MOST_TESTS tests of a row, at least one.

    `column`: the column with the tests; a dotted name means a key inside a column. Raises DataError
    with a message of one line.
    """
    value, holder = _value_in(row, column)
    if value is None:
        columns = ", ".join(map(str, row))
        raise DataError(
            f"reward.code.tests: the row has no column {column!r} (it has {columns}); name the one "
            "with the tests"
        )
    try:
        tests = list(_tests(value, _Surroundings([holder, row])))[:MOST_TESTS]
    except _NoTest as error:
        raise DataError(
            f"reward.code.tests: column {column!r} holds a test that tests nothing: {error}; "
            "correct the row or leave it out"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"reward.code.tests: column {column!r} has no layout that is known "
            f"({type(error).__name__}: {_short(str(error))}); docs/rewards.md lists them"
        ) from None
    if not tests:
        raise DataError(f"reward.code.tests: column {column!r} holds no test; leave such rows out")
    return tests


def _value_in(row: Mapping[str, Any], column: str) -> tuple[Any, Mapping[str, Any]]:
    """Returns a column's value, None where there is none, and the mapping that holds it."""
    if column in row:
        return row[column], row
    holder: Any = row
    *outer, last = column.split(".")
    for part in outer:
        holder = _decoded(holder.get(part))
        if not isinstance(holder, Mapping):
            return None, row
    return holder.get(last), holder


class _Surroundings:
    """The rest of a row beside its tests: names, imports and set-up code for all of them."""

    def __init__(self, mappings: Sequence[Mapping[str, Any]]) -> None:
        self._mappings = list(mappings)
        for mapping in mappings:
            for name in ("metadata", "extra_info"):
                inner = _decoded(mapping.get(name))
                if isinstance(inner, Mapping):
                    self._mappings.append(inner)

    def inside(self, mapping: Mapping[str, Any]) -> _Surroundings:
        return _Surroundings([mapping, *self._mappings])

    def first(self, *names: str) -> Any:
        """Returns the first value under one of these names that is not empty, else None."""
        for mapping in self._mappings:
            for name in names:
                if mapping.get(name) not in (None, "", [], {}):
                    return mapping[name]
        return None

    def prefix(self) -> str:
        """Returns the lines that stand before each assertion."""
        parts = [
            self.first("import_prefix"),
            _decoded(self.first("test_imports")),
            self.first("test_setup_code"),
        ]
        lines: list[str] = []
        for part in parts:
            if isinstance(part, str):
                lines.append(part)
            elif isinstance(part, Sequence):
                lines += map(str, part)
        return "".join(f"{line}\n" for line in lines)


def _tests(value: Any, around: _Surroundings) -> Iterator[CodeTest]:
    value = _decoded(value)
    if isinstance(value, str):
        yield _program_text(value, around)
        return
    if isinstance(value, Mapping):
        yield from _mapping(value, around.inside(value))
        return
    if not isinstance(value, Sequence):
        raise TypeError(f"it is a {type(value).__name__}")
    for item in value:
        test = item
        if isinstance(item, str) and item.lstrip()[:1] == "{":
            test = _decoded(item)
        if isinstance(test, str):
            yield _program_text(test, around)
        elif isinstance(test, Mapping):
            yield from _mapping(test, around.inside(test))
        else:
            raise TypeError(f"it holds a {type(test).__name__}")


def _mapping(tests: Mapping[str, Any], around: _Surroundings) -> Iterator[CodeTest]:
    for name in ("assert_case", "test_cases", "test_list", "test", "functional"):
        if tests.get(name):
            yield from _tests(tests[name], around)
            return
    for input_name, wanted_name in _PAIRS:
        if input_name in tests and wanted_name in tests:
            break
    else:
        raise KeyError(f"an object with {', '.join(map(str, tests)) or 'nothing'}")
    inputs = tests[input_name]
    wanted = tests[wanted_name]
    kind = str(tests.get("testtype") or tests.get("type") or "").lower()
    are_lists = isinstance(inputs, list) and isinstance(wanted, list)
    has_name = any(tests.get(name) for name in _NAMES)
    if input_name == "inputs" or (are_lists and not kind and not has_name):
        if len(inputs) != len(wanted):
            raise ValueError(f"{len(inputs)} {input_name} and {len(wanted)} {wanted_name}")
        for content, result in zip(inputs, wanted, strict=True):
            yield _pair(content, result, kind, around, in_lists=True)
        return
    yield _pair(inputs, wanted, kind, around, in_lists=kind == "function_call")


def _pair(content: Any, wanted: Any, kind: str, around: _Surroundings, in_lists: bool) -> CodeTest:
    """Returns the test of one input and its output.

    `in_lists`: as in APPS, a result may be wrapped in a list of length one, and keys of arguments
    may be numbers.
    """
    name = None if kind in _STDIN_TYPES else around.first(*_NAMES)
    if name is None:
        if kind in _CALL_TYPES:
            raise _NoTest(
                f"it is of type {kind!r} and no {_NAMES[0]} or metadata says which function it "
                "calls"
            )
        return CodeTest("stdin", _text(content, "input"), (_text(wanted, "output"),))
    if not isinstance(name, str) or not name.isidentifier():
        raise _NoTest(f"it calls {_short(repr(name))}, which is no name of a function")
    return CodeTest(
        kind="call",
        content=_arguments(content),
        wanted=_wanted_results(wanted, in_lists),
        name=name,
        whole_keys=in_lists,
        needed=frozenset({name}),
    )


def _text(value: Any, part: str) -> str:
    """Returns an input or output as text; APPS has lists of lines in some rows."""
    if isinstance(value, list):
        return "\n".join(_text(line, part) for line in value)
    if isinstance(value, (str, int, float)):
        return str(value)
    raise _NoTest(f"its {part} is a {type(value).__name__}, not a text")


def _arguments(value: Any) -> list[Any]:
    """Returns the arguments of a call; LiveCodeBench has one JSON value a line."""
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.splitlines() if line.strip()]
        except ValueError:
            raise _NoTest(
                f"its arguments {_short(repr(value))} are not one JSON value a line"
            ) from None
    if not isinstance(value, list):
        raise _NoTest(f"its arguments are a {type(value).__name__}, not a list")
    return list(value)


def _wanted_results(value: Any, in_lists: bool) -> tuple[Any, ...]:
    results = [value]
    if isinstance(value, str):
        with_json = _json_or_text(value)
        results = [with_json, value] if in_lists else [with_json]
    elif in_lists and isinstance(value, list) and len(value) == 1:
        results.append(value[0])
    return tuple(results)


def _program_text(text: str, around: _Surroundings) -> CodeTest:
    """Returns a test that runs a text behind the program.

    Raises _NoTest if the text does not compile, or if no program can fail it.
    """
    if not text.strip():
        raise _NoTest("it is empty")
    if _BASE64.fullmatch("".join(text.split())):
        raise _NoTest(
            "it is base64, as in LiveCodeBench's private_test_cases; decode the column to JSON "
            "before the run"
        )
    as_written = _compiled(text)
    tree = without_guards(as_written)
    if len(tree.body) != len(as_written.body) or any(
        kept is not written for kept, written in zip(tree.body, as_written.body, strict=True)
    ):
        text = ast.unparse(tree)
    _refuse_missing_modules(tree, around)
    is_active = any(_can_fail(statement) for statement in tree.body)
    suite = read_suite(tree)
    needed = _needed(tree)
    prefix = around.prefix()
    if prefix:
        needed -= _bound(_compiled(prefix))
    entry_point = around.first("entry_point")
    if suite.needs_pytest:
        return _test_of_pytest(prefix, tree, suite, needed)
    if suite.cases:
        text += "\n" + "".join(f"{call}\n" for call in suite.calls)
        if isinstance(entry_point, str) and entry_point in needed:
            # The other names are the program's imports, which BigCodeBench's tests use as well.
            needed = {entry_point}
        return CodeTest("assertion", prefix + text, cases=suite.cases, needed=frozenset(needed))
    if is_active:
        return CodeTest("assertion", prefix + text, needed=frozenset(needed))
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        if entry_point is None:
            raise _NoTest("it defines check(candidate), and the row has no entry_point to check")
        if not isinstance(entry_point, str) or not _ENTRY_POINT.fullmatch(entry_point):
            raise _NoTest(
                f"its entry_point is {_short(repr(entry_point))}, which is no name of a function"
            )
        text += f"\ncheck({entry_point})\n"
        needed |= {re.split(r"\W", entry_point)[0]}
    elif suite.calls:
        text += "\n" + "".join(f"{call}\n" for call in suite.calls)
    else:
        raise _NoTest(f"{_short(repr(text))} has no statement that can fail, such as an assert")
    return CodeTest("assertion", prefix + text, needed=frozenset(needed))


def _test_of_pytest(prefix: str, tree: ast.Module, suite: Suite, needed: set[str]) -> CodeTest:
    """Returns the test of a suite that pytest has to run. Raises _NoTest if it cannot be run."""
    if not is_importable("pytest"):
        raise _NoTest("only pytest can run it, which is not installed here; install pytest")
    if suite.fixtures:
        raise _NoTest(
            f"it wants the fixture {suite.fixtures[0]}, which neither it nor pytest defines"
        )
    text = text_for_pytest(ast.Module(body=[*_compiled(prefix).body, *tree.body], type_ignores=[]))
    return CodeTest(
        "assertion", text, by_pytest=True, needed=frozenset(needed - set(suite.fixtures))
    )


def _refuse_missing_modules(tree: ast.Module, around: _Surroundings) -> None:
    """Raises _NoTest if a text needs a module that programs cannot import.

    BigCodeBench's column `libs` names further modules.
    """
    missing = missing_modules(tree)
    libs = _decoded(around.first("libs"))
    if isinstance(libs, (list, tuple)):
        names = [str(name) for name in libs]
        missing += [name for name in names if not is_importable(name.partition(".")[0])]
    if missing:
        raise _NoTest(f"it needs the module {_short(missing[0])}, which is not installed here")


def _compiled(text: str) -> ast.Module:
    """Returns the syntax tree of a text. Raises _NoTest if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            symtable.symtable(text, "test", "exec")
    except SyntaxError as error:
        raise _NoTest(
            f"{_short(repr(text))} does not compile ({error.msg}, line {error.lineno})"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise _NoTest(
            f"{_short(repr(text))} does not compile ({type(error).__name__}: {error})"
        ) from None
    return tree


def _can_fail(statement: ast.stmt) -> bool:
    """Returns whether a statement of a module checks something.

    Definitions, imports and values that nothing reads check nothing.
    """
    if isinstance(statement, ast.Expr):
        call = statement.value
        return isinstance(call, ast.Call) and not (
            isinstance(call.func, ast.Name) and call.func.id == "print"
        )
    if isinstance(statement, ast.Assert):
        # `assert (a == b, "words")` asserts that a tuple is not empty
        if isinstance(statement.test, ast.Tuple):
            return not statement.test.elts
        return not isinstance(statement.test, ast.Constant) or not statement.test.value
    return isinstance(statement, _ACTIVE)


def _needed(tree: ast.Module) -> set[str]:
    """Returns the names that the text reads and does not bind: the program must define them."""
    read: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.module == "solution":
            imported |= {alias.name for alias in node.names}
    return (read - _bound(tree) - _BUILTINS) | (imported - {"*"})


def _bound(tree: ast.Module) -> set[str]:
    """Returns the names that a text binds."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _decoded(value: Any) -> Any:
    """Returns the value in a text of JSON, or in one of a Python list or dictionary.

    Any other text, and any other value, is returned unchanged.
    """
    for _ in range(_MAX_DECODED):
        if not isinstance(value, str):
            return value
        text = value
        value = _json_or_text(text)
        if value is text:
            break
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return value
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _short(text: str) -> str:
    line = text if len(text) <= 80 else f"{text[:77]}..."
    return "".join(character if character.isprintable() else " " for character in line)
