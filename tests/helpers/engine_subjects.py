"""Engines under test: a running one, small models and adapters for it, and requests."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pa_npu.engines.protocol import (
    Generation,
    Sampling,
)
from pa_npu.engines.registry import EngineKind
from pa_npu.families.model_directory import read_header
from pa_npu.weight_transfer.adapters import Base, StoredWeight, merge, stored_digest
from tests.helpers.models import make_model
from tests.helpers.weight_sender import WeightSender, tensors_of

VOCAB, EOS = 128, 1
MAX_PROMPT, MAX_RESPONSE = 132, 64
DEADLINE_S = 120.0
SAMPLING = Sampling(max_tokens=24, temperature=1.0, stop_token_ids=(EOS,))


def make_engine_model(
    directory: Path, seed: int = 0, family: str = "qwen2", tied: bool = True, **more: object
) -> Path:
    """A random model with a tokenizer, of a size that every engine can serve."""
    model = make_model(directory, family, hidden=128, tied=tied, seed=seed, **more)  # type: ignore[arg-type]
    vocabulary = {"<pad>": 0, "</s>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token="</s>"
    ).save_pretrained(model)
    return model


def make_adapters(model: Path, directory: Path) -> tuple[Base, Path, Path]:
    """Random adapters of some weights: what they are merged into, a directory with them, and one
    with the merged model.
    """
    header = read_header(model / "model.safetensors")
    sent, merged, weights = {}, tensors_of(model), []
    for name, actual in header.items():
        layer = (
            name.removesuffix(".weight")
            if name.endswith("_proj.weight") and "k_proj" not in name
            else ""
        )
        if layer:
            outputs, inputs = actual.shape
            down, up = torch.randn(4, inputs), 0.1 * torch.randn(outputs, 4)
            sent |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            merge(merged[name], up, down, 0.5)
        place = (actual.begin, actual.begin + actual.num_bytes, 0)
        weights.append(
            StoredWeight(
                name, "model.safetensors", *place, "float32", "float32", actual.shape, layer
            )
        )
    stored = tuple(weights)
    base = Base(0.5, stored_digest(str(model), stored, torch.device("cpu")), stored)
    alone, whole = directory / "alone", shutil.copytree(model, directory / "merged")
    alone.mkdir()
    save_file(sent, alone / "model.safetensors")
    save_file(merged, whole / "model.safetensors", metadata={"format": "pt"})
    return base, alone, whole


@dataclass
class Subject:
    """A running engine. restart: ends it and starts it again at the same URL; model: what it was
    started with.
    """

    kind: EngineKind
    name: str
    url: str
    key: str
    model: Path
    restart: Callable[[], Awaitable[None]]
    sender: WeightSender = field(default_factory=WeightSender)

    def client(self, key: str | None = None) -> Any:
        return self.kind.client(self.url, VOCAB, key or self.key)


def prompt(number: int = 0, length: int = 20) -> np.ndarray:
    return np.random.default_rng(number).integers(2, VOCAB, length).astype(np.int32)


async def ask(
    client: Any, n: int = 4, seed: int = 40, sampling: Sampling = SAMPLING, number: int = 0
) -> list[Generation]:
    generations: list[Generation] = await client.generate(
        prompt(number), n, seed, sampling, deadline_s=DEADLINE_S
    )
    return generations


def bits(generations: list[Generation]) -> list[tuple[list[int], list[float], str, str]]:
    return [(g.tokens.tolist(), g.logprobs.tolist(), g.text, g.finish_reason) for g in generations]
