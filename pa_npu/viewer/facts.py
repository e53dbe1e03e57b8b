"""What a run is, in a few words of its configuration: model, algorithm, data, devices.

For headers and tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

LONGEST = 120


def facts(config: Mapping[str, Any]) -> dict[str, str]:
    """By name; empty where the configuration does not say it. config: flat keys without secrets, of
    any version.
    """
    return {
        "model": _name_of(config.get("model.path")),
        "algorithm": _algorithm(config),
        "data": _name_of(config.get("data.train")),
        "devices": _devices(config),
        "schedule": _schedule(config),
    }


def _name_of(path: Any) -> str:
    """The last two parts of a path, which tell a model of a family or a file of a data set."""
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
    loss, advantage = config.get("algorithm.loss"), config.get("algorithm.advantage")
    words = []
    if isinstance(advantage, str):
        words.append(f"{advantage} advantages")
    if isinstance(loss, str):
        words.append(f"{loss} loss")
    return _short(", ".join(words))


def _devices(config: Mapping[str, Any]) -> str:
    trainers, engines = config.get("trainer.devices"), config.get("rollout.engines")
    kind = config.get("run.device")
    parts = []
    if isinstance(trainers, int):
        parts.append(f"{trainers} trainer{'' if trainers == 1 else 's'}")
    if isinstance(engines, int) and engines:
        parts.append(f"{engines} engine{'' if engines == 1 else 's'}")
    words = " + ".join(parts)
    if config.get("placement.colocate") is True:
        words += " on the same devices"
    if isinstance(kind, str) and words:
        words += f" ({kind})"
    return _short(words)


def _schedule(config: Mapping[str, Any]) -> str:
    stream, staleness = config.get("schedule.stream"), config.get("schedule.max_staleness")
    if config.get("rollout.engines") == 0:
        return "rows of data"
    if stream is False:
        return "in turns"
    if isinstance(staleness, int) and staleness > 0:
        return f"up to {staleness} version{'' if staleness == 1 else 's'} behind"
    return "periodic" if stream is True else ""


def _short(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"
