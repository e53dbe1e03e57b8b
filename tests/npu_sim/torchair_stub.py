"""A stand-in for torchair, whose native part needs CANN's graph engine.

MindSpeed imports it for decorators and annotations.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock


def install() -> None:
    """Put it in the place of torchair; before MindSpeed is imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchair"]:
        del sys.modules[name]
    torchair, ge = _package("torchair"), _package("torchair.ge")
    torchair.ge = ge
    torchair.register_fx_node_ge_converter = _register
    ge.Tensor, ge.TensorSpec = type("Tensor", (), {}), type("TensorSpec", (), {})
    ge.DataType, ge.custom_op = MagicMock(), MagicMock()


def _package(name: str) -> Any:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


def _register(operator: Any) -> Callable[[Any], Any]:
    return lambda converter: converter
