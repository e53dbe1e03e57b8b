"""Lists all keys with types, defaults and bounds; suggests the nearest key; writes --help."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pa_npu.config.foreign_names import FOREIGN
from pa_npu.config.presets import PRESETS, PresetName
from pa_npu.config.schema import Config
from pa_npu.config.sections import Section
from pa_npu.config.sections.inputs import DemonstrationDataset, TrainingDataset
from pa_npu.config.sections.reward import RewardFunction
from pa_npu.config.sections.rollout import EngineSettings


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration. `name` is dotted; `type` is readable, e.g. "int >= 1"."""

    name: str
    type: str
    default: Any
    required: bool
    description: str


def section_of(annotation: Any) -> type[Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def entry_of(annotation: Any) -> type[Section] | None:
    """Returns the section that a dictionary has under names of the user's, or None."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def all_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Yields every leaf key in the order of the schema. A list of sections is one leaf; a name of
    the user's is NAME.
    """
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if (entry := entry_of(field.annotation)) is not None:
            yield from all_keys(entry, f"{prefix}{name}.NAME.")
            continue
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")
            continue
        required = field.is_required()
        default = None if required else field.get_default(call_default_factory=True)
        description = " ".join((field.description or "").split())
        yield Key(f"{prefix}{name}", _type_text(field), default, required, description)


def find_annotation(path: tuple[str, ...]) -> Any:
    """Returns the type annotation at a dotted path, through dictionaries, lists and unions, or None
    if the path leads nowhere.
    """
    annotation: Any = Config
    for part in path:
        annotation = _below(annotation, part)
        if annotation is None:
            return None
    return annotation


def _below(annotation: Any, part: str) -> Any:
    section = section_of(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if section is not None:
        return section.model_fields[part].annotation if part in section.model_fields else None
    if origin is dict:
        return arguments[1]
    if origin is tuple:
        return arguments[0] if part.isascii() and part.isdigit() else None
    if origin is Annotated:
        return _below(arguments[0], part)
    if is_union(annotation):  # a section, or a list of sections, beside a text or nothing
        for member in arguments:
            below = _below(member, part)
            if section_of(member) or section_of(below):
                return below
    return None


def nearest_key(path: tuple[str, ...], siblings: list[str]) -> str | None:
    """Returns the key that `path` was probably meant to be, or None.

    Candidates are, in this order: the key that another system calls so, a similar key of the same
    section, a similar key of another section.
    """
    if ours := FOREIGN.get(".".join(path)):
        return ours
    *parents, last = path
    if alike := difflib.get_close_matches(last, siblings, n=1, cutoff=0.7):
        return ".".join([*parents, alike[0]])
    for first in range(1, len(path)):
        if ours := FOREIGN.get(".".join(path[first:])):
            return ours
    by_last: dict[str, str] = {}
    for key in all_keys():
        by_last.setdefault(key.name.rpartition(".")[2], key.name)
    elsewhere = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)
    return by_last[elsewhere[0]] if elsewhere else None


def _type_text(field: FieldInfo) -> str:
    return " ".join([type_text(field.annotation), _bounds(field.metadata)]).strip()


def _bounds(marks: Iterable[Any]) -> str:
    bounds = []
    for mark in marks:
        for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            limit = getattr(mark, attribute, None)
            if limit is not None:
                bounds.append(f"{sign} {limit:g}" if limit < 2**31 else f"{sign} 2^31")
    return ", ".join(bounds)


def choices_of(annotation: Any) -> list[str]:
    """Returns the texts that a type lists as allowed values, also those inside a union."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    if is_union(annotation):
        return [choice for member in get_args(annotation) for choice in choices_of(member)]
    return []


def type_text(annotation: Any) -> str:
    """Returns a type as readers see it, such as "int >= 1" or "auto | null"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if is_union(annotation):
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is Annotated:
        marks = [mark for info in arguments[1:] for mark in getattr(info, "metadata", ())]
        return " ".join([type_text(arguments[0]), _bounds(marks)]).strip()
    if origin is tuple:
        return f"[{type_text(arguments[0])}, ...]"
    if origin is dict:
        return f"{{{type_text(arguments[0])}: {type_text(arguments[1])}}}"
    section = section_of(annotation)
    if section is not None:
        return "{" + ", ".join(section.model_fields) + "}"
    return {"str": "text", "bool": "true | false", "float": "number"}.get(
        annotation.__name__, annotation.__name__
    )


ENTRIES: dict[str, type[Section]] = {
    "rollout.engine_settings": EngineSettings,
    "reward.functions": RewardFunction,
    "data.train": TrainingDataset,
    "data.demonstrations": DemonstrationDataset,
}
"""Sections that are entries of a key's list."""


def sections_help() -> str:
    """Returns a line per section: its name, the number of its keys, and the first five."""
    lines = []
    for section, field in Config.model_fields.items():
        model = section_of(field.annotation)
        if (entry := entry_of(field.annotation)) is not None:
            keys = [f"NAME.{key.name}" for key in all_keys(entry)]
            lines.append(f"  {section:<12} {len(keys):>3} keys: {', '.join(keys)}")
        if model is None:
            continue
        names = [key.name.removeprefix(f"{section}.") for key in all_keys(model, f"{section}.")]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        lines.append(f"  {section:<12} {len(names):>3} keys: {shown}")
    return "\n".join(lines)


def keys_help(only: str | None = None) -> str:
    """Returns the help text of all keys, or of one section or key (`only`): a line with name, type
    and default, a line with the description, and the fields of list entries below their key.
    """
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        model, prefix = section_of(field.annotation), f"{section}."
        if (entry := entry_of(field.annotation)) is not None:
            model, prefix = entry, f"{section}.NAME."
        if model is None or (only is not None and only.partition(".")[0] != section):
            continue
        lines += ["", f"{section}:"]
        for key in all_keys(model, prefix):
            if only is None or f"{key.name}.".startswith(f"{only}."):
                lines += _key_lines(key)
    return "\n".join(lines[1:])


def _key_lines(key: Key) -> list[str]:
    default = "required" if key.required else f"default {show(key.default)}"
    lines = [f"  {key.name}  ({key.type}; {default})", f"      {key.description}"]
    if entry := ENTRIES.get(key.name):
        lines += [
            f"        {inner.name}: {inner.description} ({inner.type})" for inner in all_keys(entry)
        ]
    if key.name == "algorithm.name":
        lines += [line for name in PRESETS for line in preset_lines(name)]
    return lines


def nearest_help(name: str) -> str | None:
    """Returns the section or key whose help was probably meant by `name`, or None."""
    path = tuple(name.split("."))
    section = section_of(find_annotation(path[:-1]))
    nearest = nearest_key(path, list(section.model_fields) if section else [])
    if nearest is None and len(path) > 1:
        return nearest_help(path[0])
    return nearest


def preset_lines(name: PresetName) -> tuple[str, str]:
    """Returns a preset's name and source, and the keys that it fills, as two lines."""
    preset = PRESETS[name]
    values = " ".join(f"{key}={show(value)}" for key, value in preset.keys().items())
    return f"        {name}: {preset.source}", f"          {values}"


def show(value: Any) -> str:
    """Returns a default as it would be written in YAML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return (
            "{"
            + ", ".join(f"{name}: {show(item)}" for name, item in value if item is not None)
            + "}"
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)
