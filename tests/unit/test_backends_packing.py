"""A packed group equals its separate sequences, whatever is recomputed; and the check would see a wrong position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.attention import PrefixLayout
from tests.helpers.megatron import loaded_stage, model_config, single_process
from tests.helpers.models import make_model

PROMPT, RESPONSES = 7, (5, 3, 1, 6)


class NotRestarted(PrefixLayout):
    """A layout whose positions run through, as if the responses followed one another."""

    def position_ids(self, device: torch.device | str | None = None) -> torch.Tensor:
        return torch.arange(self.total)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    with single_process(model_config(path)):
        yield path


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 128, (1, PROMPT + sum(RESPONSES)), generator=torch.Generator().manual_seed(3))


def run_packed(stage: Any, tokens: torch.Tensor, layout: PrefixLayout, chunk: int = 64) -> torch.Tensor:
    """Log-probs of all response tokens; gradients of their sum are left in the parameters."""
    rows = layout.predictor_rows()[PROMPT : tokens.shape[1]]
    output = stage(pad(tokens, layout.total), layout, rows, tokens[0, PROMPT:], 1.0, chunk)
    output.logprobs.sum().backward()
    return output.logprobs.detach()


def run_separately(stage: Any, tokens: torch.Tensor) -> torch.Tensor:
    logprobs, start = [], PROMPT
    for length in RESPONSES:
        sequence = torch.cat([tokens[:, :PROMPT], tokens[:, start : start + length]], dim=1)
        layout = PrefixLayout.from_sequences([PROMPT + length])
        rows = torch.arange(PROMPT - 1, PROMPT + length - 1)
        output = stage(sequence, layout, rows, sequence[0, PROMPT:], 1.0, 64)
        output.logprobs.sum().backward()
        logprobs.append(output.logprobs.detach())
        start += length
    return torch.cat(logprobs)


def pad(tokens: torch.Tensor, total: int) -> torch.Tensor:
    return torch.nn.functional.pad(tokens, (0, total - tokens.shape[1]))


def gradients(stage: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def worst_relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)


def test_packed_group_equals_separate_sequences(model: Path, tokens: torch.Tensor) -> None:
    packed, separate = loaded_stage(model), loaded_stage(model)
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))]).pad(4)
    assert layout.total > tokens.shape[1], "the case must contain padding"
    difference = (run_packed(packed, tokens, layout) - run_separately(separate, tokens)).abs().max()
    assert difference < 3e-6
    assert worst_relative(gradients(packed), gradients(separate)) < 5e-6


def test_the_comparison_sees_positions_that_do_not_restart(model: Path, tokens: torch.Tensor) -> None:
    wrong = NotRestarted.from_groups([(PROMPT, list(RESPONSES))])
    stage = loaded_stage(model)
    difference = (run_packed(stage, tokens, wrong) - run_separately(stage, tokens)).abs().max()
    assert difference > 0.05


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute: str, model: Path, tokens: torch.Tensor) -> None:
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    plain, recomputed = loaded_stage(model), loaded_stage(model, trainer={"recompute": recompute})
    assert torch.equal(run_packed(plain, tokens, layout), run_packed(recomputed, tokens, layout))
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, gradients(recomputed)[name]), name


def test_bf16_stays_near_fp32(model: Path, tokens: torch.Tensor) -> None:
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    wide, narrow = loaded_stage(model), loaded_stage(model, model={"dtype": "bf16"})
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    ours, theirs = run_packed(narrow, tokens, layout, chunk=5), run_packed(wide, tokens, layout)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.05
    for name, gradient in gradients(wide).items():
        cosine = torch.cosine_similarity(gradients(narrow)[name].float().flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.99, f"{name}: {cosine:.4f}"


def test_wrong_shapes_are_refused_with_the_remedy(model: Path, tokens: torch.Tensor) -> None:
    stage = loaded_stage(model)
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    with pytest.raises(ValueError, match=r"must be \(1, 22\)"):
        stage(tokens[:, 1:], layout, torch.tensor([0]), torch.tensor([0]), 1.0, 64)
