"""The family of any causal language model of transformers, for trainer.backend=fsdp.

Its shape is as transformers reads it; its weights are those of an instance without memory. That is
all that planning and the backend need. transformers is imported when the first model is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pa_npu.errors import DataError
from pa_npu.families.config_json import mapping, token_ids
from pa_npu.families.decoders import DenseDecoder
from pa_npu.families.shape import ModelShape, Rope
from pa_npu.vision.family import FAMILIES

PREFIX = "transformers "
# Keys of transformers' configurations for the experts, and for those that a token passes through.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k")


@dataclass(frozen=True)
class _Instance:
    """A model without memory for its weights.

    tensors: of the checkpoint, by name.
    linear: [outputs, inputs] of linear layers outside of the head, by name.
    fuses_experts: whether a layer's experts are one tensor.
    computed: parameters of the layers that a token passes through.
    """

    tensors: dict[str, tuple[int, ...]]
    linear: dict[str, tuple[int, ...]]
    fuses_experts: bool
    num_parameters: int
    computed: float


class AnyModel(DenseDecoder):
    """The family of models without a file of their own."""

    def refused(self, raw: dict[str, Any], trust_remote_code: bool) -> Iterator[str]:
        """Yields the reasons why a model cannot be trained, each with its remedy."""
        if mapping(raw, "auto_map") and not trust_remote_code:
            yield (
                "it brings code of its own (auto_map); read that code and set "
                "model.trust_remote_code=true, or use another model"
            )
        if mapping(raw, "quantization_config"):
            yield "quantised weights (quantization_config) cannot be trained; use the model in bf16"
        if raw.get("is_encoder_decoder"):
            yield "an encoder-decoder is no causal language model; use a decoder"
        for name in raw.get("architectures") or ():
            if not str(name).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
                yield (
                    f"architecture {name!s:.60} is no causal language model; use one with a "
                    "language model's head"
                )

    def sizes_of(self, path: str, trust_remote_code: bool) -> dict[str, Any]:
        """Returns ModelSpec's fields.

        ffn_size is that of a gated layer with the work of this model's layers.
        """
        config = config_of(path, trust_remote_code)
        text = config.get_text_config()
        if getattr(text, "is_decoder", None) is False:
            raise DataError(
                f"model.path: {path}: {text.model_type} reads both ways, no causal language model; "
                "use a decoder"
            )
        hidden = text.hidden_size
        layers = text.num_hidden_layers
        heads = text.num_attention_heads
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        }
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise DataError(
                    f"model.path: {path}/config.json: {name}: {size!r:.40} is not a count; use an "
                    "unmodified config"
                )
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        computed = _instance(path, trust_remote_code).computed / layers
        eos = getattr(text, "eos_token_id", None)
        return {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_size": max(1, round((computed - attention) / (3 * hidden))),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": text.vocab_size,
            "rope": Rope(),
            "norm_eps": 0.0,
            "qkv_bias": False,
            "qk_norm": False,
            "tied": bool(config.tie_word_embeddings),
            "max_positions": getattr(text, "max_position_embeddings", None) or 2**31 - 1,
            "eos_token_ids": token_ids({"eos_token_id": eos}, "eos_token_id"),
        }

    def tensors(self, spec: ModelShape) -> dict[str, tuple[int, ...]]:
        return _instance(spec.path, spec.trust_remote_code).tensors

    def linear_layers(self, spec: ModelShape) -> dict[str, tuple[int, ...]]:
        return _instance(spec.path, spec.trust_remote_code).linear

    def fuses_experts(self, spec: ModelShape) -> bool:
        return _instance(spec.path, spec.trust_remote_code).fuses_experts

    def num_parameters(self, spec: ModelShape) -> int:
        return _instance(spec.path, spec.trust_remote_code).num_parameters


def config_of(path: str, trust_remote_code: bool) -> Any:
    """Returns transformers' configuration of a model directory. Raises DataError if it has none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of anybody's code, and of validators of all kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"model.path: {path}: transformers cannot read its config.json ({reason}); use a model "
            "that it knows"
        ) from None


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that makes the language model of a configuration.

    Models that read images have one of their own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_images = getattr(config, "model_type", None) in FAMILIES
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def bare_model(config: Any, trust_remote_code: bool) -> Any:
    """Returns the model of a configuration without memory for its weights.

    Raises DataError if it is no causal language model.
    """
    import torch

    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"model.path: {config._name_or_path}: transformers cannot make a causal language model "
            f"of it ({reason}); use one"
        ) from None


@cache
def _instance(path: str, trust_remote_code: bool) -> _Instance:
    import torch

    from pa_npu.families.wire_names import wire_weights

    config = config_of(path, trust_remote_code)
    text = config.get_text_config()
    model = bare_model(config, trust_remote_code)
    experts = _first_value(text, EXPERTS)
    active = _first_value(text, ACTIVE)
    inside = {f".{name}": tensor.shape for name, tensor in decoder_layers(model).named_parameters()}
    computed = 0.0
    for name, size in inside.items():
        share = active / experts if ".experts." in name else 1.0
        computed += size.numel() * share

    outside = model.get_output_embeddings()
    linear = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not outside
    }
    return _Instance(
        tensors={name: weight.shape for name, weight in wire_weights(model).items()},
        linear=linear,
        fuses_experts=experts > 1
        and any(len(size) == 3 and size[0] == experts for size in inside.values()),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        computed=computed,
    )


def _first_value(config: Any, keys: Iterable[str]) -> int:
    """Returns the first value under one of these keys that is not empty; 1 if there is none."""
    for key in keys:
        if value := getattr(config, key, None):
            return int(value)
    return 1


def decoder_layers(model: Any) -> Any:
    """Returns the list of the decoder's layers. Raises DataError for a model without one."""
    import torch

    number = model.config.get_text_config().num_hidden_layers
    # a tower may have as many
    decoder = getattr(model.base_model, "language_model", model.base_model)
    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == number:
            return module
    raise DataError(
        f"model.path: {model.config._name_or_path}: {type(model).__name__} has no list of {number} "
        "layers; use a decoder that has"
    )
