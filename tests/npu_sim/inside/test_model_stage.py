"""The npu platform prepares Megatron, and a stage on npu tensors equals transformers on the CPU, gradients included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pa_npu import platform as platforms
from pa_npu.attention import PrefixLayout
from pa_npu.backends.megatron.patches.table import prepare
from pa_npu.config.schema import Config
from pa_npu.families.spec import ModelSpec
from tests.helpers.models import make_model
from tests.npu_sim.reference_ops import all_references
from tests.npu_sim.simulator import NpuSim

PROMPT, RESPONSES = 6, (4, 3)


@pytest.fixture
def sim() -> NpuSim:
    return NpuSim(all_references())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stage_equals_transformers(
    recompute: str, sim: NpuSim, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    platform = platforms.get("npu")
    assert platforms.get("auto") is platform
    prepare(platform.name)
    from pa_npu.backends.megatron.parallel import initialise_parallel, shutdown_parallel
    from pa_npu.backends.megatron.stage import build_stage
    from pa_npu.backends.megatron.weights.hf_map import load_hf, part_view, sources

    model = make_model(tmp_path, "qwen3", tied=True)
    spec = ModelSpec.read(str(model))
    tree = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl"},
        "trainer": {"recompute": recompute},
        "attention": {"implementation": "merge"},
    }
    config = Config.model_validate(tree)
    layout = PrefixLayout.from_groups([(PROMPT, list(RESPONSES))])
    tokens = torch.randint(0, 128, (1, layout.total), generator=torch.Generator().manual_seed(1))
    targets = tokens[0, PROMPT:]
    device = platform.device(0)
    with sim:
        initialise_parallel(config, platform, dist.HashStore(), rank=0)
        request.addfinalizer(shutdown_parallel)
        stage = build_stage(spec, config, platform, frozen=("reference",))
        for gpt in stage.gpts().values():
            load_hf(gpt, spec)
        assert {parameter.device for parameter in stage.parameters()} == {device}
        rows = layout.predictor_rows(device)[PROMPT:]
        output = stage(tokens.to(device), layout, rows, targets.to(device), 1.0, 4)
        output.logprobs.sum().backward()
        ours = output.logprobs.detach().cpu()
        reference = output.frozen["reference"].cpu()
        gradients = {
            name: parameter.grad.cpu() for name, parameter in stage.policy.named_parameters()
        }

    hf_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected, start = [], PROMPT
    for length in RESPONSES:
        sequence = torch.cat([tokens[:, :PROMPT], tokens[:, start : start + length]], dim=1)
        log_softmax = hf_model(sequence).logits[0, PROMPT - 1 : -1].log_softmax(-1)
        expected.append(log_softmax.gather(-1, sequence[0, PROMPT:, None]).squeeze(-1))
        start += length
    theirs = torch.cat(expected)
    theirs.sum().backward()
    assert (ours - theirs).abs().max() < 5e-6
    assert torch.equal(reference, ours)
    by_name = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    for name, gradient in gradients.items():
        for tensor in sources(name, spec, 0):
            mine, another = (
                part_view(gradient, tensor, spec).reshape(tensor.shape),
                by_name[tensor.name],
            )
            error = (mine - another).abs().max() / another.abs().max()
            assert error < 1e-5, f"{tensor.name}: relative gradient error {error:.1e}"

    fused = (
        "npu::npu_rms_norm",
        "npu::npu_rotary_mul",
        "npu::npu_swiglu",
        "npu::npu_fusion_attention",
    )
    assert all(
        sim.calls[name] and sim.calls[f"{name}_backward"] + sim.calls[f"{name}_grad"]
        for name in fused
    ), sim.calls
    assert not sim.without_kernel
