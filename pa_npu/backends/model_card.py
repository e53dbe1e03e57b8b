"""Writes the model card (README.md) of an export: what was trained, from what, on what and by what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import pa_npu
from pa_npu.config.schema import Config

FILE = "README.md"
_ALGORITHM_KEYS = ("loss", "advantage", "aggregation", "kl_coef", "clip_low", "clip_high")


def write_model_card(directory: Path, config: Config) -> None:
    """Writes the card of a model that the run of `config` trained.

    It says nothing of the machine: paths are reduced to their last part, and settings that may hold
    addresses or keys are left out.
    """
    (directory / FILE).write_text(model_card(config), encoding="utf-8")


def model_card(config: Config) -> str:
    """Returns the card's text: its header for hubs, then tables for people."""
    base = _name(config.model.path)
    has_adapters = config.has_adapters and config.checkpoint.export_hf != "merged"
    header = {
        "base_model": base,
        "library_name": "peft" if has_adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pa_npu", "reinforcement-learning", config.algorithm.name or "own-algorithm"],
    }
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        "",
        f"# {base}, trained with pa_npu",
        "",
        f"Trained from `{base}` with pa_npu {pa_npu.__version__}.",
        "",
        *_table(_facts(config)),
        "",
    ]
    return "\n".join(lines)


def _facts(config: Config) -> dict[str, str]:
    """Returns what the card says, by name."""
    algorithm = config.algorithm
    keys = [f"{key} {getattr(algorithm, key)}" for key in _ALGORITHM_KEYS]
    data = ", ".join(_name(dataset.path) for dataset in config.data.datasets)
    facts = {"Algorithm": f"{algorithm.name or 'own'}: {', '.join(keys)}", "Training data": data}
    if config.rollout.has_engines:
        functions = config.reward.functions
        facts["Rewards"] = ", ".join(f"{f.name} x {f.weight:g}" for f in functions)
        facts["Groups"] = (
            f"{config.schedule.prompts_per_iteration} prompts of "
            f"{config.rollout.responses_per_prompt} responses an iteration, at most "
            f"{config.rollout.max_response_tokens} tokens each, temperature "
            f"{config.rollout.temperature:g}"
        )
        facts["Environment"] = config.environment.name
    facts["Iterations"] = str(config.schedule.iterations)
    facts["Learning rate"] = f"{config.optimizer.learning_rate:g}"
    if config.has_adapters:
        facts["LoRA"] = f"rank {config.lora.rank}, alpha {config.lora.alpha:g}"
    facts["Type"] = config.model.dtype
    facts["Seed"] = str(config.run.seed)
    facts["Configuration"] = f"blake2b {_digest(config.model_dump(mode='json'))}"
    return facts


def _table(facts: Mapping[str, str]) -> list[str]:
    rows = [f"| {name} | {value.replace('|', '/')} |" for name, value in facts.items()]
    return ["| | |", "|---|---|", *rows]


def _name(path: str) -> str:
    return Path(path).name or path


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
