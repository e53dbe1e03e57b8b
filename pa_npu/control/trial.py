"""A user's code tried in a process of its own before a run, because it may do anything: what is wrong with it is one line.

the launcher                        the process: python -m MODULE
ask(MODULE, request, ...)   ---->   serve(attempt): attempt(request), in which a PaNpuError says what is wrong
                            <----   {"problem": null | one line}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import NoReturn

from pa_npu.control.child_process import private_pipes, send
from pa_npu.control.worker_process import run_worker
from pa_npu.errors import ConfigError, PaNpuError


def ask(module: str, request: bytes, limit_s: float, what: str, too_slow: str) -> str | None:
    """Ask a process of its own what is wrong with the user's code, in one line; None where nothing is.

    what: names key and code; too_slow: rule and remedy where the limit is reached. Raises ConfigError, beginning with `what`,
    where the process does not answer.
    """
    output, code = run_worker([module], request, limit_s)
    if code is None:
        raise ConfigError(f"{what}: {too_slow}")
    try:
        problem: str | None = json.loads(output)["problem"]
    except (ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{what}: the process that tried it ended with {code}; correct what its output says"
        ) from None
    return problem


def serve(attempt: Callable[[bytes], None]) -> NoReturn:
    """The process's whole life. What the user's code prints goes to stderr, and its threads do not keep anybody waiting."""
    requests, replies = private_pipes()
    problem = None
    try:
        attempt(requests.read())
    except PaNpuError as error:
        problem = str(error)
    send(replies, {"problem": problem})
    os._exit(0)
