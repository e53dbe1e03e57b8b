"""Rules for texts that the system takes literally: paths, URLs, variables, arguments."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pa_npu.config.tree import ConfigTree

LONGEST_NAME_BYTES = 255  # of one part of a path, on Linux
LONGEST_PATH_BYTES = 3800  # Linux takes 4,095; some are left for the files below run.dir
_LONGEST_URL = 500
_LONGEST_HOST, _LONGEST_LABEL = 253, 63  # RFC 1035, 2.3.4
_LONGEST_NAME = 200
_LARGEST_COUNT = 2**31 - 1
_ANY_TEXT = frozenset({"system_prompt", "instruction", "pattern", "template", "score_pattern"})
_USERS_OWN = frozenset(
    {
        "rollout.env",
        "rollout.extra_args",
        "rollout.attach",
        "environment.options",
        "data.template_options",
        "reward.judge.request",
    }
)
_NAMES = ("telemetry.project", "data.train.", "data.question_column", "data.answer_column",
          "reward.functions.", "reward.judge.model", "reward.code.tests", "evaluate.metric", "environment.name")  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SHELL_VARIABLE = re.compile(r"\$[A-Za-z_{(]|`")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def broken_texts(c: ConfigTree) -> Iterator[str]:
    """Yields a line for each text that cannot be used: key, value, rule, remedy."""
    for key, path in (
        ("run.dir", c.run.dir),
        ("model.path", c.model.path),
        ("model.adapter", c.model.adapter),
        *((c.data.key_of(number), dataset.path) for number, dataset in enumerate(c.data.datasets)),
        *(
            (c.evaluate.key_of(name), dataset.path)
            for name, dataset in c.evaluate.all_sets(c.data.test).items()
        ),
        ("data.demonstrations", c.data.demonstrated.path if c.data.demonstrated else None),
        ("rollout.python", c.rollout.python),
        ("checkpoint.load", c.checkpoint.load),
    ):
        if path is None:
            continue
        problem = new_path_problem(path) if key == "run.dir" else path_problem(path)
        if problem:
            yield f"{key}: {shown(path)} {problem}; give the path of a file or directory"
    for name, value in c.rollout.env.items():
        if not _VARIABLE.fullmatch(name):
            yield (
                f"rollout.env: {shown(name)} is no name of a variable; use letters, digits and "
                "underscores, not beginning with a digit"
            )
        if "\0" in value:
            yield (
                f"rollout.env: the value of {name} holds a zero byte, which no process can be "
                "given; remove it"
            )
    for argument in c.rollout.extra_args:
        if not argument.strip() or "\0" in argument:
            yield f"rollout.extra_args: {shown(argument)} is empty or holds a zero byte; remove it"
    for url in c.rollout.attach:
        problem = url_problem(url)
        if problem:
            yield f"rollout.attach: {shown(url)} {problem}; write http://HOST:PORT"
    if len(set(c.rollout.attach)) < len(c.rollout.attach):
        yield "rollout.attach: an engine is listed twice; list each once"
    for tracker in set(c.telemetry.trackers):
        if c.telemetry.trackers.count(tracker) > 1:
            yield f"telemetry.trackers: {tracker} is listed twice; list each once"
    yield from _broken_leaves(c)
    host = c.placement.host
    if host and (problem := host_problem(host)):
        yield f"placement.host: {shown(host)} {problem}; give the address or the name of a machine"


def _broken_leaves(c: ConfigTree) -> Iterator[str]:
    """Yields a line for each name that no file or page could show, and each absurdly large count."""
    for key, value in leaves(c.model_dump(), ""):
        if isinstance(value, int) and abs(value) > _LARGEST_COUNT:
            yield (
                f"{key}: {shown(str(value))} is beyond any run; set it to {_LARGEST_COUNT} or less"
            )
        if not isinstance(value, str):
            continue
        if key.rpartition(".")[2] in _ANY_TEXT:
            if unusual := next(
                (c for c in value if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\r\t"),
                "",
            ):
                yield (
                    f"{key}: {shown(value)} holds the control character {unusual!r}; in YAML's "
                    "double quotes a backslash begins an escape (\\b, \\f), so use single quotes, "
                    "or write it twice"
                )
            continue
        if value and (not value.strip() or not value.isprintable()):
            yield (
                f"{key}: {shown(value)} is blank or holds line ends or control characters; write "
                "a printable text"
            )
        is_name = key.startswith(_NAMES) and not key.endswith(".path")
        max_length = _LONGEST_NAME if is_name else LONGEST_PATH_BYTES
        if len(value) > max_length:
            yield f"{key}: {shown(value)} has {len(value)} characters; give at most {max_length}"
        if is_name and ".." in value.split("/"):
            yield (
                f"{key}: {shown(value)} leads out of the folder that is named by it; give a name "
                "without `..`"
            )


def leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf, except inside keys whose content is the user's."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if (below := f"{key}.{name}" if key else str(name)) not in _USERS_OWN:
                yield from leaves(inner, below)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{key}.{number}")
    else:
        yield key, value


def new_path_problem(path: str) -> str | None:
    """Returns why nothing should be written to this path, or None. The path need not exist."""
    if _SHELL_VARIABLE.search(path):
        return "holds a variable that no shell has replaced"
    return path_problem(path)


def path_problem(path: str) -> str | None:
    """Returns why no file can have this path, or None."""
    if not path.strip():
        return "is blank"
    if _URL.match(path):
        return "is a URL, and files are read and written on this machine alone"
    if path.startswith("~"):
        return "begins with ~, but there is no such home directory (./~ is a file's name)"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "holds control characters"
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds code points that are no characters"
    if len(encoded) > LONGEST_PATH_BYTES:
        return f"is longer than {LONGEST_PATH_BYTES} bytes"
    if any(len(part) > LONGEST_NAME_BYTES for part in encoded.split(b"/")):
        return f"has a part of more than {LONGEST_NAME_BYTES} bytes"
    return None


def host_problem(host: str) -> str | None:
    """Returns why this is no address or name of a machine, or None."""
    if not host.isprintable() or " " in host:
        return "holds characters that no name of a machine has"
    if len(host) > _LONGEST_HOST:
        return f"is longer than {_LONGEST_HOST} characters"
    try:
        host.encode("idna")
    except UnicodeError:
        return f"has an empty part, or one of more than {_LONGEST_LABEL} characters"
    return None


def url_problem(url: str) -> str | None:
    """Returns why this is no URL of an engine, or None."""
    if len(url) > _LONGEST_URL:
        return f"is longer than {_LONGEST_URL} characters"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "holds characters that no URL has"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "is no URL of a server"
    if problem := host_problem(parts.hostname):
        return f"names a machine that {problem}"
    if parts.query or parts.fragment or parts.username is not None:
        return "holds more than the address of a server"
    return None


def shown(text: str) -> str:
    """Returns the text for a message: quoted, at most 60 characters long."""
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."
