"""Slots of adapters: trained as peft trains them, over a base that stays, with datums that share beginnings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from pa_npu.service.datums import microbatches
from pa_npu.service.losses import LOSSES, OWNER, PLACE
from pa_npu.service.slots import WEIGHTS, Slots
from pa_npu.service.wire import AdamParameters
from tests.helpers.adapters import peft_model
from tests.helpers.models import make_model
from tests.helpers.service import (
    RANK,
    call_of,
    documented,
    make_slots,
    random_datum,
    service_config,
)

VOCAB = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def slots(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    made, backend = make_slots(service_config(model, tmp_path_factory.mktemp("run")))
    yield made
    backend.close()


def test_two_steps_are_pefts(slots: Slots, model: Path) -> None:
    slots.create("m", 7)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    policy: Any = get_peft_model(plain, options)
    own = slots._slots["m"].parts[WEIGHTS]
    trained = {
        name.replace(".default.", "."): weight
        for name, weight in policy.named_parameters()
        if ".lora_" in name
    }
    assert trained.keys() == own.keys()
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(own[name].reshape(weight.shape))
    optimizer = torch.optim.AdamW(
        list(trained.values()), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    random = np.random.default_rng(0)
    begin = random.integers(0, VOCAB, 30)
    for _ in range(2):
        data = [random_datum(random, 40, VOCAB, begin=begin, sampled=True) for _ in range(3)]
        slots.forward_backward("m", call_of(data, "importance_sampling"))
        slots.step("m", AdamParameters(1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0))
        for datum in data:
            ids = torch.from_numpy(datum.tokens[None].astype(np.int64))
            table = policy(ids).logits[0].log_softmax(-1)
            targets = torch.tensor(np.array(datum.inputs["target_tokens"]))
            logprobs = table.gather(-1, targets[:, None])[:, 0]
            documented("importance_sampling", datum, logprobs, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in trained.items():
        close = (own[name] - weight.detach().flatten()).abs() < 2e-4
        assert float(close.float().mean()) > 0.995, name
    moved = [values for name, values in own.items() if ".lora_B" in name]
    assert all(bool(values.any()) for values in moved), "B was zero, and every step moves it"


def test_seeds_make_adapters_and_a_slots_beginning_is_the_base(slots: Slots) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        slots.create(name, seed)
    assert slots.digest("a") == slots.digest("b") != slots.digest("c")
    call = call_of([random_datum(np.random.default_rng(1), 20, VOCAB)], "cross_entropy")
    first, other = (slots.forward(name, call) for name in ("a", "c"))
    assert first.loss == other.loss, "B is zero at first"


def test_an_export_is_pefts_and_another_service_begins_with_it(
    slots: Slots, model: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(4)
    data = [random_datum(random, 20, VOCAB) for _ in range(2)]
    call = call_of(data, "cross_entropy")
    slots.create("m", 5)
    slots.forward_backward("m", call)
    slots.step("m", AdamParameters(learning_rate=3e-2))
    trained = slots.forward("m", call)
    slots.save("m", tmp_path / "m.safetensors", [WEIGHTS])
    slots.export(tmp_path / "m.safetensors", tmp_path / "peft")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untrained = slots_logprobs(plain, data[0])
    policy = peft_model(model, tmp_path / "peft")
    with torch.no_grad():
        values = slots_logprobs(policy, data[0])
    np.testing.assert_allclose(trained.logprobs[0], values.numpy(), atol=2e-5)
    assert float((values - untrained).abs().max()) > 1e-2
    adapter = slots._config.model.model_copy(update={"adapter": str(tmp_path / "peft")})
    again = slots._config.model_copy(update={"model": adapter})
    slots._initial, before = (
        {key: value.clone() for key, value in slots._slots["m"].parts[WEIGHTS].items()},
        slots._initial,
    )
    slots._config, config = again, slots._config
    slots.create("other", 99)
    slots._config, slots._initial = config, before
    assert slots.digest("other") == slots.digest("m"), "no seed changes an adapter that is given"
    assert slots.forward("m", call).loss == trained.loss, "the slot is as it was"


def slots_logprobs(policy: Any, datum: Any) -> torch.Tensor:
    ids = torch.from_numpy(datum.tokens[None].astype(np.int64))
    table = policy(ids).logits[0].log_softmax(-1)
    targets = torch.tensor(np.array(datum.inputs["target_tokens"]))
    return table.gather(-1, targets[:, None])[:, 0].detach()


def test_datums_that_begin_alike_are_packed_once() -> None:
    random = np.random.default_rng(0)
    begin = random.integers(0, VOCAB, 64)
    data = [random_datum(random, 80, VOCAB, begin=begin) for _ in range(8)]
    (shared,) = microbatches(data, LOSSES["cross_entropy"], max_tokens=4096, shared=True)
    (separate,) = microbatches(data, LOSSES["cross_entropy"], max_tokens=4096, shared=False)
    assert separate.num_computed_tokens == 8 * 80
    assert shared.num_computed_tokens == 64 + 8 * 16
    assert len(separate.targets) == 8 * 80
    # of the beginning 63 targets are the same for all, those of its last row begin the datums' parts
    begun = {int(datum.inputs["target_tokens"][63]) for datum in data}
    assert len(shared.targets) == 63 + len(begun) + 8 * 16


def test_microbatches_hold_what_fits_and_every_datum_once() -> None:
    random = np.random.default_rng(2)
    data = [random_datum(random, int(length), VOCAB) for length in random.integers(3, 50, 40)]
    cut = microbatches(data, LOSSES["cross_entropy"], max_tokens=100, shared=True)
    assert all(part.num_computed_tokens <= 100 for part in cut) and len(cut) > 5
    numbers = sorted(number for part in cut for _, number in part.sources)
    assert numbers == list(range(40))
    for part in cut:
        owners, place = part.columns[OWNER].numpy(), part.columns[PLACE]
        for at, (_, number) in enumerate(part.sources):
            scored = place[owners == at]
            np.testing.assert_array_equal(
                part.targets[scored].numpy(), data[number].inputs["target_tokens"]
            )
            np.testing.assert_array_equal(
                part.tokens[part.rows[scored]].numpy(), data[number].tokens
            )
        assert sum(part.response_lengths) == len(part.targets) == int(place.max()) + 1
