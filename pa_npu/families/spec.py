"""The shape of a model, read from an HF directory's config.json; knows nothing of torch or transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pa_npu.errors import DataError

FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class ModelSpec:
    """What a decoder-only transformer of a supported family looks like. Sizes are counts, not bytes."""

    path: str
    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, path: str) -> ModelSpec:
        """Read `path`/config.json. Raises DataError when it is missing, unreadable or of an unsupported architecture."""
        return cls.parse(path, _read_json(Path(path)))

    @classmethod
    def parse(cls, path: str, raw: dict[str, Any]) -> ModelSpec:
        """From the content of a config.json; `path` names the model in messages."""
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise DataError(
                f"model.path: {path}: architecture {family!r} is not supported; use a model of the families {', '.join(FAMILIES)}"
            )
        _refuse_unsupported(path, raw, family)
        try:
            # transformers 5 keeps theta and the scaling under rope_parameters, transformers 4 as rope_theta and rope_scaling
            rope = _mapping(raw, "rope_parameters")
            scaling = rope if rope.get("rope_type", "default") != "default" else _mapping(raw, "rope_scaling")
            eos = raw.get("eos_token_id")
            hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
            return cls(
                path=str(path),
                family=family,
                num_layers=_count(raw, "num_hidden_layers"),
                hidden_size=hidden_size,
                ffn_size=_count(raw, "intermediate_size"),
                num_heads=num_heads,
                num_kv_heads=_count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_heads,
                head_dim=_count(raw, "head_dim") if raw.get("head_dim") else max(1, hidden_size // num_heads),
                vocab_size=_count(raw, "vocab_size"),
                rope_theta=_positive(rope if rope.get("rope_theta") else raw, "rope_theta", 10000.0),
                rope_scaling=scaling or None,
                norm_eps=_positive(raw, "rms_norm_eps"),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
                tied=bool(raw.get("tie_word_embeddings", False)),
                max_positions=_count(raw, "max_position_embeddings"),
                eos_token_ids=tuple(map(_token, eos))
                if isinstance(eos, list)
                else ()
                if eos is None
                else (_token(eos),),
            )
        except KeyError as error:
            raise DataError(
                f"model.path: {path}/config.json has no {error.args[0]!r}; use a complete HF model directory"
            ) from None
        except ValueError as error:
            raise DataError(
                f"model.path: {path}/config.json has a malformed value ({error}); use an unmodified HF config"
            ) from None

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied weights counted once."""
        h, d = self.hidden_size, self.head_dim
        qkv_width = (self.num_heads + 2 * self.num_kv_heads) * d
        attention = (
            h * qkv_width
            + self.num_heads * d * h
            + (qkv_width if self.qkv_bias else 0)
            + (2 * d if self.qk_norm else 0)
        )
        layer = attention + 3 * h * self.ffn_size + 2 * h
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tied else 2)


def _read_json(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise DataError(f"model.path: {directory} is not a directory; give the path of an HF model directory")
    file = directory / "config.json"
    if not file.is_file():
        raise DataError(f"model.path: {directory} has no config.json; give the path of an HF model directory")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"model.path: {file} cannot be read ({error}); restore it from the model's source") from None
    if not isinstance(raw, dict):
        raise DataError(f"model.path: {file} is not a JSON object; restore it from the model's source")
    return raw


def _count(raw: dict[str, Any], key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{key}: {value!r:.40} is not a count")
    return value


def _positive(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw[key] if default is None else raw.get(key) or default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        raise ValueError(f"{key}: {value!r:.40} is not a positive number")
    return float(value)


def _mapping(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: {value!r:.40} is not an object")
    return dict(value)


def _token(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"eos_token_id: {value!r:.40} is not a token id")
    return value


def _refuse_unsupported(path: str, raw: dict[str, Any], family: str) -> None:
    """Features that would silently change the model if they were ignored."""
    if raw.get("use_sliding_window"):
        raise DataError(
            f"model.path: {path}: sliding-window attention is not supported; use a model without use_sliding_window"
        )
    if family == "llama" and raw.get("mlp_bias"):
        raise DataError(f"model.path: {path}: mlp_bias is not supported; use a model without it")
    if raw.get("hidden_act", "silu") != "silu":
        raise DataError(f"model.path: {path}: activation {raw['hidden_act']!r} is not supported; use a model with silu")
    if family != "qwen2" and raw.get("attention_bias"):
        raise DataError(
            f"model.path: {path}: attention_bias=true also biases the output projection, which is not supported"
        )
