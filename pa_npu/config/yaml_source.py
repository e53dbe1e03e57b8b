"""Reads YAML values with the place where each was written, and writes YAML that reads back equal.

Scalars follow YAML 1.2's core schema: `1e-6` is a number, only `true` and `false` are booleans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from pa_npu.config.plain_file import read_plain, reason
from pa_npu.errors import ConfigError

_SHOWN_CHARACTERS = 200  # of a path in a message
_MAX_FILE_BYTES = 1 << 20
_MAX_NODES = 20_000  # with aliases expanded: a few lines of them can make billions

KeyPath = tuple[str, ...]
Places = dict[KeyPath, str]

_RESOLVERS = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (
        "tag:yaml.org,2002:int",
        re.compile(r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$"),
        "-+0123456789",
    ),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        "-+0123456789.",
    ),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever YAML 1.1 or 1.2 would read as something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: _int(str(loader.construct_scalar(node))),  # type: ignore[arg-type]
)


def _int(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def read_yaml(path: str) -> tuple[dict[str, Any], Places]:
    """Reads a YAML mapping. Also returns "file:line" of every key. Raises ConfigError."""
    places: Places = {}
    value = _parse(read_text(path), path, places)
    if value is None:
        return {}, {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}:1: the top level is not a mapping of sections; write `run:`, `model:`, ... "
            "there"
        )
    return value, places


def read_text(path: str) -> str:
    """Returns the text of a configuration file. Raises ConfigError."""
    try:
        return read_plain(path, _MAX_FILE_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such configuration file; give an existing YAML file with --config"
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        shown = path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}..."
        raise ConfigError(
            f"{shown}: cannot be read ({reason(error)}); give a readable YAML file"
        ) from None


def read_value(text: str, where: str) -> Any:
    """Returns the value of one YAML scalar or flow collection, such as `3`, `true`, `[a, b]`.

    Raises ConfigError, also if the text holds a comment, an anchor or an alias, which YAML would drop
    without a word.
    """
    value = _parse(text, where, {})
    end = 0
    for event in yaml.parse(text, Loader=_Loader):
        if getattr(event, "anchor", None) is not None:
            raise ConfigError(
                f"{where}: {text!r:.80}: & and * begin YAML's anchors and aliases; put the text in "
                "quotes"
            )
        if isinstance(event, (yaml.ScalarEvent, yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            end = _end_of(event)
    if text[end:].strip():
        raise ConfigError(
            f"{where}: {text!r:.80}: YAML takes what follows # for a comment; put the text in "
            "quotes"
        )
    return value


def read_quoted(text: str) -> str | None:
    """Returns the text inside YAML's quotes with its escapes replaced, or None if `text` is not one
    quoted text as a whole.
    """
    if text[:1] not in ("'", '"'):
        return None
    try:
        events = list(yaml.parse(text, Loader=_Loader))
    except yaml.YAMLError:
        return None
    scalars = [event for event in events if isinstance(event, yaml.ScalarEvent)]
    is_all = len(scalars) == 1 and scalars[0].style and _end_of(scalars[0]) == len(text)
    return str(scalars[0].value) if is_all else None


def _end_of(event: yaml.Event) -> int:
    return event.end_mark.index if event.end_mark is not None else 0


def dump_yaml(value: dict[str, Any]) -> str:
    """Returns YAML text that `read_yaml` reads back to the same value. Keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _parse(text: str, where: str, places: Places) -> Any:
    """Returns the value of the text, and fills `places` with "where:line" of every key."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        for number, (key_path, line) in enumerate(_key_lines(node, (), where)):
            if number >= _MAX_NODES:
                raise ConfigError(
                    f"{where}:{line}: more than {_MAX_NODES} values with all aliases written out; "
                    "write plain sections"
                )
            if key_path in places:
                name = ".".join(key_path)
                raise ConfigError(
                    f"{where}:{line}: {name}: written twice (first at {places[key_path]}); keep one"
                )
            places[key_path] = f"{where}:{line}"
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{where}:{mark.line + 1}" if mark else where
        reason = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{where}: not valid YAML: {reason}; correct the syntax") from None
    except RecursionError:
        raise ConfigError(
            f"{where}: nested too deeply, or an alias refers to itself; write plain sections"
        ) from None
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # the last four are what PyYAML's constructors raise on a value that contradicts its
        # explicit !!tag
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: not valid YAML: {reason}; correct the syntax") from None


def _key_lines(node: yaml.Node, path: KeyPath, file: str) -> Iterator[tuple[KeyPath, int]]:
    """Yields every key and list index below `node` with its line number."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{file}:{key.start_mark.line + 1}: a key is not plain text; write `key: value`"
                )
            yield (*path, key.value), key.start_mark.line + 1
            yield from _key_lines(value, (*path, key.value), file)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _key_lines(item, (*path, str(index)), file)
