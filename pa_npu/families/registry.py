"""The model families by the model_type of their config.json. A new family is a file beside these and an entry in `_FAMILIES`."""

from __future__ import annotations

from typing import Any

from pa_npu.errors import DataError
from pa_npu.families.any_model import PREFIX, AnyModel
from pa_npu.families.dense import DenseDecoder
from pa_npu.families.llama import Llama
from pa_npu.families.qwen2 import Qwen2
from pa_npu.families.qwen3 import Qwen3
from pa_npu.families.qwen3_moe import Qwen3Moe

_FAMILIES: dict[str, DenseDecoder] = {family.model_type: family for family in (Qwen2(), Qwen3(), Qwen3Moe(), Llama())}
ANY_MODEL = AnyModel()

# What config.json calls the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def register(family: DenseDecoder) -> None:
    """Add a family from elsewhere. Raises ValueError when its model_type is taken."""
    if family.model_type in _FAMILIES:
        raise ValueError(f"family {family.model_type!r} is registered already; give yours another model_type")
    _FAMILIES[family.model_type] = family


def family_named(model_type: str) -> DenseDecoder:
    """The family of a ModelSpec, by its `family`. Raises KeyError for one that is not registered."""
    return ANY_MODEL if model_type.startswith(PREFIX) else _FAMILIES[model_type]


def family_of(path: str, raw: dict[str, Any]) -> DenseDecoder:
    """The family of a config.json; `path` names the model in messages. Raises DataError for one that is not supported."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    what = f"architecture {model_type!r:.60}"
    if any(raw.get(key) for key in _EXPERTS):
        what += ", a mixture of experts,"
    raise DataError(
        f"model.path: {path}: {what} is not supported; use a model of the families {', '.join(_FAMILIES)}, or set "
        f"trainer.backend=fsdp"
    )
