"""Checks paths that the command line gives to options.

A mistake is one line, as with configuration keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pa_npu.config.load import COMMAND_LINE
from pa_npu.config.texts import new_path_problem, path_problem, shown
from pa_npu.errors import UserError


def existing_path(text: str) -> str:
    """Returns the path of something to read, with the home directory in place of a leading ~.

    Raises UserError.
    """
    return _checked(text, path_problem)


def new_path(text: str) -> str:
    """Returns the path of something to write, as `existing_path` does; it may hold no variable of a
    shell either.
    """
    return _checked(text, new_path_problem)


def _checked(text: str, problem_of: Callable[[str], str | None]) -> str:
    path = os.path.expanduser(text)
    if problem := problem_of(path):
        raise UserError(
            f"{COMMAND_LINE}: {shown(path)} {problem}; give the path of a file or directory"
        )
    return path
