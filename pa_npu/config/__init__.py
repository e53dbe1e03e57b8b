"""The typed configuration tree: YAML files and overrides in, one validated `Config` out.

The names are loaded on first use, because the engines' own environment may lack pydantic and yaml while it imports
other parts of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pa_npu.config.load import dump_config as dump_config
    from pa_npu.config.load import load_config as load_config
    from pa_npu.config.schema import Config as Config

_HOMES = {
    "Config": "pa_npu.config.schema",
    "dump_config": "pa_npu.config.load",
    "load_config": "pa_npu.config.load",
}

__all__ = ["Config", "dump_config", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
