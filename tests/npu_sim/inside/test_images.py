"""A step with images on npu tensors is the CPU's: the tower and the decoder attend by operators that the device has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pa_npu.backends.fsdp.model import ScoredModel, load_model
from pa_npu.backends.fsdp.vision import freeze_tower, pack_images
from pa_npu.samples.microbatch import pack
from tests.helpers.vision import (
    group_of,
    make_vision,
    picture,
    prompt_of,
    reader_of,
    sample_of,
)
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim

LEARNING_RATE = 1e-2


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"), request.param)


def step(path: Path, device: torch.device, vision: str) -> dict[str, torch.Tensor]:
    """Returns log-probs of a group with two images, and the weights after a step."""
    scored = ScoredModel(load_model(str(path), torch.float32), "merge").to(device)
    if vision == "frozen":
        freeze_tower(scored.causal)
    prompt = prompt_of(path, [picture(1), picture(2, 56, 112)])
    group = group_of([sample_of(prompt, list(range(5, 5 + n))) for n in (7, 12, 3)])
    microbatch = pack([group], True, 8).to(device)
    scores: Any = scored(
        microbatch.tokens,
        microbatch.layout,
        microbatch.rows,
        microbatch.targets,
        1.0,
        512,
        images=pack_images(microbatch, reader_of(path).processor),
    )
    scores.logprobs.mul(torch.linspace(0.5, 1.5, len(scores.logprobs)).to(device)).sum().backward()
    with torch.no_grad():
        for parameter in scored.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    after = {name: weight.detach().cpu() for name, weight in scored.named_parameters()}
    return {"logprobs": scores.logprobs.detach().cpu(), **after}


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_step_with_images_is_that_of_the_cpu(vision: str, path: Path) -> None:
    expected = step(path, torch.device("cpu"), vision)
    with NpuSim(all_references()) as sim:
        actual = step(path, torch.device("npu", 0), vision)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert sim.calls["npu::npu_fusion_attention"], "the decoder's, by its packed layout"
    # the tower's: what torch_npu makes of scaled_dot_product_attention
    assert sim.calls["npu::npu_fusion_attention_v3"]
    assert bool(sim.calls["npu::npu_fusion_attention_grad_v3"]) == (vision == "trained")
    assert sorted(sim.without_kernel) == []
