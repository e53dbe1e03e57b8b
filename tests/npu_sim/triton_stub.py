"""A stand-in for triton-ascend, which needs CANN.

MindSpeed for core 0.15 and later imports it for kernels not used here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Stub(ModuleType):
    """Any attribute is a mock, which refuses nothing; what decorates kernels leaves them as they
    are.
    """

    __path__: ClassVar[list[str]] = []
    __version__ = "3.2.0"  # that of triton-ascend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("runtime", "driver"):
            return importlib.import_module(f"{self.__name__}.{name}")
        return _KNOWN.get(name) or MagicMock(name=name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Installs the stub if there is no triton: before MindSpeed is imported, after those parts of
    torch that look for it.
    """
    import torch._inductor.compile_fx  # noqa: F401 - imported for its effect

    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(_Finder())


def _jit(kernel: Any = None, **_: Any) -> Any:
    return kernel if kernel is not None else lambda decorated: decorated


def _decorator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


_DRIVER = MagicMock(name="driver")
_DRIVER.get_current_target.return_value.backend = "npu"
_KNOWN = {"jit": _jit, "autotune": _decorator, "heuristics": _decorator, "active": _DRIVER}
