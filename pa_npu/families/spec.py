"""ModelSpec: the shape of a model, read from its config.json by its family, or by transformers.

A family is found by the model_type of config.json. A new one is a class beside these and an entry
in `_FAMILIES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pa_npu.config.schema import Config
from pa_npu.errors import DataError
from pa_npu.families.any_model import EXPERTS, PREFIX, AnyModel
from pa_npu.families.config_json import read_config_json
from pa_npu.families.decoders import DenseDecoder, Llama, Qwen2, Qwen3, Qwen3Moe
from pa_npu.families.shape import ModelShape
from pa_npu.vision.family import is_of_tower


@dataclass(frozen=True)
class ModelSpec(ModelShape):
    """The shape of a model of a supported family, which knows its family."""

    @classmethod
    def from_config(cls, config: Config) -> ModelSpec:
        """Returns the model of a run; with trainer.backend=fsdp it may be one without a family.

        Raises DataError.
        """
        path = config.model.path
        trusted = config.model.trust_remote_code
        if config.trainer.backend != "fsdp":
            return cls.read(path)
        raw = read_config_json(Path(path))
        try:
            has_family = not any(family_of(path, raw).unsupported(raw))
        except DataError:
            has_family = False
        except (ValueError, TypeError):  # `parse` names the bad value
            has_family = True
        if has_family:
            return cls.parse(path, raw)
        for reason in ANY_MODEL.refused(raw, trusted):
            raise DataError(f"model.path: {path}: {reason}")
        return cls.read_by_transformers(path, str(raw.get("model_type")), trusted)

    @classmethod
    def read_by_transformers(cls, path: str, model_type: str, trusted: bool = False) -> ModelSpec:
        """Returns a model without a family. trusted: model.trust_remote_code. Raises DataError."""
        return cls(
            path=path,
            family=f"{PREFIX}{model_type}",
            trust_remote_code=trusted,
            **ANY_MODEL.sizes_of(path, trusted),
        )

    @classmethod
    def read(cls, path: str) -> ModelSpec:
        """Returns the model of `path`/config.json.

        Raises DataError if it is missing, unreadable or of an unsupported architecture.
        """
        return cls.parse(path, read_config_json(Path(path)))

    @classmethod
    def parse(cls, path: str, raw: dict[str, Any]) -> ModelSpec:
        """Returns the model of a config.json's content; `path` names it in messages."""
        family = family_of(path, raw)
        try:
            for feature in family.unsupported(raw):
                raise DataError(
                    f"model.path: {path}: {feature} is not supported; use a model without it"
                )
            return cls(path=str(path), family=family.model_type, **family.sizes(raw))
        except KeyError as error:
            raise DataError(
                f"model.path: {path}/config.json has no {error.args[0]!r}; use a complete HF model "
                "directory"
            ) from None
        except (ValueError, TypeError) as error:
            raise DataError(
                f"model.path: {path}/config.json has a value that cannot be used ({error}); use an "
                "unmodified HF config"
            ) from None

    @property
    def definition(self) -> DenseDecoder:
        """The family: names of weights, work and memory for this shape."""
        return family_named(self.family)

    @property
    def is_any(self) -> bool:
        """Returns whether it has no family of its own, and is read by transformers."""
        return self.family.startswith(PREFIX)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters, tied weights counted once."""
        return self.definition.num_parameters(self)

    @cached_property
    def num_tower_parameters(self) -> int:
        """The number of parameters of the part that reads images; 0 for a model without."""
        if not self.is_any:
            return 0
        shapes = self.hf_tensors().items()
        return sum(math.prod(shape) for name, shape in shapes if is_of_tower(name))

    @cached_property
    def num_expert_parameters(self) -> int:
        """The number of experts' parameters; a token uses experts.per_token / experts.count."""
        experts = self.experts
        if experts is None:
            return 0
        return len(experts.layers) * experts.count * 3 * experts.ffn_size * self.hidden_size

    @cached_property
    def num_active_parameters(self) -> int:
        """The number of parameters that one token passes through."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.count - self.experts.per_token
        return self.num_parameters - self.num_expert_parameters * idle // self.experts.count

    def wire_sizes(self) -> dict[str, int]:
        """Returns the sizes that an engine compares with its model's, under config.json's names."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "tie_word_embeddings": int(self.tied),
        }
        if not self.is_any:
            sizes["intermediate_size"] = self.ffn_size
        if self.experts is not None:
            sizes["num_experts_per_tok"] = self.experts.per_token
            sizes["moe_intermediate_size"] = self.experts.ffn_size
        return sizes

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor in the model's HF checkpoint, by name."""
        family = self.definition
        if self.is_any:
            return ANY_MODEL.tensors(self)
        tensors = {weight.name: weight.shape for weight in family.outer_weights(self).values()}
        for layer in range(self.num_layers):
            prefix = family.layer_prefix(layer)
            for weight in family.layer_weights(self, layer).values():
                tensors |= {prefix + name: shape for name, shape in weight.tensors().items()}
        return tensors


_FAMILIES: dict[str, DenseDecoder] = {
    family.model_type: family for family in (Qwen2(), Qwen3(), Qwen3Moe(), Llama())
}
ANY_MODEL = AnyModel()


def register(family: DenseDecoder) -> None:
    """Adds a family from elsewhere. Raises ValueError if its model_type is taken."""
    if family.model_type in _FAMILIES:
        raise ValueError(
            f"family {family.model_type!r} is registered already; give yours another model_type"
        )
    _FAMILIES[family.model_type] = family


def family_named(model_type: str) -> DenseDecoder:
    """Returns the family of a ModelSpec, by its `family`.

    Raises KeyError for one that is not registered.
    """
    return ANY_MODEL if model_type.startswith(PREFIX) else _FAMILIES[model_type]


def family_of(path: str, raw: dict[str, Any]) -> DenseDecoder:
    """Returns the family of a config.json; `path` names the model in messages.

    Raises DataError for one that is not supported.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    architecture = f"architecture {model_type!r:.60}"
    if any(raw.get(key) for key in EXPERTS):
        architecture += ", a mixture of experts,"
    raise DataError(
        f"model.path: {path}: {architecture} is not supported; use a model of the families "
        f"{', '.join(_FAMILIES)}, or set trainer.backend=fsdp"
    )
