"""Code of the user's, named as module:function in a key: imports it, and locates its errors."""

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
    """Returns the function that `name` chooses for `key`: one of `known`, or module:function.

    Raises ConfigError if it is neither, or cannot be imported.
    """
    check_name(key, name, known, "module:function")
    return known[name] if name in known else import_function(key, name)


def check_name(key: str, name: str, known: Collection[str], form: str) -> None:
    """Raises ConfigError unless `name` is one of `known` or has the form module:name."""
    if name not in known and ":" not in name:
        raise ConfigError(
            f"{key}: {name!r} is none of {', '.join(known)} and not {form}; use one of these"
        )


def import_function(key: str, name: str) -> Callable[..., Any]:
    """Imports `module:function` from the working directory or PYTHONPATH.

    Raises ConfigError that names the key.
    """
    function = import_object(key, name, "module:function")
    if not callable(function):
        raise ConfigError(
            f"{key}: {name} is a {type(function).__name__}, not a function; name a function"
        )
    imported: Callable[..., Any] = function
    return imported


def import_object(key: str, name: str, form: str) -> Any:
    """Imports the object `module:name` from the working directory or PYTHONPATH.

    Raises ConfigError that names the key and says that `form` is expected there.
    """
    module_name, _, object_name = name.partition(":")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with _interrupts() as arrived:
            imported: Any = importlib.import_module(module_name)
            for part in object_name.split("."):
                imported = getattr(imported, part)
    except BaseException as error:  # a user's module may raise anything while it is imported
        if isinstance(error, KeyboardInterrupt) and arrived:
            raise
        raise ConfigError(
            f"{key}: {name} cannot be imported ({describe(error)}); name an importable {form} "
            f"(searched: {directory} and PYTHONPATH)"
        ) from None
    return imported


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects the interrupts (Ctrl-C) that arrive inside the block, so that they can be told from a
    KeyboardInterrupt that the imported code raises.
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
    """Returns the exception in one line, with file:line of the user's code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:ERROR_CHARACTERS]
    place = _place(error)
    return f"{text}, {place}" if place else text


def source_of(function: Callable[..., Any]) -> str:
    """Returns file:line of the definition of a function, decorators removed; its name if it has no
    Python code.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return getattr(function, "__name__", "?")
    return f"{code.co_filename}:{code.co_firstlineno}"


def _place(error: BaseException) -> str:
    """Returns file:line of the innermost frame that is neither this package's nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def place_of(frame: FrameType | None) -> str:
    """Returns file:line of the innermost code of the user's that an event loop is running, or ""."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(os.path.join("asyncio", "events.py")) and frame.f_code.co_name == "_run":
            break
        if _is_users(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    if file.startswith((_PACKAGE, os.path.dirname(os.__file__))):
        return False
    return not any(folder in file for folder in _LIBRARIES)
