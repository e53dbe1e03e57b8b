"""Rows of verifiers' tasksets (data.train=verifiers:NAME, with environment.name=verifiers).

A program in the interpreter that has verifiers makes them (verifiers_program.py). NAME is one of
environment.options.environments, which presets.py copies into the dataset's options.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError

SCHEME = "verifiers:"
PROGRAM = Path(__file__).with_name("verifiers_program.py")
COLUMN = "verifiers"
"""Column of a row that says which task it is."""
TIMEOUT_S = 600.0  # importing verifiers takes seconds, loading a taskset may download it


def are_of_taskset(path: str) -> bool:
    """Returns whether a dataset's path names a taskset of verifiers instead of a file."""
    return path.startswith(SCHEME)


def interpreter(python: str) -> str:
    """Returns the interpreter that a configuration names; `python` is the run's own."""
    return sys.executable if python == "python" else python


def taskset_rows(
    path: str, key: str, max_rows: int | None, options: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the location and the row of each task. Raises DataError.

    Args:
        path: `verifiers:NAME`.
        key: the configuration key that names it, for messages.
        max_rows: None makes all rows, of a taskset without an end 1,000.
        options: `verifiers` has the interpreter `python` and the `environment`.
    """
    name = path.removeprefix(SCHEME)
    chosen = options.get(COLUMN)
    if chosen is None:
        raise DataError(
            f"{key}: {path} names an environment of verifiers that there is not; set "
            f"environment.name=verifiers and environment.options.environments.{name or 'NAME'}"
        )
    command = [interpreter(chosen["python"]), "-P", str(PROGRAM), "rows"]
    request = json.dumps({"environment": chosen["environment"], "max_rows": max_rows})
    try:
        made = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except OSError as error:
        raise DataError(
            f"environment.options: python: {command[0]} cannot be started "
            f"({error.strerror or error}); name the interpreter that has verifiers"
        ) from None
    except subprocess.TimeoutExpired:
        raise DataError(
            f"{key}: {path} has not made its rows within {TIMEOUT_S:g} s; set max_rows"
        ) from None
    lines = made.stdout.splitlines()
    if made.returncode != 0:
        last = (made.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise DataError(
            f"{key}: {path} makes no rows ({last:.600}); correct "
            f"environment.options.environments.{name}, or name the interpreter that has verifiers "
            "in environment.options.python"
        )
    for number, line in enumerate(lines, start=1):
        row = json.loads(line)
        row[COLUMN]["environment"] = name
        yield f"{path}: row {number}", row
