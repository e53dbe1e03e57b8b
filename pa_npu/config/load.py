"""Loads the configuration: YAML files in order, then `a.b=c` overrides, validated as a `Config`.

The override of a key that holds text is taken literally: `data.instruction=Answer after ####`.
There are two exceptions. `null` and `~` mean no value if the key may have none, and a text in YAML's
quotes is read as YAML, escapes included. Values of other keys are YAML: `3`, `true`, `[a, b]`.

A mistake becomes a ConfigError of one line: where it was written, the key, the value, the rule, the
remedy.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pa_npu.config.keys import (
    all_keys,
    choices_of,
    find_annotation,
    is_union,
    nearest_key,
    section_of,
    type_text,
)
from pa_npu.config.removed import removed
from pa_npu.config.schema import Config
from pa_npu.config.texts import leaves
from pa_npu.config.words import as_json, counted, nearest_name
from pa_npu.config.yaml_source import KeyPath, Places, dump_yaml, read_quoted, read_value, read_yaml
from pa_npu.errors import ConfigError

COMMAND_LINE = "command line"
_NO_VALUE = ("null", "~")


Rules = Callable[[Config], Iterable[str]]


def no_rules(config: Config) -> Iterable[str]:
    """Yields no broken rule: for a configuration that has been checked before, or whose algorithm
    does not matter.
    """
    return ()


def load_config(
    paths: Iterable[str],
    overrides: Sequence[str] = (),
    values: Mapping[KeyPath, Any] | None = None,
    rules: Rules = no_rules,
) -> Config:
    """Merges the YAML files (later ones win), applies the overrides, then `values`, and validates.

    Args:
        paths: YAML files.
        overrides: `section.key=value` as on the command line.
        values: Python values by the parts of their keys.
        rules: rules of rooms above this one, checked last; each yields lines that begin with a key.

    Raises ConfigError with one line.
    """
    tree, places = merged(paths, overrides)
    for path, value in (values or {}).items():
        _put(tree, places, path, value)
    return validated(tree, places, rules)


def merged(paths: Iterable[str], overrides: Sequence[str]) -> tuple[dict[str, Any], Places]:
    """Returns the merged tree, unchecked, and the place where each key was written."""
    tree: dict[str, Any] = {}
    places: Places = {}
    for path in paths:
        values, written_at = read_yaml(str(path))
        _merge(tree, values, places, written_at, ())
    for override in overrides:
        _apply_override(tree, places, override)
    return tree, places


def validated(tree: dict[str, Any], places: Places, rules: Rules = no_rules) -> Config:
    """Validates a merged tree. `rules` as in load_config.

    Raises ConfigError with one line that says where the value was written.
    """
    for key, value in leaves(tree, ""):
        if isinstance(value, str) and (remedy := removed(f"{key}={value}")):
            raise ConfigError(
                f"{_where(tuple(key.split('.')), places)}{key}={value}: removed in an earlier "
                f"release; {remedy}"
            )
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_first_line(error, places)) from None
    for broken in rules(config):
        raise ConfigError(_with_place(broken, places))
    return config


def dump_config(config: Config) -> str:
    """Returns the resolved tree as YAML, which `load_config` reads back to an equal Config."""
    return dump_yaml(config.model_dump(mode="json"))


def load_tree(tree: dict[str, Any], where: str) -> Config:
    """Validates a tree that another process dumped by `model_dump(mode="json")`.

    Raises ConfigError that begins with `where`.
    """
    try:
        return validated(tree, {})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _merge(
    tree: dict[str, Any], values: dict[str, Any], places: Places, written_at: Places, path: KeyPath
) -> None:
    for name, value in values.items():
        here = (*path, str(name))
        if value is None and section_of(find_annotation(here)) is not None:
            value = {}  # a section whose keys are all commented out
        old = tree.get(str(name))
        if isinstance(old, dict) and isinstance(value, dict):
            places[here] = written_at.get(here, places.get(here, ""))
            _merge(old, value, places, written_at, here)
            continue
        for known in [known for known in places if known[: len(here)] == here]:
            del places[known]
        tree[str(name)] = value
        places.update(
            {known: place for known, place in written_at.items() if known[: len(here)] == here}
        )


def _apply_override(tree: dict[str, Any], places: Places, override: str) -> None:
    name, sign, text = override.partition("=")
    if not name.isprintable() or any(not _is_allowed(character) for character in text):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r}: holds control characters; write plain text, or a YAML "
            "file"
        )
    path = tuple(name.strip().split("."))
    if not sign or not all(path):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r} is not of the form section.key=value; "
            f"{_remedy_for_word(override)}"
        )
    _put(
        tree,
        places,
        path,
        _value_of(find_annotation(path), text, f"{COMMAND_LINE}: {name.strip()}"),
    )


def _remedy_for_word(word: str) -> str:
    """Returns what to write in place of an override that holds no key with a value."""
    if word.endswith((".yaml", ".yml")):
        return f"a configuration file is --config {word}"
    return "write it so, without spaces around ="


def _is_allowed(character: str) -> bool:
    """True if an override's value may hold the character. Line ends and tabs are allowed; other
    control characters and lone surrogates are not.
    """
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")


def _value_of(annotation: Any, text: str, where: str) -> Any:
    """Returns the value that an override's text has for a key of this type.

    Raises ConfigError that begins with `where`.
    """
    members = {
        get_args(member)[0] if get_origin(member) is Annotated else member
        for member in _members(annotation)
    }
    is_text = str in members and not members & {int, float, bool}
    if not is_text:
        return read_value(text, where)
    if text.strip() in _NO_VALUE and type(None) in members:
        return None
    if (quoted := read_quoted(text)) is not None:
        return quoted
    has_structure = not members <= {str, type(None)}
    if has_structure and text.strip()[:1] + text.strip()[-1:] in ("[]", "{}"):
        return read_value(text, where)
    return text


def _put(tree: dict[str, Any], places: Places, path: KeyPath, value: Any) -> None:
    """Sets the value of a key, and creates the sections above it.

    Raises ConfigError if a value stands where a section is needed.
    """
    name = ".".join(path)
    node: Any = tree
    for depth, part in enumerate(path[:-1]):
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[_key_in(node, part, name)]
        if not isinstance(node, (dict, list)):
            prefix = ".".join(path[: depth + 1])
            raise ConfigError(
                f"{COMMAND_LINE}: {name}: {prefix} is a value, not a section; see --help for all "
                "keys"
            )
    node[_key_in(node, path[-1], name)] = value
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    places[path] = COMMAND_LINE


def _key_in(node: dict[str, Any] | list[Any], part: str, name: str) -> Any:
    """Returns the part of a dotted key as a section's key or as a list's index."""
    if isinstance(node, dict):
        return part
    if not (part.isascii() and part.isdigit()) or int(part) >= len(node):
        raise ConfigError(
            f"{COMMAND_LINE}: {name}: {part!r} is not an index below {len(node)}, the list's "
            "length; correct it"
        )
    return int(part)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if is_union(annotation) else (annotation,)


def _unknown_key(path: KeyPath, places: Places) -> str:
    if remedy := removed(".".join(path)):
        return f"{_where(path, places)}{'.'.join(path)}: removed in an earlier release; {remedy}"
    # the section around it, also where a text may stand instead of that
    siblings = next(filter(None, map(section_of, _members(find_annotation(path[:-1])))), None)
    nearest = nearest_key(path, list(siblings.model_fields) if siblings else [])
    remedy = (
        f"did you mean {nearest}?"
        if nearest
        else "see --help for all keys, docs/names.md for those of TRL and verl"
    )
    return f"{_where(path, places)}{'.'.join(path)}: unknown key; {remedy}"


def _first_line(error: ValidationError, places: Places) -> str:
    """Returns pydantic's first error as one line, with the number of further keys in error."""
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            path = (*_real_path(detail["loc"][:-1]), str(detail["loc"][-1]))
            below = detail["input"]
            # the whole name, which may be another system's
            while isinstance(below, dict) and len(below) == 1:
                (name,) = below
                path, below = (*path, str(name)), below[name]
            return _unknown_key(path, places)
    paths = [_real_path(detail["loc"]) for detail in details]
    # of the members of a union, the one that goes deepest into the value knows what is wrong with
    # it
    below = [number for number, path in enumerate(paths) if path[: len(paths[0])] == paths[0]]
    first = max(below, key=lambda number: len(paths[number]))
    # another member of a union complains about the value as a whole, which is the same mistake
    more = len({path for path in paths if paths[first][: len(path)] != path})
    line = _one_line(details[first], places)
    if more:
        line += f" (and {counted(more, 'more error')})"
    return line


_BOUNDS = {
    "greater_than": ">",
    "greater_than_equal": ">=",
    "less_than": "<",
    "less_than_equal": "<=",
}
"""Signs of the bounds of a number, by pydantic's type of the error."""


def _one_line(detail: ErrorDetails, places: Places) -> str:
    path = _real_path(detail["loc"])
    kind = detail["type"]
    if kind == "value_error" and not path:  # a rule between keys: the message begins with the key
        return _with_place(detail["msg"].removeprefix("Value error, "), places)
    types = {key.name: key.type for key in all_keys()}
    name = ".".join(path)
    where = _where(path, places)
    shown = as_json(detail["input"])
    if kind == "missing":
        required = [key.name for key in all_keys() if key.required and ".NAME." not in key.name]
        below = [leaf for leaf in required if f"{leaf}.".startswith(f"{name}.")]
        leaf = below[0] if below else name
        return (
            f"{where}{leaf}: required, but not given; write it in the YAML file or as {leaf}=VALUE"
        )
    if kind in _BOUNDS and name in types:
        return f"{where}{name}: {shown} is out of range; use {types[name]}"
    if kind in ("model_type", "model_attributes_type"):
        keys = type_text(find_annotation(path))
        return f"{where}{name}: {shown} is not a section; write its keys below it: {keys}"
    if kind in _BOUNDS:  # inside a list or a table, whose entries are no keys of their own
        sign = _BOUNDS[kind]
        (bound,) = (value for value in detail["ctx"].values())
        return f"{where}{name}: {shown} is out of range; use a number {sign} {bound:g}"
    annotation = find_annotation(path)
    allowed = types.get(name) or (type_text(annotation) if annotation is not None else None)
    if allowed is None:
        return (
            f"{where}{name}: {shown} is not allowed: {detail['msg']}; see --help for the key's "
            "values"
        )
    nearest = nearest_name(str(detail["input"]), choices_of(annotation))
    meant = f"did you mean {nearest}? Allowed is" if nearest else "use"
    return f"{where}{name}: {shown} is not allowed; {meant} {allowed}"


def _with_place(message: str, places: Places) -> str:
    """Puts the place where a key was written before a rule's message, which begins with the key."""
    return _where(tuple(message.partition(":")[0].split(".")), places) + message


def _real_path(loc: tuple[int | str, ...]) -> KeyPath:
    """Removes the tags of union members from a location of pydantic's."""
    path: KeyPath = ()
    for part in loc:
        if find_annotation((*path, str(part))) is not None:
            path = (*path, str(part))
        elif not is_union(find_annotation(path)):
            break
    return path


def _where(path: KeyPath, places: Places) -> str:
    """Returns "file:line: " of the key, or of a section around it or a key below it; "" for
    defaults.
    """
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return f"{places[path[:length]]}: "
    below = [place for written, place in places.items() if path and written[: len(path)] == path]
    return f"{below[0]}: " if below else ""
