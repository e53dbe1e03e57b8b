"""publish.lora=adapter: an engine that gets A and B alone ends with the weights that it would have been sent, to the bit."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from pa_npu.backends.fsdp.optimizer import local
from pa_npu.backends.registry import backend_module
from pa_npu.engines.registry import check_engine_keys
from pa_npu.engines.transformers.kind import TRANSFORMERS
from pa_npu.engines.vllm.kind import VLLM
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.engine_memory import engine_memory
from pa_npu.telemetry.timeline import Timeline
from pa_npu.weight_transfer.adapters import BaseDirectory, merge
from pa_npu.weight_transfer.contents import OrderedContents
from pa_npu.weight_transfer.manifest import Manifest
from pa_npu.weight_transfer.receiver import Receiver
from pa_npu.weight_transfer.transport import WeightSyncError
from tests.helpers.adapters import make_adapter, received
from tests.helpers.backend_updates import config_of
from tests.helpers.megatron import PLATFORM, model_config, single_process
from tests.helpers.models import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    path = make_model(
        tmp_path_factory.mktemp("model"), request.param, tied=request.param == "qwen3"
    )
    with single_process(model_config(path)):
        yield path


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the mixture, of attention alone: experts get no adapters."""
    targets = (
        ["q_proj", "v_proj", "o_proj"]
        if "Moe" in (model / "config.json").read_text()
        else "all-linear"
    )
    return make_adapter(
        model, tmp_path_factory.mktemp("adapter"), use_rslora=True, target_modules=targets
    )


def backend(model: Path, lora: str, /, **sections: Any) -> Any:
    config = config_of(
        model, **{"trainer": {"backend": "fsdp"}, "publish": {"lora": lora}, **sections}
    )
    spec = ModelSpec.from_config(config)
    timeline = Timeline(None, "")
    return backend_module("fsdp").create(config, spec, PLATFORM, dist.HashStore(), 0, 0, timeline)


def contents_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    contents = OrderedContents()
    for name, tensor in tensors.items():
        contents.add(name, tensor)
    return contents.read()


def engines_weights(source: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Returns what an engine loads that was started with the directory."""
    manifest = Manifest.from_json(json.loads(json.dumps(source.manifest.to_json())))
    assert manifest == source.manifest
    return dict(BaseDirectory(manifest.base, str(directory), CPU).merged(received(source).items()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bucket_bytes", [2**10, 2**20], ids=["cut", "whole"])
def test_an_engine_ends_with_the_merged_weights_to_the_bit(
    dtype: str, bucket_bytes: int, model: Path, adapter: Path
) -> None:
    """Buckets of either kind cut weights into other rows."""
    sections = {"model": {"adapter": str(adapter), "dtype": dtype}}
    whole = backend(model, "merged", **sections).published_weights(2**12)
    merged = received(whole)
    source = backend(model, "adapter", **sections).published_weights(bucket_bytes)
    loaded = engines_weights(source, model)
    for weights, sent in ((whole, merged), (source, received(source))):
        assert weights.contents() == contents_by_name(sent), "summed up in the model that trains"
    assert list(loaded) == list(merged), "in the same order"
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
        for name, tensor in merged.items()
    )
    stored = load_file(model / "model.safetensors")
    changed = {
        name
        for name, tensor in loaded.items()
        if not torch.equal(tensor, stored[name].to(tensor.dtype))
    }
    sent = {name.removeprefix("base_model.model.") for name in source.manifest.shapes}
    assert changed == {name.replace(".lora_A", "") for name in sent if ".lora_A" in name}
    assert source.manifest.num_bytes == 4 * sum(
        tensor.numel() for tensor in load_file(_file(adapter)).values()
    )
    assert source.manifest.loaded == set(merged)


def _file(adapter: Path) -> Path:
    return adapter / "adapter_model.safetensors"


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(700, 257, 8), (128, 64, 4), (300, 33, 1)])
def test_a_merged_row_has_the_same_bits_however_the_weight_is_cut(
    outputs: int, inputs: int, rank: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    up = torch.randn(outputs, rank)
    down = torch.randn(rank, inputs)

    def merged(first: int, last: int) -> torch.Tensor:
        rows = weight[first:last].clone()
        merge(rows, up[first:last], down, 1.7, first)
        return rows

    whole = merged(0, outputs)
    torch.testing.assert_close(
        whole.double(), weight.double() + 1.7 * (up.double() @ down.double()), rtol=1e-4, atol=1e-5
    )
    plain = torch.addmm(weight, up, down, alpha=1.7)
    unlike = 0
    for count in (1, 3, 7, 100, 256):
        for first in range(0, outputs, count):
            rows = slice(first, first + count)
            assert torch.equal(merged(first, first + count), whole[rows]), f"{first}, {count}"
            unlike += int(
                (torch.addmm(weight[rows], up[rows], down, alpha=1.7) != plain[rows]).sum()
            )
    assert unlike or rank == 1, "a product of the rows alone would be seen"


@pytest.mark.parametrize(
    "description", ["a bit", "a file that is not there", "a file that is too short"]
)
def test_an_engine_with_other_weights_is_refused_before_it_joins(
    description: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    source = backend(model, "adapter", model={"adapter": str(adapter)}).published_weights(2**12)
    changed = shutil.copytree(model, tmp_path / "other")
    file = changed / "model.safetensors"
    if description == "a bit":
        stored = load_file(file)
        weight = stored["model.layers.1.self_attn.q_proj.weight"]
        weight[60, 30] = weight[60, 30].view(torch.int32).bitwise_xor(1).view(torch.float32)
        save_file(stored, file, metadata={"format": "pt"})
    elif description == "a file that is not there":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-4])
    place: dict[str, Any] = {"store": ["127.0.0.1", 1], "first_rank": 1, "world_size": 2}
    stages = [{"name": "unused", "manifest": source.manifest.to_json()}]
    groups = {**place, "stages": stages, "backend": "gloo", "timeout_s": 1.0}
    with pytest.raises(
        WeightSyncError, match=r"publish.lora=adapter: .*other has other weights than the trainers'"
    ):
        Receiver.join(groups, 0, CPU, object(), str(changed))


def test_a_directory_that_stores_a_weight_otherwise_than_it_is_sent_is_refused(
    model: Path, tmp_path: Path
) -> None:
    another = shutil.copytree(model, tmp_path / "other")
    stored = load_file(another / "model.safetensors")
    held = backend(another, "adapter", lora={"rank": 2, "targets": ["q_proj"]})
    stored["another.name"] = stored.pop("model.norm.weight")
    save_file(stored, another / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DataError,
        match=r"other does not have model.norm.weight as it would be sent.*publish.lora=merged",
    ):
        held.published_weights(2**12)


def test_late_engines_get_the_adapters_alone_of_the_published_version(
    model: Path, adapter: Path
) -> None:
    held = backend(
        model,
        "adapter",
        model={"adapter": str(adapter)},
        schedule={"max_staleness": 1},
        algorithm={"kl_coef": 0.0},
    )
    regular, late = (
        held.published_weights(2**12, name)
        for name in (None, "old" if "old" in held._models else "published")
    )
    held.copy_policy("old" if "old" in held._models else "published")
    assert late.manifest == regular.manifest
    published = received(regular)
    with torch.no_grad():
        for weight in held._policy.parameters():
            local(weight).add_(1.0)
    trained = received(regular)
    kept = received(late)
    assert all(torch.equal(kept[name], tensor) for name, tensor in published.items())
    assert not any(torch.equal(trained[name], tensor) for name, tensor in published.items())


def test_the_manifest_says_what_an_engine_reads_and_nothing_else(
    model: Path, adapter: Path
) -> None:
    raw = (
        backend(model, "adapter", model={"adapter": str(adapter)})
        .published_weights(2**12)
        .manifest.to_json()
    )
    name, file, start, *others = raw["base"]["weights"][0]
    wrong = ([], [name, file, -1, *others], [name, file, start], [name, file, start, *others, 0])
    for broken in ({"factor": "x"}, {"weights": None}, *({"weights": [one]} for one in wrong)):
        with pytest.raises(WeightSyncError, match="weight manifest is malformed"):
            Manifest.from_json(raw | {"base": raw["base"] | broken})
    outside = (name, "../model.safetensors", start, *others)
    base = Manifest.from_json(raw | {"base": raw["base"] | {"weights": [outside]}}).base
    with pytest.raises(WeightSyncError, match=r"../model.safetensors is not in the directory"):
        BaseDirectory(base, str(model), CPU)


def test_the_second_buffer_holds_adapters_alone(model: Path, adapter: Path) -> None:
    sections: dict[str, Any] = {
        "model": {"adapter": str(adapter)},
        "trainer": {"backend": "fsdp"},
        "schedule": {"max_staleness": 1},
    }
    of = {
        lora: config_of(model, publish={"mode": "delayed", "lora": lora}, **sections)
        for lora in ("merged", "adapter")
    }
    second = {
        lora: dict(engine_memory(config, ModelSpec.from_config(config), None).parts)[
            "second buffer"
        ]
        for lora, config in of.items()
    }
    assert second["adapter"] == 4 * sum(
        tensor.numel() for tensor in load_file(_file(adapter)).values()
    )
    assert second["merged"] > 4 * second["adapter"] > 0


def test_adapters_alone_are_refused_without_adapters_and_by_engines_that_merge_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {
        "trainer": {"backend": "fsdp"},
        "lora": {"rank": 2},
        "publish": {"lora": "adapter"},
    }
    for kind, number in (
        (VLLM, 0),
        (TRANSFORMERS, 0),
        (replace(TRANSFORMERS, merges_adapters=False), 1),
    ):
        monkeypatch.setitem(sys.modules, "some_engine", types.SimpleNamespace(KIND=kind))
        config = config_of(model, rollout={"backend": "some_engine:KIND"}, **keys)
        refused = pytest.raises(
            ConfigError, match=r"publish.lora: adapter with rollout.backend=some_engine:KIND, whose"
        )
        with refused if number else nullcontext():
            check_engine_keys(config, None)
    with pytest.raises(
        ValidationError, match=r"publish.lora: adapter would be read by nothing.*set lora.rank"
    ):
        config_of(model, publish={"lora": "adapter"}, trainer={"backend": "fsdp"})
