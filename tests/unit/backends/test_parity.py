"""The Megatron stage computes what HF transformers computes: log-probs, entropy and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.attention import PrefixLayout
from pa_npu.families.spec import ModelSpec
from tests.helpers.megatron import (
    loaded_stage,
    model_config,
    relative_gradient_errors,
    single_process,
)
from tests.helpers.models import make_model

LENGTH = 24
CASES = [
    ("qwen2", False),
    ("qwen2", True),
    ("qwen3", True),
    ("qwen3", False),
    ("llama", False),
    ("llama", True),
]
MIXTURES = {
    "all sparse": {"num_hidden_layers": 2},
    "gate weights as they are": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "dense layers among sparse ones": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
}


@pytest.fixture(scope="module", autouse=True)
def parallel_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with single_process(model_config(tmp_path_factory.mktemp("unused"))):
        yield


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_logprobs_entropy_and_gradients_equal_transformers(
    family: str, tied: bool, tmp_path: Path
) -> None:
    check_equal(make_model(tmp_path, family, tied=tied))


@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_of_experts_computes_what_transformers_computes(
    case: str, tmp_path: Path
) -> None:
    check_equal(make_model(tmp_path, "qwen3_moe", **MIXTURES[case]))


def check_equal(model: Path) -> None:
    stage = loaded_stage(model)
    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.randint(0, 128, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(LENGTH - 1, generator=torch.Generator().manual_seed(2))
    temperature = 0.7

    log_softmax = (hf_model(tokens).logits[0, :-1].double() / temperature).log_softmax(-1)
    expected = log_softmax.gather(-1, tokens[0, 1:, None]).squeeze(-1)
    expected_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    rows = torch.arange(LENGTH - 1)
    layout = PrefixLayout.from_sequences([LENGTH])
    output = stage(tokens, layout, rows, tokens[0, 1:], temperature, 7, entropy_grad=True)

    assert (output.logprobs - expected).abs().max() < 2e-6
    assert (output.entropy - expected_entropy).abs().max() < 4e-6
    (output.logprobs * weights + output.entropy * weights.flip(0)).sum().backward()
    (expected * weights + expected_entropy * weights.flip(0)).sum().backward()
    errors = relative_gradient_errors(stage, hf_model, ModelSpec.read(str(model)))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 5e-6, f"{worst}: relative gradient error {errors[worst]:.1e}"
