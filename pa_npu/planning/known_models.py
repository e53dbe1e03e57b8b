"""Shapes of some public models, so that a run can be planned (`--dry-run`) on a machine that does not have the model.

Keyed by the name of the HF repository, which is also the usual name of its directory. Values are those of the
repository's config.json. A real run always reads the model itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pa_npu.families.spec import ModelSpec

_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 151645}
_QWEN3 = {**_QWEN2, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, positions: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }


_QWEN2_7B = _sizes(28, 3584, 18944, 28, 4, 152064, 131072)
_QWEN2_32B = _sizes(64, 5120, 27648, 40, 8, 152064, 131072)
_QWEN3_8B = _sizes(36, 4096, 12288, 32, 8, 151936, 40960)

_QWEN3_30B_A3B = _sizes(48, 2048, 6144, 32, 4, 151936, 40960) | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": _QWEN2 | _QWEN2_7B | {"eos_token_id": 151643},
    "Qwen2.5-7B-Instruct": _QWEN2 | _QWEN2_7B | {"max_position_embeddings": 32768},
    "Qwen2.5-32B": _QWEN2 | _QWEN2_32B | {"eos_token_id": 151643, "rms_norm_eps": 1e-5},
    "Qwen2.5-32B-Instruct": _QWEN2 | _QWEN2_32B | {"max_position_embeddings": 32768},
    "Qwen3-8B": _QWEN3 | _QWEN3_8B,
    "Qwen3-8B-Base": _QWEN3 | _QWEN3_8B | {"eos_token_id": 151643, "max_position_embeddings": 32768},
    "Qwen3-30B-A3B": _QWEN3 | _QWEN3_30B_A3B,
    "DeepSeek-R1-Distill-Qwen-7B": _QWEN2 | _QWEN2_7B | {"eos_token_id": 151643, "rope_theta": 1e4},
}


def known_spec(path: str) -> ModelSpec | None:
    """The shape of the known model that a directory of this name would hold, else None."""
    name = Path(path).name.lower()
    return next((ModelSpec.parse(path, raw) for known, raw in KNOWN.items() if known.lower() == name), None)
