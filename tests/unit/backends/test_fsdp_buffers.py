"""Buffers that checkpoints hold are the file's to the bit wherever a bf16 run computes with them: trainer, engine and export.

DeepSeek's and MiniMax' routers add one to scores that are close to each other. transformers keeps
the former in fp32 and rounds the latter when it loads a model in bf16.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pa_npu.backends.fsdp.backend import FsdpBackend
from pa_npu.backends.registry import backend_module
from pa_npu.engines.transformers.server import load_server
from pa_npu.families.spec import ModelSpec
from pa_npu.families.wire_names import stored_tensors
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.manifest import Assembler
from pa_npu.weight_transfer.transport import Deadline
from tests.helpers.launched import random_tiny
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model, make_other

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with single_process(model_config(make_model(tmp_path_factory.mktemp("model")))):
        yield


def made(kind: str, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model whose biases bf16 would round to one number; returns them too."""
    file = (
        make_other(directory, kind, num_local_experts=4, num_experts_per_tok=2)
        / "model.safetensors"
    )
    held = load_file(file)
    biases = {
        name: 14 + torch.arange(4) * 1e-3 + number
        for number, name in enumerate(held)
        if name.endswith(BIAS)
    }
    assert biases and all(len(set(bias.bfloat16().tolist())) == 1 for bias in biases.values())
    save_file(held | biases, file, metadata={"format": "pt"})
    return directory, biases


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in stored_tensors(model).items() if name.endswith(BIAS)}


def assert_equal(found: dict[str, torch.Tensor], biases: dict[str, torch.Tensor]) -> None:
    assert len(found) == len(biases)
    for ours, expected in zip(found.values(), biases.values(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, expected), f"{ours} for {expected}"


@pytest.mark.parametrize("kind", ["deepseek_v3", "minimax_m2"])
def test_routers_add_the_same_biases_in_trainer_engine_and_export(
    kind: str, tmp_path: Path
) -> None:
    model, biases = made(kind, tmp_path / "model")
    config = model_config(
        model, model={"dtype": "bf16"}, trainer={"backend": "fsdp"}, algorithm={"kl_coef": 0.1}
    )
    spec, timeline = ModelSpec.from_config(config), Timeline(None, "")
    backend = backend_module("fsdp").create(
        config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline
    )
    assert isinstance(backend, FsdpBackend)
    for name in ("policy", "reference"):
        assert_equal(buffers(backend._models[name].causal), biases)

    source, sent = backend.published_weights(2**12), {}
    assert source is not None
    assembler = Assembler(source.manifest)
    for bucket, buffer in zip(source.manifest.buckets, source.buckets(Deadline(60.0)), strict=True):
        sent |= {
            name: tensor.clone() for name, tensor in assembler.completed(bucket, buffer.clone())
        }
    assert_equal({name: sent.pop(name) for name in biases}, biases)
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}

    backend.export(tmp_path / "hf")
    written = {
        name: tensor
        for file in (tmp_path / "hf").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert_equal({name: written[name] for name in biases}, biases)
    assert '"bfloat16"' in (tmp_path / "hf" / "config.json").read_text()

    for file in (random_tiny(tmp_path / "tiny") / "model").glob("*token*"):
        shutil.copyfile(file, model / file.name)
    server = load_server(str(model), "bf16", torch.device("cpu"), "key", 64, 4)
    held = buffers(server._worker._model)
    server.close()
    assert [tensor.dtype for tensor in held.values()] == [torch.float32] * len(biases), (
        "a publish fills them unrounded"
    )
