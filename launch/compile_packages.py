"""Compiles the installed packages to bytecode and says how far it is; launch/env.sh calls it.

Usage: python launch/compile_packages.py DIRECTORY ...

Every process of the first run would compile what it imports, all at once. Left out are tests and the
models of transformers that are none of this project's families, together a third of all files.
"""

from __future__ import annotations

import compileall
import os
import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

_RARELY_IMPORTED = re.compile(
    r"/tests?/|/torch/testing/|/transformers/models/(?!auto/|qwen2/|qwen3/|llama/|__init__)"
)
_FILES_PER_TASK = 100
_STEP_PERCENT = 10


def main() -> None:
    files = [str(file) for directory in sys.argv[1:] for file in _files(Path(directory))]
    print(f"{len(files):,} files: ", end="", flush=True)
    tasks = [
        files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)
    ]
    said_percent = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        results = [workers.submit(_compile, task) for task in tasks]
        for num_done, _ in enumerate(as_completed(results), start=1):
            percent = 100 * num_done // len(tasks) // _STEP_PERCENT * _STEP_PERCENT
            if percent > said_percent:
                said_percent = percent
                print(f"{percent}% ", end="", flush=True)


def _files(directory: Path) -> Iterator[Path]:
    for file in sorted(directory.rglob("*.py")):
        if not _RARELY_IMPORTED.search(file.as_posix()):
            yield file


def _compile(files: list[str]) -> None:
    """Compiles files. Some packages hold templates that are no Python, which is no error."""
    warnings.simplefilter("ignore")
    for file in files:
        compileall.compile_file(file, quiet=2)


if __name__ == "__main__":
    main()
