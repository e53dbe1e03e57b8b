"""Frozen models in the policy's pass give exactly what separate passes give, and never see a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pa_npu.attention import PrefixLayout
from pa_npu.families.spec import ModelSpec
from tests.helpers.megatron import PLATFORM, build_stage, loaded_stage, model_config, single_process
from tests.helpers.models import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    paths = [
        make_model(tmp_path_factory.mktemp(f"model{seed}"), "llama", tied=True, seed=seed)
        for seed in range(3)
    ]
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
        assert all(
            parameter.grad is None and not parameter.requires_grad
            for parameter in model.parameters()
        )


def test_frozen_models_are_invisible_to_optimizer_and_checkpoint(models: list[Path]) -> None:
    together, alone = loaded_stage(models[0], {"reference": models[1]}), loaded_stage(models[0])
    assert [name for name, _ in together.named_parameters()] == [
        name for name, _ in alone.named_parameters()
    ]
    assert together.state_dict().keys() == alone.state_dict().keys()
    assert together.sharded_state_dict().keys() == alone.policy.sharded_state_dict().keys()


def test_copy_policy_to_old(models: list[Path]) -> None:
    stage = loaded_stage(models[0], {"old": models[1]})
    stage.copy_policy_to("old")
    output = stage(TOKENS, LAYOUT, ROWS, TARGETS, 1.0, 64)
    assert torch.equal(output.frozen["old"], output.logprobs)


def test_a_weight_that_was_never_loaded_shows(models: list[Path]) -> None:
    stage = build_stage(ModelSpec.read(str(models[0])), model_config(models[0]), PLATFORM)
    assert all(parameter.isnan().all() for parameter in stage.parameters())
    assert loaded_stage(models[0])(TOKENS, LAYOUT, ROWS, TARGETS, 1.0, 64).logprobs.isfinite().all()
