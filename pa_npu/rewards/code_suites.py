"""Finds the test suites in a program text: tests of unittest and pytest, and what they need to run.

    class TestCases(unittest.TestCase): ...   run by unittest (BigCodeBench)
    def test_it(): ...                        called (KodCode)
    @pytest.mark.parametrize, fixtures,       run by pytest, if it is installed
    class TestIt without a base

What a text does only when it is run as a file counts as well. The body of
`if __name__ == "__main__"` stands for itself; `unittest.main()` and `pytest.main()` are left out,
since the suite is run anyway.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_RUNNERS = frozenset({"unittest", "pytest"})
_SET_UP = frozenset({"setup_module", "setup_function", "teardown_module", "teardown_function"})
_FIXTURES_OF_PYTEST = (
    "cache capfd capfdbinary caplog capsys capsysbinary monkeypatch pytestconfig record_property "
    "recwarn request tmp_path tmp_path_factory tmpdir tmpdir_factory"
)
_PROGRAM = "solution"


@dataclass(frozen=True)
class Suite:
    """The tests that a text defines but does not run.

    cases: names of unittest's classes.
    calls: statements that call test functions.
    needs_pytest: whether only pytest can run the suite.
    fixtures: names that its functions take and neither the text nor pytest defines.
    """

    cases: tuple[str, ...]
    calls: tuple[str, ...]
    needs_pytest: bool
    fixtures: tuple[str, ...]


def without_guards(tree: ast.Module) -> ast.Module:
    """Returns the module as it runs as a file, without calls that start a runner of tests."""
    body: list[ast.stmt] = []
    mains: set[str] = set()  # names under which a runner's `main` was imported
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in _RUNNERS:
            mains |= {alias.asname or alias.name for alias in node.names if alias.name == "main"}

    for statement in tree.body:
        guarded = [statement]
        if isinstance(statement, ast.If) and _is_main_guard(statement):
            guarded = statement.body
        body += [inner for inner in guarded if not _starts_a_runner(inner, mains)]
    return ast.Module(body=body, type_ignores=[])


def read_suite(tree: ast.Module) -> Suite:
    """Returns the tests that a module defines."""
    functions = [node for node in tree.body if isinstance(node, _Function)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    cases = _unittest_cases(classes)
    tests = [function for function in functions if function.name.startswith("test")]
    fixtures = {function.name for function in functions if _is_fixture(function)}
    plain_classes = [
        node
        for node in classes
        if node.name.startswith("Test") and node.name not in cases and _test_methods(node)
    ]

    names = {function.name for function in functions}
    needs_pytest = bool(fixtures or plain_classes or _SET_UP & names)
    needs_pytest |= any(_parameters(function) or _mentions_pytest(function) for function in tests)
    missing: set[str] = set()
    if needs_pytest:
        missing = _missing_fixtures(tests, plain_classes, fixtures)
    return Suite(
        cases=tuple(cases),
        calls=tuple(_call(function) for function in tests if not _parameters(function)),
        needs_pytest=needs_pytest,
        fixtures=tuple(sorted(missing)),
    )


def _missing_fixtures(
    tests: Sequence[_Function], classes: Sequence[ast.ClassDef], fixtures: set[str]
) -> set[str]:
    """Returns the parameters that neither a fixture nor a parametrization gives a value to."""
    needed: set[str] = set()
    for function in tests:
        needed |= _needed_fixtures(function)
    for node in classes:
        for method in _test_methods(node):
            needed |= _needed_fixtures(method)
    known = fixtures | set(_FIXTURES_OF_PYTEST.split())
    for node in classes:
        known |= _parametrized(node.decorator_list)
        methods = [method for method in node.body if isinstance(method, _Function)]
        known |= {method.name for method in methods if _is_fixture(method)}
    return needed - known


def _needed_fixtures(function: _Function) -> set[str]:
    return _parameters(function) - _parametrized(function.decorator_list) - {"self", "cls"}


def text_for_pytest(tree: ast.Module) -> str:
    """Returns the text of a file of tests in which every name of the program is known.

    Imports from __future__ come first, as Python demands.
    """
    futures: list[ast.stmt] = []
    rest: list[ast.stmt] = []
    for node in tree.body:
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        (futures if is_future else rest).append(node)
    names = (
        f"import {_PROGRAM} as _program\nglobals().update(\n    {{k: v for k, v in "
        f"vars(_program).items() if k[:2] != '__'}}\n)"
    )
    parts = [ast.unparse(ast.Module(body=futures, type_ignores=[])), names]
    parts.append(ast.unparse(ast.Module(body=rest, type_ignores=[])))
    return "\n".join(part for part in parts if part) + "\n"


def missing_modules(tree: ast.Module) -> list[str]:
    """Returns the modules that a text imports and that a program cannot import in its cell.

    Imports inside a `try` do not count.
    """
    names: set[str] = set()
    for statement in tree.body:
        names.update(_imported(statement))
    return sorted(name for name in names if not is_importable(name))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    elif not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imported(child)


@lru_cache(maxsize=1024)
def is_importable(name: str) -> bool:
    """Returns whether programs can import a module.

    They can import Python's own, this environment's packages, and the program itself.
    """
    if name in (_PROGRAM, "__main__") or name in sys.stdlib_module_names:
        return True
    packages = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return PathFinder.find_spec(name, packages) is not None


def _is_main_guard(statement: ast.If) -> bool:
    """Returns whether a statement is `if __name__ == "__main__":` without an else."""
    if statement.orelse or not isinstance(statement.test, ast.Compare):
        return False
    compared = statement.test
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
        return False
    sides = (compared.left, compared.comparators[0])
    names = {side.id for side in sides if isinstance(side, ast.Name)}
    values = {side.value for side in sides if isinstance(side, ast.Constant)}
    return names == {"__name__"} and values == {"__main__"}


def _starts_a_runner(statement: ast.stmt, mains: Collection[str]) -> bool:
    """Returns whether a statement is such as `unittest.main()` or `sys.exit(pytest.main([...]))`.

    `mains`: names under which a runner's `main` was imported.
    """
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    for function in called:
        if isinstance(function, ast.Name) and function.id in mains:
            return True
        if (
            isinstance(function, ast.Attribute)
            and function.attr == "main"
            and _last_name(function.value) in _RUNNERS
        ):
            return True
    return False


def _unittest_cases(classes: Sequence[ast.ClassDef]) -> list[str]:
    """Returns the names of classes that unittest runs.

    They have a base called ...TestCase, and tests of their own or inherited ones.
    """
    cases: dict[str, bool] = {}  # whether it has tests
    for node in classes:
        bases = [_last_name(base) for base in node.bases]
        if any(base.endswith("TestCase") or base in cases for base in bases):
            cases[node.name] = bool(_test_methods(node)) or any(
                cases.get(base, False) for base in bases
            )
    return [name for name, has_tests in cases.items() if has_tests]


def _last_name(base: ast.expr) -> str:
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else ""


def _test_methods(node: ast.ClassDef) -> list[_Function]:
    return [
        method
        for method in node.body
        if isinstance(method, _Function) and method.name.startswith("test")
    ]


def _parameters(function: _Function) -> set[str]:
    """Returns the parameters that have no default: pytest's fixtures and values."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    keywords = [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return {argument.arg for argument in (*required, *keywords)}


def _mentions_pytest(function: _Function) -> bool:
    return any(_names(decorator) & {"pytest"} for decorator in function.decorator_list)


def _is_fixture(function: _Function) -> bool:
    return any("fixture" in _names(decorator) for decorator in function.decorator_list)


def _parametrized(decorators: Collection[ast.expr]) -> set[str]:
    """Returns the parameters that `@pytest.mark.parametrize("a, b", ...)` gives values to."""
    parameters: set[str] = set()
    for decorator in decorators:
        if (
            not isinstance(decorator, ast.Call)
            or _last_name(decorator.func) != "parametrize"
            or not decorator.args
        ):
            continue
        for node in ast.walk(decorator.args[0]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parameters |= {name.strip() for name in node.value.split(",")}
    return parameters


def _names(expression: ast.expr) -> set[str]:
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute)}


def _call(function: _Function) -> str:
    if isinstance(function, ast.AsyncFunctionDef):
        return f"__import__('asyncio').run({function.name}())"
    return f"{function.name}()"
