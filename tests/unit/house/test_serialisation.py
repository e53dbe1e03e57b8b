"""No code of ours runs what comes from another process: no pickle, no eval, no object collectives, no unsafe YAML.

What crosses processes is safetensors and JSON. This reads the source; each rule is shown to find
what it looks for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pa_npu

PACKAGE = Path(pa_npu.__file__).parent
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
YAML = {
    "unsafe_load",
    "unsafe_load_all",
    "full_load",
    "full_load_all",
    "Loader",
    "FullLoader",
    "UnsafeLoader",
    "CLoader",
}
# torch.distributed's, all of which pickle what they send
COLLECTIVES = {
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def findings(source: str) -> Iterator[str]:
    """ "line: reason" for everything that could run or build objects from data."""
    for node in ast.walk(ast.parse(source)):
        for reason in _reasons(node):
            yield f"{getattr(node, 'lineno', 0)}: {reason}"


def _reasons(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (
            f"import {alias.name}"
            for alias in node.names
            if alias.name.partition(".")[0] in MODULES
        )
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
        yield f"from {node.module}"
    if isinstance(node, ast.ImportFrom):
        yield from (
            f"from {node.module} import {a.name}" for a in node.names if a.name in COLLECTIVES
        )
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if node.attr in COLLECTIVES or (owner == "yaml" and node.attr in YAML):
            yield f"{owner}.{node.attr}"
    if isinstance(node, ast.Call):
        yield from _call_reasons(
            ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}, node
        )


def _call_reasons(name: str, keywords: dict[str | None, str], node: ast.Call) -> Iterator[str]:
    if name in BUILTINS:
        yield f"{name}()"
    if name == "torch.save" or (name == "torch.load" and keywords.get("weights_only") != "True"):
        yield f"{name} pickles; use safetensors, or weights_only=True"
    if name == "yaml.load" and not {"SafeLoader", "yaml.SafeLoader"} & {
        *keywords.values(),
        *map(ast.unparse, node.args),
    }:
        yield "yaml.load without SafeLoader"
    if (
        keywords.get("allow_pickle", "False") != "False"
        or keywords.get("shell", "False") != "False"
        or name == "os.system"
    ):
        yield f"{name}({', '.join(f'{key}={value}' for key, value in keywords.items())})"


# runs a program that the policy wrote, which is its job, inside a sandbox and in a process that
# holds nothing of the run
SANDBOXED = PACKAGE / "rewards" / "code_harness.py"
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != SANDBOXED)


# reads the pickles of checkpoint libraries by an unpickler that admits known classes alone
# (checkpoints/test_damage.py)
READS_KNOWN_CLASSES = (
    PACKAGE / "backends" / "shard_index.py",
    PACKAGE / "backends" / "megatron" / "patches" / "known_classes.py",
)


def test_no_file_of_the_package_builds_objects_from_data():
    files = [file for file in FILES if file not in READS_KNOWN_CLASSES]
    actual = [
        f"{file.relative_to(PACKAGE)}:{finding}"
        for file in files
        for finding in findings(file.read_text())
    ]
    assert len(FILES) > 100 and not actual, "\n".join(actual)


def test_what_runs_programs_is_imported_by_nothing_and_runs_nothing_else():
    assert {finding.partition(": ")[2] for finding in findings(SANDBOXED.read_text())} == {
        "exec()",
        "compile()",
    }
    importers = [file for file in FILES if f"import {SANDBOXED.stem}" in file.read_text()]
    assert not importers, "it is started by its file, in the sandbox"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import multiprocessing.connection",
        "from pickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list(x)",
        "torch.distributed.gather_object(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.save(x, f)",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "class L(yaml.FullLoader): pass",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
    ],
)
def test_the_rules_find_what_they_look_for(source):
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(f, weights_only=True)",
        "yaml.safe_load(t)",
        "class L(yaml.SafeLoader): pass",
        "np.load(f)",
    ],
)
def test_the_rules_let_pass_what_is_safe(source):
    assert not list(findings(source))
