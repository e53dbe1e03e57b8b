"""Runs a response's program inside a cell. Imports the standard library alone.

    python -I code_harness.py PROGRAM KIND PACKAGES

    KIND      script or tests
    PACKAGES  directories to import from
    stdin     KIND=script: the program's own input; KIND=tests: {"mark", "tests": [{"content",
              "name", "whole_keys", "cases", "by_pytest"}, ...]} (fields of CodeTest, code_tests.py)

A script runs as a file does: it is `__main__`, sys.modules has it, and `__file__` names its source.

For tests the program is imported as the module `solution`. So its `if __name__ == "__main__"` does
not run, and its standard streams are empty. Classes of unittest that an assertion defines run
behind it; pytest runs its text as a file. Calls see the modules that APPS and LiveCodeBench import
before a program, since solutions there write `List[int]` without an import.

Each test answers with one line on standard output that begins with a mark which the program does
not know: MARK {"passed": true} or MARK {"result": value}. A program that searches its own process
can find the mark, and so fake these answers. It cannot fake tests by standard input and output: the
wanted output is never in its process.
"""

import builtins
import importlib
import json
import os
import sys
import types
from typing import Any, TextIO

_CALL_MODULES = (
    "bisect collections copy datetime functools heapq itertools math operator random re string sys"
    " typing"
)
_CALL_RECURSION = 50_000  # solutions of LiveCodeBench recurse deeper than Python's 1,000


def main() -> None:
    program, kind, packages = sys.argv[1:4]
    sys.path += packages.split(os.pathsep)
    sys.argv = [program]
    if kind == "script":
        _load(_module("__main__", program))
    else:
        _answer_tests(program)


def _module(name: str, program: str) -> types.ModuleType:
    """Makes the module of a program and registers it in sys.modules.

    pickle, dataclasses and type hints look for it there.
    """
    module = types.ModuleType(name)
    module.__file__ = program
    sys.modules[name] = module
    return module


def _load(module: types.ModuleType) -> None:
    """Runs the program. It inherits nothing from this file, such as a `from __future__ import`."""
    assert module.__file__ is not None
    with open(module.__file__, "rb") as file:
        source = file.read()
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def _answer_tests(program: str) -> None:
    wanted = json.load(sys.stdin)
    answers = _private_output()
    module = _module("solution", program)
    prelude = {}
    if any(test["name"] for test in wanted["tests"]):
        prelude = _prelude()
    module.__dict__.update(prelude)
    _load(module)
    for test in wanted["tests"]:
        answer = _try(module, prelude, test)
        print(f"\n{wanted['mark']}", answer, file=answers, flush=True)
    os._exit(0)  # threads that the program has left do not matter


def _private_output() -> TextIO:
    """Returns standard output as a file; the program gets /dev/null as its input and output."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return answers


def _prelude() -> dict[str, Any]:
    """Returns the names that calls find; a built-in function is never hidden."""
    names: dict[str, Any] = {}
    for module_name in _CALL_MODULES.split():
        module = importlib.import_module(module_name)
        names[module_name] = module
        public = [name for name in vars(module) if not name.startswith("_")]
        for name in getattr(module, "__all__", None) or public:
            if not hasattr(builtins, name):
                names.setdefault(name, getattr(module, name))
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _CALL_RECURSION))
    return names


def _try(module: types.ModuleType, prelude: dict[str, Any], test: dict[str, Any]) -> str:
    """Runs one test; returns its answer as JSON."""
    content = test["content"]
    name = test["name"]
    try:
        if name:
            function = _function(module, prelude, name)
            arguments = content
            if test["whole_keys"]:
                arguments = [_with_whole_keys(argument) for argument in content]
            return json.dumps({"result": _plain(function(*arguments))}, default=str)
        if test["by_pytest"]:
            _run_pytest(content)
        else:
            exec(compile(content, "<test>", "exec", dont_inherit=True), module.__dict__)
            if test["cases"]:
                _run_cases([getattr(module, case) for case in test["cases"]])
        return json.dumps({"passed": True})
    except BaseException as error:  # also SystemExit: a program that ends here has not passed
        return json.dumps({"failed": f"{type(error).__name__}: {error}"[:200]})


def _run_cases(cases: list[Any]) -> None:
    """Runs classes of unittest. Raises AssertionError where a test fails, or none is run."""
    import unittest

    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)
    result = unittest.TestResult()
    result.failfast = True
    suite.run(result)
    if not result.wasSuccessful() or result.testsRun == len(result.skipped):
        raise AssertionError(f"of {result.testsRun} tests not all pass")


def _run_pytest(text: str) -> None:
    """Runs a file of tests by pytest, without plugins.

    Raises AssertionError where a test fails, or none is run.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    for name, content in (("pytest.ini", "[pytest]\n"), ("test_program.py", text)):
        with open(name, "w", encoding="utf-8") as file:
            file.write(content)
    options = ["-q", "-x", "-c", "pytest.ini", "-p", "no:cacheprovider", "--import-mode=importlib"]
    status = int(pytest.main([*options, "test_program.py"]))
    if status != 0:
        raise AssertionError(f"pytest ended with status {status}")


def _function(module: types.ModuleType, prelude: dict[str, Any], name: str) -> Any:
    """Returns the program's function, or that method of a new Solution.

    A name that the program took over from the prelude unchanged is not the program's.
    """
    value = getattr(module, name, None)
    if value is not None and value is not prelude.get(name):
        return value
    return getattr(module.Solution(), name)


def _with_whole_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Returns a result as JSON can hold it.

    numpy's numbers and arrays become Python's, and keys of any other kind become text.
    """
    if type(value).__module__ == "numpy":
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    return value


def _key(key: Any) -> Any:
    if isinstance(key, (str, int, float, bool)) or key is None:
        return key
    return str(_plain(key))


if __name__ == "__main__":
    main()
