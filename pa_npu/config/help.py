"""Every key with its meaning, type and default, grouped by section: the text of --help."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pa_npu.config.keys import all_keys, section_of
from pa_npu.config.presets import PRESETS, PresetName
from pa_npu.config.schema import Config
from pa_npu.config.sections import Section
from pa_npu.config.sections.inputs import TrainingDataset
from pa_npu.config.sections.rollout import EngineSettings, RewardFunction

ENTRIES: dict[str, type[Section]] = {
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
            default = "required" if key.required else f"default {show(key.default)}"
            lines += [f"  {key.name}  ({key.type}; {default})", f"      {key.description}"]
            if entry := ENTRIES.get(key.name):
                lines += [f"        {inner.name}: {inner.description} ({inner.type})" for inner in all_keys(entry)]
            if key.name == "algorithm.name":
                lines += [line for name in PRESETS for line in preset_lines(name)]
    return "\n".join(lines[1:])


def preset_lines(name: PresetName) -> tuple[str, str]:
    """A preset with its source, and the keys that it fills."""
    preset = PRESETS[name]
    values = " ".join(f"{key}={show(value)}" for key, value in preset.keys().items())
    return f"        {name}: {preset.source}", f"          {values}"


def show(value: Any) -> str:
    """A default as it would be written in YAML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value if item is not None) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)
