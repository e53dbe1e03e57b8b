"""Frozen models in the policy's pass give exactly what separate passes give, and never see a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pa_npu.attention import PrefixLayout
from pa_npu.families.spec import ModelSpec
from tests.helpers.megatron import PLATFORM, build_stage, loaded_stage, model_config, single_process
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    paths = [make_model(tmp_path_factory.mktemp(f"model{seed}"), "llama", tied=True, seed=seed) for seed in range(3)]
    with single_process(model_config(paths[0])):
        yield paths


LAYOUT = PrefixLayout.from_groups([(4, [3, 5])])
TOKENS = torch.randint(0, 128, (1, LAYOUT.total), generator=torch.Generator().manual_seed(5))
ROWS, TARGETS = LAYOUT.predictor_rows()[4:], TOKENS[0, 4:]


def test_one_pass_equals_separate_passes(models: list[Path]) -> None:
    together = loaded_stage(models[0], {"old": models[1], "reference": models[2]})
    alone = loaded_stage(models[0])
    output, expected = (stage(TOKENS, LAYOUT, ROWS, TARGETS, 0.8, 3) for stage in (together, alone))
    assert torch.equal(output.logprobs, expected.logprobs)
    for name, path in (("old", models[1]), ("reference", models[2])):
        separate = loaded_stage(path)(TOKENS, LAYOUT, ROWS, TARGETS, 0.8, 3).logprobs
        assert torch.equal(output.frozen[name], separate)
        assert not output.frozen[name].requires_grad
        assert (output.frozen[name] - output.logprobs).abs().max() > 0.1, (
            "the models must differ for this to show anything"
        )

    output.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for model in together.frozen.values():
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_frozen_models_are_invisible_to_optimizer_and_checkpoint(models: list[Path]) -> None:
    together, alone = loaded_stage(models[0], {"reference": models[1]}), loaded_stage(models[0])
    assert [name for name, _ in together.named_parameters()] == [name for name, _ in alone.named_parameters()]
    assert together.state_dict().keys() == alone.state_dict().keys()
    assert together.sharded_state_dict().keys() == alone.policy.sharded_state_dict().keys()


def hf_logprobs(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Log-probs of TARGETS under transformers' model: both responses behind the prompt, at temperature 0.8."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    parts = []
    for start, length in ((4, 3), (7, 5)):
        response = TOKENS[:, start : start + length]
        with torch.no_grad():
            logits = model(torch.cat([TOKENS[:, :4], response], dim=1), use_cache=False).logits[0, 3:-1].float()
        parts.append((logits / 0.8).log_softmax(-1).gather(-1, response[0, :, None]).squeeze(-1))
    return torch.cat(parts)


NARROW: dict[str, Any] = {"model": {"frozen_dtype": "bf16"}}


def test_a_bf16_reference_leaves_the_fp32_policy_exactly_as_it_is(models: list[Path]) -> None:
    narrow, wide = (loaded_stage(models[0], {"reference": models[1]}, **keys) for keys in (NARROW, {}))
    output, expected = (stage(TOKENS, LAYOUT, ROWS, TARGETS, 0.8, 3) for stage in (narrow, wide))
    assert torch.equal(output.logprobs, expected.logprobs)
    output.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    for ours, theirs in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)

    reference = output.frozen["reference"]
    assert reference.dtype == torch.float32, "log-probs are fp32 whatever the weights are"
    assert not torch.equal(reference, expected.frozen["reference"]), "in bf16 the reference must show it"
    separate = loaded_stage(models[1], model={"dtype": "bf16"})(TOKENS, LAYOUT, ROWS, TARGETS, 0.8, 3).logprobs
    assert torch.equal(reference, separate), "the reference is a bf16 model of its own"


def test_a_bf16_reference_is_as_close_to_the_exact_one_as_transformers_in_bf16(models: list[Path]) -> None:
    stage = loaded_stage(models[0], {"reference": models[1]}, **NARROW)
    ours = stage(TOKENS, LAYOUT, ROWS, TARGETS, 0.8, 3).frozen["reference"]
    exact, theirs = hf_logprobs(models[1], torch.float32), hf_logprobs(models[1], torch.bfloat16)
    rounding = (theirs - exact).abs().max().item()
    assert 1e-3 < rounding < 0.1, "what bf16 costs transformers"
    assert (ours - exact).abs().max() < 2 * rounding
    assert (ours - theirs).abs().max() < 2 * rounding


def test_bf16_frozen_models_take_half_the_bytes(models: list[Path]) -> None:
    def count(**keys: Any) -> dict[str, int]:
        stage = loaded_stage(models[0], {"old": models[1], "reference": models[2]}, **keys)
        return {name: sum(p.nbytes for p in model.parameters()) for name, model in stage.gpts().items()}

    wide, narrow = count(), count(**NARROW)
    assert wide["policy"] == wide["old"] == wide["reference"] == narrow["policy"]
    assert 2 * narrow["old"] == 2 * narrow["reference"] == wide["policy"]


def test_copy_of_the_policy_is_rounded_to_the_frozen_type(models: list[Path]) -> None:
    stage = loaded_stage(models[0], {"old": models[1]}, **NARROW)
    stage.copy_policy_to("old")
    for ours, policy in zip(stage.frozen["old"].parameters(), stage.policy.parameters(), strict=True):
        assert (ours.dtype, policy.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(ours, policy.bfloat16())


def test_copy_policy_to_old(models: list[Path]) -> None:
    stage = loaded_stage(models[0], {"old": models[1]})
    stage.copy_policy_to("old")
    output = stage(TOKENS, LAYOUT, ROWS, TARGETS, 1.0, 64)
    assert torch.equal(output.frozen["old"], output.logprobs)


def test_a_weight_that_was_never_loaded_shows(models: list[Path]) -> None:
    stage = build_stage(ModelSpec.read(str(models[0])), model_config(models[0]), PLATFORM)
    assert all(parameter.isnan().all() for parameter in stage.parameters())
    initialised = build_stage(ModelSpec.read(str(models[0])), model_config(models[0]), PLATFORM, initialise=True)
    assert initialised(TOKENS, LAYOUT, ROWS, TARGETS, 1.0, 64).logprobs.isfinite().all()


def test_unknown_frozen_name_is_refused(models: list[Path]) -> None:
    with pytest.raises(ValueError, match="frozen"):
        build_stage(ModelSpec.read(str(models[0])), model_config(models[0]), PLATFORM, frozen=("critic",))
