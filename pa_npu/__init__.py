"""pa_npu: periodic-asynchronous reinforcement-learning post-training for language models.

    from pa_npu import Config, Run, load_config

are loaded on first use, because engines' processes import this package too, and have neither
pydantic nor time for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pa_npu.algorithm.rules import load_config as load_config
    from pa_npu.api import Run as Run
    from pa_npu.api import RunFailed as RunFailed
    from pa_npu.config.schema import Config as Config

__version__ = "0.2.0"
__all__ = ["Config", "Run", "RunFailed", "__version__", "load_config"]

_HOMES = {
    "Config": "pa_npu.config.schema",
    "Run": "pa_npu.api",
    "RunFailed": "pa_npu.api",
    "load_config": "pa_npu.algorithm.rules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
