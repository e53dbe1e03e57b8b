"""A user's own code, named module:function in a key: how it is found, and where in it something went wrong."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pa_npu.errors import ConfigError

ERROR_CHARACTERS = 500
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen")


def find_function(key: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """The function of a key: a known one by its name, or the user's own.

    Raises ConfigError where there is none.
    """
    check_name(key, name, known, "module:function")
    return known[name] if name in known else import_function(key, name)


def check_name(key: str, name: str, known: Collection[str], form: str) -> None:
    """Raises ConfigError where the value of a key is neither known nor can be the user's own."""
    if name not in known and ":" not in name:
        raise ConfigError(
            f"{key}: {name!r} is none of {', '.join(known)} and not {form}; use one of these"
        )


def import_function(key: str, name: str) -> Callable[..., Any]:
    """`module:function`, importable from the working directory or PYTHONPATH.

    Raises ConfigError that names the key.
    """
    function = import_object(key, name, "module:function")
    if not callable(function):
        raise ConfigError(
            f"{key}: {name} is a {type(function).__name__}, not a function; name a function"
        )
    found: Callable[..., Any] = function
    return found


def import_object(key: str, name: str, form: str) -> Any:
    """Imports the object `module:name` from the working directory or PYTHONPATH. form: how to write
    it, for the message.
    """
    module_name, _, object_name = name.partition(":")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with _interrupts() as arrived:
            found: Any = importlib.import_module(module_name)
            for part in object_name.split("."):
                found = getattr(found, part)
    except BaseException as error:  # a user's module may raise anything while it is imported
        if isinstance(error, KeyboardInterrupt) and arrived:
            raise
        raise ConfigError(
            f"{key}: {name} cannot be imported ({describe(error)}); name an importable {form} "
            f"(searched: {directory} and PYTHONPATH)"
        ) from None
    return found


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the interrupts (Ctrl-C) that arrive in the block, which tells them from a
    KeyboardInterrupt that code raises.
    """
    arrived: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield arrived  # no interrupt can arrive here
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, before)


def describe(error: BaseException) -> str:
    """The exception in one line, with file:line of the user's code that it came from."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:ERROR_CHARACTERS]
    place = _place(error)
    return f"{text}, {place}" if place else text


def source_of(function: Callable[..., Any]) -> str:
    """file:line where a function is defined, that which others wrap; its name where that is not
    known.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (
        f"{code.co_filename}:{code.co_firstlineno}"
        if code is not None
        else getattr(function, "__name__", "?")
    )


def _place(error: BaseException) -> str:
    """The innermost line that is neither this package's nor an installed library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def place_of(frame: FrameType | None) -> str:
    """file:line of the innermost user's code that an event loop is running; empty where it runs
    none.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(os.path.join("asyncio", "events.py")) and frame.f_code.co_name == "_run":
            break
        if _is_users(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith((_PACKAGE, os.path.dirname(os.__file__))) and not any(
        x in file for x in _LIBRARIES
    )
