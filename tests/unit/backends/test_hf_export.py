"""HF export: the same tensors in HF's form, complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pa_npu.backends import hf_directory as export
from pa_npu.backends.megatron.weights.buckets import export_hf
from pa_npu.config.mesh import Mesh
from pa_npu.config.schema import Config
from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.prompt_format import PromptFormat, kept_template, read_prompt_format
from pa_npu.errors import DataError, ExportError
from pa_npu.families.spec import ModelSpec
from tests.helpers.weights import Stage, make_checkpoint


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_identical(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)]
)
def test_export_gives_back_what_was_loaded(family: str, tied: bool, tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path / "model", family, tied=tied, vocab=61)
    module = Stage().load(spec, 0)
    target = tmp_path / "deep" / "hf"
    export_hf(module, spec, target, Mesh().place(0))
    assert sorted(file.name for file in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_identical(read_all(target), load_file(tmp_path / "model" / "model.safetensors"))
    config = json.loads((target / "config.json").read_text())
    source = json.loads((tmp_path / "model" / "config.json").read_text())
    assert source["torch_dtype"] == "bfloat16"
    assert config == source | {"torch_dtype": "float32"}, (
        "the type must be that of the tensors written"
    )
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
    assert [file.name for file in target.iterdir()] == ["old"], (
        "a failed export must not touch the former one"
    )
    export_hf(module, spec, target, Mesh().place(0))
    assert not (target / "old").exists() and (target / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model"]


COPIED = (
    "additional_chat_templates/tool_use.jinja",
    "spiece.model",
    "tekken.json",
    "qwen.tiktoken",
    "vocab.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenization_own.py",
    "LICENSE",
    "chat_template.json",
)
LEFT = (
    "pytorch_model.bin",
    "model.gguf",
    "pytorch_model.bin.index.json",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "README.md",
    "hf_quant_config.json",
    ".gitattributes",
    "checkpoint-500/config.json",
    "pa_npu_prompts.json",
)


def make_source(directory: Path) -> ModelSpec:
    spec = make_checkpoint(directory, "qwen2", tied=False)
    for name in (*COPIED, *LEFT):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"of {name}")
    (directory / "tokenizer_config.json").write_text('{"chat_template": "own", "x": 1}')
    return spec


def test_all_files_of_the_model_that_are_no_weights_are_in_its_export(tmp_path: Path) -> None:
    spec = make_source(tmp_path / "model")
    target = tmp_path / "hf"
    export_hf(Stage().load(spec, 0), spec, target, Mesh().place(0))
    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == {
        *COPIED,
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
    }
    assert all((target / name).read_text() == f"of {name}" for name in COPIED)


def trained(spec: ModelSpec, data: DataConfig, **more: Any) -> Config:
    return Config.model_validate({"model": {"path": spec.path}, "data": data.model_dump(), **more})


def test_an_export_has_a_card_that_says_what_was_trained_and_nothing_of_the_machine(
    tmp_path: Path,
) -> None:
    spec = make_source(tmp_path / "model")
    module, place = Stage().load(spec, 0), Mesh().place(0)
    data = DataConfig(train=str(tmp_path / "secret-home/rows.jsonl"))
    reward = {"functions": [{"name": "math"}, {"name": "mine:score", "weight": 0.5}]}
    config = trained(spec, data, algorithm={"name": "dapo"}, reward=reward)
    export_hf(module, spec, tmp_path / "hf", place, config=config)
    card = (tmp_path / "hf/README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "base_model": "model",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pa_npu", "reinforcement-learning", "dapo"],
    }
    for fact in ("clip_high 0.28", "rows.jsonl", "math x 1, mine:score x 0.5"):
        assert fact in text
    assert str(tmp_path) not in card and "of README.md" not in card


def test_an_export_has_the_template_and_the_format_that_the_model_was_trained_with(
    tmp_path: Path,
) -> None:
    spec = make_source(tmp_path / "model")
    module, place = Stage().load(spec, 0), Mesh().place(0)
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }} trained")
    data = DataConfig(
        train="t",
        chat_template=str(file),
        instruction="Box it.",
        template_options={"enable_thinking": False},
    )
    target = tmp_path / "hf"
    for template in (None, "{{ messages }} kept"):
        export_hf(module, spec, target, place, config=trained(spec, data), template=template)
        text = template or "{{ messages }} trained"
        assert (target / "chat_template.jinja").read_text() == text
        assert json.loads((target / "tokenizer_config.json").read_text()) == {
            "chat_template": text,
            "x": 1,
        }
        assert not (target / "chat_template.json").exists(), "it would say another"
    asked, changed = read_prompt_format(target).given_to(DataConfig(train="other"))
    assert (asked.chat_template, asked.instruction, asked.template_options) == (
        "auto",
        "Box it.",
        {"enable_thinking": False},
    )
    assert changed == ["instruction", "template_options"]
    own, changed = read_prompt_format(target).given_to(
        DataConfig(train="other", instruction="Mine.")
    )
    assert own.instruction == "Mine." and changed == ["template_options"], (
        "what is set goes before it"
    )
    export_hf(module, spec, target, place, config=trained(spec, DataConfig(train="t")))
    assert (
        not (target / "pa_npu_prompts.json").exists()
        and not (target / "chat_template.jinja").exists()
    )
    export_hf(
        module,
        spec,
        target,
        place,
        config=trained(spec, DataConfig(train="t", chat_template="never")),
    )
    assert read_prompt_format(target) == PromptFormat(chat_template="never")
    (target / "pa_npu_prompts.json").write_text("[")
    with pytest.raises(DataError, match=r"pa_npu_prompts\.json: cannot be read"):
        read_prompt_format(target)


def test_a_checkpoint_keeps_the_template_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("first")
    data = DataConfig(train="t", chat_template=str(file))
    assert kept_template(data) == "first"
    file.write_text("another, while the run goes on")
    assert kept_template(data) == "first", "what the run began with"
    assert kept_template(DataConfig(train="t", chat_template=str(tmp_path / "gone.jinja"))) is None
    assert kept_template(DataConfig(train="t")) is None


def test_a_stage_that_is_missing_is_noticed(tmp_path: Path) -> None:
    spec = make_checkpoint(tmp_path / "model", "llama", tied=False)
    with pytest.raises(ExportError, match=r"no stage wrote tensor lm_head.weight \(and 19 more\)"):
        export_hf(Stage(1, 0, 2).load(spec, 0), spec, tmp_path / "hf", Mesh(pipeline=2).place(0))
    assert not (tmp_path / "hf").exists()
