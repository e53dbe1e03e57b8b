"""The small model of a trial: a model's real configuration with few layers, small inner sizes and random weights."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch

from pa_npu.backends.fsdp.model import without_dropout
from pa_npu.backends.fsdp.trial_sequences import GROUPS, IMAGE_TOKEN, VOCABULARY
from pa_npu.families.any_model import ACTIVE, EXPERTS, auto_class, config_of
from pa_npu.families.spec import ModelSpec
from pa_npu.vision.family import FAMILIES

_LAYERS = 2
_INNER = 128
_EXPERTS = 8
# Sizes that no attention depends on.
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Through all layers together a window reaches back this many times the longest prompt, so that
# whatever precedes a response is seen.
_REACH = 1.4


def few_layers(spec: ModelSpec, longest: int) -> Any:
    """Returns the model with few layers and random weights, by transformers' plainest attention.
    Windows that the run exceeds are exceeded by the trial's sequences too.
    """
    config = deepcopy(config_of(spec.path, spec.trust_remote_code))
    without_dropout(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    kept_layers = (
        sorted({kinds.index(kind) for kind in kinds} | {0, 1}) if kinds else range(_LAYERS)
    )
    layers = min(len(kept_layers), text.num_hidden_layers)
    _shrink(config, layers, longest)
    if text is not config:
        _shrink(text, layers, longest)
    if getattr(config, "model_type", None) in FAMILIES:
        _shrink_tower(config)
    text.vocab_size = VOCABULARY
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = [kinds[index] for index in kept_layers][: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class(config).from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=spec.trust_remote_code,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def _shrink(config: Any, layers: int, longest: int) -> None:
    """Makes inner sizes, numbers of experts and windows of transformers' configuration as small as
    a trial with so many layers needs them.
    """
    num_experts = _few_experts(config)
    max_sizes = dict.fromkeys(_INNER_SIZES, _INNER) | dict.fromkeys(EXPERTS, num_experts)
    for name, max_size in max_sizes.items():
        value = getattr(config, name, None)
        if isinstance(value, int):
            setattr(config, name, min(value, max_size))
    for name in _WINDOWS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < longest:
            setattr(config, name, _window(layers))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _shrink_tower(config: Any) -> None:
    """Leaves two blocks of a tower, the first of which attends in windows if any does, and gives
    placeholders ids inside the small vocabulary.
    """
    vision = config.vision_config
    vision.depth = 2
    vision.intermediate_size = min(vision.intermediate_size, _INNER)
    if hasattr(vision, "fullatt_block_indexes"):
        vision.fullatt_block_indexes = [1]
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = [0]
    config.image_token_id = IMAGE_TOKEN
    config.video_token_id = IMAGE_TOKEN + 1
    config.vision_start_token_id = IMAGE_TOKEN + 2
    config.vision_end_token_id = IMAGE_TOKEN + 3


def _window(layers: int) -> int:
    """Returns the tokens of a window that the trial's sequences exceed, and through which a response
    still sees all of its prompt by way of the layers.

    Each layer reaches window - 1 tokens further back. A model whose layers all have windows sees
    nothing else.
    """
    longest = max(prompt for prompt, _ in GROUPS)
    return math.ceil(_REACH * longest / layers) + 1


def _few_experts(config: Any) -> int:
    """Returns a number of experts that is enough for the experts of one token, in groups of two or
    more: routers add the two largest scores of each group.
    """
    active = 1
    for name in ACTIVE:
        number = getattr(config, name, None)
        if isinstance(number, int):
            active = number
            break
    groups = getattr(config, "n_group", None) or 1
    chosen_groups = getattr(config, "topk_group", None) or groups
    return groups * max(2, -(-active // chosen_groups), -(-_EXPERTS // groups))
