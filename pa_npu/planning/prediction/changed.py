"""A configuration with some keys changed, where the rules between keys allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.model_rules import check_model


def changed(config: Config, changes: Mapping[str, Mapping[str, Any]], spec: ModelSpec | None = None) -> Config | None:
    """The configuration with `changes`, by section and key; None where the rules between keys, or those of the model, forbid it."""
    tree = config.model_dump(exclude_unset=True)
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    try:
        found = Config.model_validate(tree)
        if spec is not None:
            check_model(found, spec)
    except (ValidationError, ConfigError):
        return None
    return found
