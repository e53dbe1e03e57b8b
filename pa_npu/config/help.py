"""Every key with its meaning, type and default, grouped by section: as the text of --help and as the reference of the site."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from pa_npu.config.keys import Key, all_keys, section_of
from pa_npu.config.presets import PRESETS, PresetName
from pa_npu.config.schema import Config
from pa_npu.config.sections import EngineSettings, RewardFunction, Section, TrainingDataset

_ENTRIES: dict[str, type[Section]] = {
    "rollout.engine_settings": EngineSettings,
    "reward.functions": RewardFunction,
    "data.train": TrainingDataset,
}
"""Sections that are entries of a key's list."""


def keys_help() -> str:
    """All sections and keys, one key per two lines, and the fields of list entries below their key."""
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        model = section_of(field.annotation)
        if model is None:
            continue
        lines += ["", f"{section}:"]
        for key in all_keys(model, f"{section}."):
            default = "required" if key.required else f"default {_show(key.default)}"
            lines += [f"  {key.name}  ({key.type}; {default})", f"      {key.description}"]
            if entry := _ENTRIES.get(key.name):
                lines += [f"        {inner.name}: {inner.description} ({inner.type})" for inner in all_keys(entry)]
            if key.name == "algorithm.name":
                lines += [line for name in PRESETS for line in _preset_lines(name)]
    return "\n".join(lines[1:])


def keys_markdown() -> str:
    """The same as markdown: a table per section."""
    lines: list[str] = []
    for section, field in Config.model_fields.items():
        model = section_of(field.annotation)
        if model is None:
            continue
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key in all_keys(model, f"{section}."):
            lines.append(_row(key))
            if entry := _ENTRIES.get(key.name):
                lines += [_row(replace(inner, name=f"{key.name}[].{inner.name}")) for inner in all_keys(entry)]
        if section == "algorithm":
            lines += ["", "Presets, `algorithm.name`, and the keys that they fill where you do not:", ""]
            for name in PRESETS:
                source, values = (line.strip() for line in _preset_lines(name))
                lines.append(f"- `{source.partition(':')[0]}`{source[len(name) :]}: `{values}`")
    return "\n".join(lines[1:])


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{_show(key.default)}`"
    cells = (f"`{key.name}`", key.type, default, key.description)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") for cell in cells) + " |"


def _preset_lines(name: PresetName) -> tuple[str, str]:
    preset = PRESETS[name]
    values = " ".join(f"{key}={_show(value)}" for key, value in preset.keys().items())
    return f"        {name}: {preset.source}", f"          {values}"


def _show(value: Any) -> str:
    """A default as it would be written in YAML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{name}: {_show(item)}" for name, item in value if item is not None) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_show(item)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)
