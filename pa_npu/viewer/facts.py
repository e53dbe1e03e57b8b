"""A run in a few words, from its configuration: model, algorithm, data, devices, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from pa_npu.config.words import counted

MAX_CHARACTERS = 120


def facts(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts by name, empty where the configuration does not have one.

    config: values by dotted key, without secrets, of any version of this program.
    """
    return {
        "model": _name_of(config.get("model.path")),
        "algorithm": _algorithm(config),
        "data": _name_of(config.get("data.train")),
        "devices": _devices(config),
        "schedule": _schedule(config),
    }


def _name_of(path: Any) -> str:
    """Returns the last two parts of a path, enough to recognise a model or a file of a data set."""
    if isinstance(path, list):
        names = [_name_of(part) for part in path]
        return _short(", ".join(name for name in names if name))
    if not isinstance(path, str):
        return ""
    return _short("/".join(PurePath(path).parts[-2:]))


def _algorithm(config: Mapping[str, Any]) -> str:
    name = config.get("algorithm.name")
    if isinstance(name, str):
        return _short(name)
    words = []
    advantage = config.get("algorithm.advantage")
    if isinstance(advantage, str):
        words.append(f"{advantage} advantages")
    loss = config.get("algorithm.loss")
    if isinstance(loss, str):
        words.append(f"{loss} loss")
    return _short(", ".join(words))


def _devices(config: Mapping[str, Any]) -> str:
    parts = []
    trainers = config.get("trainer.devices")
    if isinstance(trainers, int):
        parts.append(counted(trainers, "trainer"))
    engines = config.get("rollout.engines")
    if isinstance(engines, int) and engines:
        parts.append(counted(engines, "engine"))
    words = " + ".join(parts)
    if config.get("placement.colocate") is True:
        words += " on the same devices"
    kind = config.get("run.device")
    if isinstance(kind, str) and words:
        words += f" ({kind})"
    return _short(words)


def _schedule(config: Mapping[str, Any]) -> str:
    if config.get("rollout.engines") == 0:
        return "rows of data"
    stream = config.get("schedule.stream")
    if stream is False:
        return "in turns"
    staleness = config.get("schedule.max_staleness")
    if isinstance(staleness, int) and staleness > 0:
        return f"up to {counted(staleness, 'version')} behind"
    return "periodic" if stream is True else ""


def _short(words: str) -> str:
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"
