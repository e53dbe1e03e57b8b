"""Shapes of public models, to plan a run (`--dry-run`) where the model itself is not at hand.

KNOWN is keyed by the name of the HF repository, which is also the usual name of its directory. The
values are those of the repository's config.json. A real run always reads the model itself.

KNOWN_WITH_IMAGES has models that transformers reads. It reads them from a directory, so their files
are written into a temporary one when a plan asks for them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pa_npu.families.spec import ModelSpec

_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 151645}
_QWEN3 = {
    **_QWEN2,
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
_LLAMA3 = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "eos_token_id": 128009}


def _sizes(
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
    }


_QWEN2_7B = _sizes(28, 3584, 18944, 28, 4, 152064, 131072)
_QWEN3_30B_A3B = _sizes(48, 2048, 6144, 32, 4, 151936, 40960) | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_BASE = {"eos_token_id": 151643}  # a model before instruction tuning ends at another token
_LONG = {"max_position_embeddings": 262144}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

_QWEN2_5: dict[str, dict[str, Any]] = {
    "0.5B": _sizes(24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "1.5B": _sizes(28, 1536, 8960, 12, 2, 151936, 131072, tied=True),
    "3B": _sizes(36, 2048, 11008, 16, 2, 151936, 32768, tied=True),
    "7B": _QWEN2_7B,
    "14B": _sizes(48, 5120, 13824, 40, 8, 152064, 131072) | {"rms_norm_eps": 1e-5},
    "32B": _sizes(64, 5120, 27648, 40, 8, 152064, 131072) | {"rms_norm_eps": 1e-5},
    "72B": _sizes(80, 8192, 29568, 64, 8, 152064, 131072) | {"rms_norm_eps": 1e-5},
}
_QWEN3_SIZES: dict[str, dict[str, Any]] = {
    "0.6B": _sizes(28, 1024, 3072, 16, 8, 151936, 40960, tied=True),
    "1.7B": _sizes(28, 2048, 6144, 16, 8, 151936, 40960, tied=True),
    "4B": _sizes(36, 2560, 9728, 32, 8, 151936, 40960, tied=True),
    "8B": _sizes(36, 4096, 12288, 32, 8, 151936, 40960),
    "14B": _sizes(40, 5120, 17408, 40, 8, 151936, 40960),
    "32B": _sizes(64, 5120, 25600, 64, 8, 151936, 40960),
    "30B-A3B": _QWEN3_30B_A3B,
}
_LLAMA3_SIZES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _sizes(32, 4096, 14336, 32, 8, 128256, 131072),
    "Llama-3.2-1B": _sizes(16, 2048, 8192, 32, 8, 128256, 131072, tied=True),
    "Llama-3.2-3B": _sizes(28, 3072, 8192, 24, 8, 128256, 131072, tied=True),
}

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen2-7B-Instruct": _QWEN2 | _QWEN2_7B | {"max_position_embeddings": 32768},
    "DeepSeek-R1-Distill-Qwen-7B": _QWEN2 | _QWEN2_7B | _BASE | {"rope_theta": 1e4},
    "Qwen3-30B-A3B-Instruct-2507": _QWEN3 | _QWEN3_30B_A3B | _LONG,
}
for _size, _shape in _QWEN2_5.items():
    KNOWN[f"Qwen2.5-{_size}"] = _QWEN2 | _shape | _BASE
    KNOWN[f"Qwen2.5-{_size}-Instruct"] = _QWEN2 | _shape | {"max_position_embeddings": 32768}
for _size, _shape in _QWEN3_SIZES.items():
    KNOWN[f"Qwen3-{_size}"] = _QWEN3 | _shape
    KNOWN[f"Qwen3-{_size}-Base"] = _QWEN3 | _shape | _BASE | {"max_position_embeddings": 32768}
    # what Qwen's model card says of contexts beyond 32,768 tokens, in a directory of that name
    KNOWN[f"Qwen3-{_size}-YaRN"] = _QWEN3 | _shape | {"rope_scaling": _YARN}
for _size, _shape in _LLAMA3_SIZES.items():
    KNOWN[_size] = KNOWN[f"{_size}-Instruct"] = _LLAMA3 | _shape


_MARKS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_QWEN2_5_VL_7B: dict[str, Any] = {
    **_QWEN2,
    **_QWEN2_7B,
    **_MARKS,
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
_QWEN3_VL_8B: dict[str, Any] = {
    **_MARKS,
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        **_QWEN3,
        **_QWEN3_SIZES["8B"],
        "model_type": "qwen3_vl_text",
        "max_position_embeddings": 262144,
        "rope_theta": 5e6,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
_QWEN2_5_VL_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
_QWEN3_VL_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

KNOWN_WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL-7B-Instruct": (_QWEN2_5_VL_7B, _QWEN2_5_VL_PROCESSOR),
    "Qwen3-VL-8B-Instruct": (_QWEN3_VL_8B, _QWEN3_VL_PROCESSOR),
}
"""By name, config.json and preprocessor_config.json; keys that they leave out have the values of
transformers.
"""
NAMES = (*KNOWN, *KNOWN_WITH_IMAGES)


@cache
def _spec_with_images(name: str) -> ModelSpec:
    config, processor = KNOWN_WITH_IMAGES[name]
    directory = Path(_written().name) / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return ModelSpec.read_by_transformers(str(directory), config["model_type"])


@cache
def _written() -> TemporaryDirectory[str]:
    """Returns the directory of written files, which ends with the process."""
    return TemporaryDirectory(prefix="pa_npu-known-")


def known_spec(path: str) -> ModelSpec | None:
    """Returns the shape of the public model that is named like the directory `path`, or None.

    Upper and lower case do not matter.
    """
    wanted = Path(path).name.lower()
    for name in KNOWN_WITH_IMAGES:
        if name.lower() == wanted:
            return _spec_with_images(name)
    for name, shape in KNOWN.items():
        if name.lower() == wanted:
            return ModelSpec.parse(path, shape)
    return None
