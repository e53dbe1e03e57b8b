"""HF export: the same tensors in HF's form, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pa_npu.backends import hf_directory as export
from pa_npu.backends.megatron.weights.buckets import export_hf
from pa_npu.config.mesh import Mesh
from pa_npu.errors import ExportError
from tests.helpers.weights import Stage, make_checkpoint


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)])
def test_export_gives_back_what_was_loaded(family: str, tied: bool, tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path / "model", family, tied=tied, vocab=61)
    module = Stage().load(spec, 0)
    target = tmp_path / "deep" / "hf"
    export_hf(module, spec, target, Mesh().place(0))
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_identical(read_all(target), load_file(tmp_path / "model" / "model.safetensors"))
    config = json.loads((target / "config.json").read_text())
    source = json.loads((tmp_path / "model" / "config.json").read_text())
    assert source["torch_dtype"] == "bfloat16"
    assert config == source | {"torch_dtype": "float32"}, "the type must be that of the tensors written"
    assert [path.name for path in target.parent.iterdir()] == ["hf"]


def test_large_models_are_split_with_an_index_and_load_again(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path / "model", "qwen2", tied=False)
    module = Stage().load(spec, 0, torch.bfloat16)
    export_hf(module, spec, tmp_path / "hf", Mesh().place(0), max_file_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = read_all(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "hf" / file)
    assert all((tmp_path / "hf" / file).stat().st_size < 25_000 for file in files)
    original = load_file(tmp_path / "model" / "model.safetensors")
    assert_identical(found, {name: tensor.bfloat16() for name, tensor in original.items()})
    again = Stage().load(type(spec).read(str(tmp_path / "hf")), 0, torch.bfloat16)
    for (name, ours), theirs in zip(module.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_existing_directory_is_replaced_only_by_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_checkpoint(tmp_path / "model", "qwen2", tied=False)
    module = Stage().load(spec, 0)
    target = tmp_path / "hf"
    target.mkdir()
    (target / "old").write_text("the former export")

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "_copy_rest", disk_full)
        with pytest.raises(ExportError, match=r"completing .*hf\.tmp: .*No space left on device"):
            export_hf(module, spec, target, Mesh().place(0))
    assert [file.name for file in target.iterdir()] == ["old"], "a failed export must not touch the former one"
    export_hf(module, spec, target, Mesh().place(0))
    assert not (target / "old").exists() and (target / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model"]


def test_a_stage_that_is_missing_is_noticed(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path / "model", "llama", tied=False)
    with pytest.raises(ExportError, match=r"no stage wrote tensor lm_head.weight \(and 19 more\)"):
        export_hf(Stage(1, 0, 2).load(spec, 0), spec, tmp_path / "hf", Mesh(pipeline=2).place(0))
    assert not (tmp_path / "hf").exists()
