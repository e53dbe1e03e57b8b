"""Runs a response's program inside a cell: as a script, or with assertions and calls after it. Imports the standard library alone.

    python -I code_harness.py PROGRAM KIND PACKAGES      KIND: script or tests; PACKAGES: directories to import from
    stdin   a script's own; else {"mark", "tests": [[given, name], ...]}

Assertions and calls answer in one line each on standard output, begun with a mark that the program is not told:
MARK {"passed": true} or MARK {"result": value}. A program that searches its own process can find the mark, and so fake these; tests
by standard input and output it cannot, since what is wanted is not in its process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any

_SOURCE = "<program>"


def main() -> None:
    program, kind, packages = sys.argv[1:4]
    sys.path += packages.split(os.pathsep)
    with open(program, encoding="utf-8") as file:
        code = compile(file.read(), _SOURCE, "exec")
    sys.argv = [_SOURCE]
    names: dict[str, Any] = {"__name__": "__main__"}
    if kind == "script":
        exec(code, names)
        return
    wanted = json.load(sys.stdin)
    mark, answers = wanted.pop("mark"), sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
        for given, name in wanted["tests"]:
            print(f"\n{mark}", json.dumps(_try(names, given, name), default=str), file=answers, flush=True)


def _try(names: dict[str, Any], given: Any, name: str) -> dict[str, Any]:
    try:
        if not name:
            exec(compile(given, "<test>", "exec"), names)
            return {"passed": True}
        function = names[name] if name in names else getattr(names["Solution"](), name)
        return {"result": function(*given)}
    except BaseException as error:  # also SystemExit: a program that ends here has not passed
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    main()
