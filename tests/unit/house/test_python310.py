"""Every file is Python 3.10, the version that the Ascend trainer's stack needs: its grammar, and its standard library."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

NEWER_MODULES = {"tomllib", "wsgiref.types"}
# by module: what came with 3.11 or later, as far as a project like this could want it
NEWER_NAMES = {
    "asyncio": {
        "TaskGroup",
        "timeout",
        "timeout_at",
        "Runner",
        "Barrier",
        "BrokenBarrierError",
        "eager_task_factory",
    },
    "builtins": {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"},
    "collections.abc": {"Buffer"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "EnumCheck", "verify", "member", "nonmember", "global_enum"},
    "functools": {"Placeholder"},
    "hashlib": {"file_digest"},
    "http": {"HTTPMethod"},
    "inspect": {"getmembers_static", "ismethodwrapper", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping", "getHandlerByName", "getHandlerNames"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call"},
    "os": {"process_cpu_count"},
    "queue": {"ShutDown"},
    "random": {"binomialvariate"},
    "re": {"NOFLAG"},
    "sqlite3": {"Blob"},
    "sys": {"exception", "monitoring", "activate_stack_trampoline"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "typing": {
        "Self",
        "Never",
        "LiteralString",
        "Required",
        "NotRequired",
        "Unpack",
        "TypeVarTuple",
        "assert_never",
        "assert_type",
        "reveal_type",
        "dataclass_transform",
        "get_overloads",
        "override",
        "TypeAliasType",
        "TypeIs",
        "ReadOnly",
        "NoDefault",
    },
    "warnings": {"deprecated"},
}
# methods and arguments that only a type checker could attribute to their module: refused wherever
# they stand
NEWER_ATTRIBUTES = {"add_note", "walk", "is_junction", "uncancel", "cancelling"}
OTHERS_ATTRIBUTES = {("ast", "walk"), ("os", "walk")}
NEWER_KEYWORDS = {
    ("TemporaryDirectory", "delete"),
    ("rmtree", "onexc"),
    ("mkstemp", "delete_on_close"),
}
# looked at first: the text of an expression takes most of the time
_ATTRIBUTES = NEWER_ATTRIBUTES.union(*NEWER_NAMES.values())
_KEYWORDS = {keyword for _, keyword in NEWER_KEYWORDS}


def violations(source: str) -> list[str]:
    """Lists the names in `source` that Python 3.10 does not have."""
    try:
        tree = ast.parse(source, feature_version=(3, 10))
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {name.asname or name.name: name.name for name in node.names}
    return [
        f"line {line}: {name}"
        for line, name in _names(tree, aliases)
        if name.split(".")[-1] not in _guarded(tree)
    ]


def _guarded(tree: ast.AST) -> set[str]:
    """Names that the file asks for with hasattr first."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr"
    ]
    return {str(node.args[1].value) for node in calls if isinstance(node.args[1], ast.Constant)}


def _names(tree: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name in NEWER_MODULES:
                    yield node.lineno, f"import {name.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            newer = NEWER_NAMES.get(node.module, set())
            for name in node.names:
                if node.module in NEWER_MODULES or name.name in newer:
                    yield node.lineno, f"from {node.module} import {name.name}"
        elif isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            owner = ast.unparse(node.value)
            if node.attr in NEWER_NAMES.get(aliases.get(owner, ""), set()) or (
                node.attr in NEWER_ATTRIBUTES
                and (aliases.get(owner), node.attr) not in OTHERS_ATTRIBUTES
            ):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in NEWER_NAMES["builtins"]:
            yield node.lineno, node.id
        elif isinstance(node, ast.Call):
            keywords = [keyword for keyword in node.keywords if keyword.arg in _KEYWORDS]
            function = ast.unparse(node.func).split(".")[-1] if keywords else ""
            for keyword in keywords:
                if (function, keyword.arg) in NEWER_KEYWORDS:
                    yield node.lineno, f"{function}({keyword.arg}=)"


def test_no_file_uses_what_came_after_python_310() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    files = [ROOT / name for name in listed.stdout.split()] or [
        file
        for folder in ("pa_npu", "tools", "tests", "ops")
        for file in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    actual = {str(f.relative_to(ROOT)): violations(f.read_text()) for f in files if f.exists()}
    assert not any(actual.values()), {name: lines for name, lines in actual.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    pass\nexcept* ValueError:\n    pass",
        "type Number = int",
        "def first[T](items: list[T]) -> T: ...",
        "import tomllib",
        "from typing import Self",
        "from enum import StrEnum",
        "import enum as e\nclass Kind(e.StrEnum): ...",
        "import asyncio\nasync def f():\n    async with asyncio.timeout(1): ...",
        "import datetime\ndatetime.UTC",
        "from datetime import UTC",
        "raise ExceptionGroup('several', [])",
        "from itertools import batched",
        "error.add_note('more')",
        "from pathlib import Path\nPath('.').walk()",
        "import shutil\nshutil.rmtree('x', onexc=print)",
    ],
)
def test_the_check_sees_what_is_newer(source: str) -> None:
    assert violations(source)


def test_the_check_lets_pass_what_310_has() -> None:
    assert not violations(
        "import ast, asyncio, os\nfrom typing import TypeAlias, ParamSpec\n"
        "match x:\n    case [1, *_]: pass\n"
        "with (open('a') as a, open('b') as b): pass\nos.walk('.'), ast.walk(a), "
        "asyncio.wait_for(b, 1)\n"
        "if hasattr(task, 'uncancel'): task.uncancel()"
    )
