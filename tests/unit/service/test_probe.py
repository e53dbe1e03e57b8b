"""A probe of the trainers: log-probs of the snapshot's own weights agree, those of other weights are one clear line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.service.probe import Probes
from pa_npu.service.slots import WEIGHTS, Slots
from pa_npu.service.wire import AdamParameters
from tests.helpers.models import make_model
from tests.helpers.service import call_of, make_slots, random_datum, service_config

VOCAB, NUM_TOKENS = 64, 12
PROMPT = [3, 14, 15, 9, 2, 6]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Slots, Probes, Path]]:
    directory = tmp_path_factory.mktemp("probe")
    model = make_model(directory / "model", "qwen3", tied=True)
    config = service_config(model, directory / "run", lora={"rank": 0})
    slots, backend = make_slots(config)
    yield slots, Probes(config, backend, slots.ranks), model
    backend.close()


def sampled(policy: Any, temperature: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """Returns 16 responses of transformers' model at a temperature, and their log-probs."""
    tokens = torch.tensor([PROMPT] * 16)
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            table = (policy(tokens).logits[:, -1] / temperature).log_softmax(-1)
        drawn = torch.multinomial(table.exp(), 1, generator=generator)
        values.append(table.gather(-1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens[:, len(PROMPT) :].tolist(), torch.cat(values, dim=1).tolist()


def with_weights(model: Path, slots: Slots, name: str) -> Any:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = slots._slots[name].parts[WEIGHTS]
    with torch.no_grad():
        for key, weight in policy.named_parameters():
            weight.copy_(weights[key].reshape(weight.shape))
    return policy


def test_an_engine_with_the_weights_agrees_and_one_that_kept_old_ones_is_named(
    subject: tuple[Slots, Probes, Path], tmp_path: Path
) -> None:
    slots, probes, model = subject
    slots.create("a", 0)
    old = with_weights(model, slots, "a")
    datum = random_datum(np.random.default_rng(1), 30, VOCAB)
    slots.forward_backward("a", call_of([datum], "cross_entropy"))
    slots.step("a", AdamParameters(learning_rate=1e-3))
    file = tmp_path / "snapshot.safetensors"
    slots.save("a", file, [WEIGHTS])
    slots.show(file)
    new = with_weights(model, slots, "a")
    assert probes.difference(5, PROMPT, *sampled(new)) is None
    reason = probes.difference(5, PROMPT, *sampled(old))
    assert reason is not None and "I5" in reason and "version 5" in reason
    assert "publish.only_logged" in reason, "the remedy"
    hot = probes.difference(5, PROMPT, *sampled(new, temperature=1.05))
    assert hot is not None and "temperature" in hot
    records = Path(probes._config.run.dir) / "agreement" / "replica_00000.jsonl"
    broken = [json.loads(line)["broken"] for line in records.read_text().splitlines()]
    assert broken[0] == [] and broken[1] and broken[2]
    slots.forward("a", call_of([datum], "cross_entropy"))
    assert slots._shown is None, "a slot has taken the snapshot's place"
