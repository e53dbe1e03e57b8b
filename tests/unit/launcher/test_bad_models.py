"""A model that no run can use is named in one line, with the reason, before anything starts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pa_npu.launcher.cli import main
from tests.helpers.refusals import refused
from tools import make_tiny_model

pytestmark = pytest.mark.usefixtures("nothing_starts", "supported_versions")


def test_a_model_without_values_is_named(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", tiny / "model", model], check=True)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    broken = {
        f"tensor {name} holds values that are no finite numbers": {
            name: torch.full_like(tensors[name], torch.nan)
        },
        f"tensor {name} is all zero": {name: torch.zeros_like(tensors[name])},
    }
    for expected, changed in broken.items():
        save_file(tensors | changed, model / "model.safetensors")
        assert expected in refused(capsys, *base, f"model.path={model}")
    config = json.loads((model / "config.json").read_text())
    embedding = tensors["model.embed_tokens.weight"]
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    save_file(tensors | {"lm_head.weight": embedding + 1}, model / "model.safetensors")
    assert "says tie_word_embeddings, but lm_head.weight differs" in refused(
        capsys, *base, f"model.path={model}"
    )
    save_file(tensors | {"lm_head.weight": embedding.clone()}, model / "model.safetensors")
    assert main(["plan", *base, f"model.path={model}"]) == 0, (
        "a head that is the embedding is none of its own"
    )


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "train.jsonl"]
)
def test_a_git_lfs_pointer_is_called_one(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path, name: str
) -> None:
    subprocess.run(["cp", "-r", tiny / "model", tmp_path / "model"], check=True)
    file = tmp_path / ("train.jsonl" if name == "train.jsonl" else f"model/{name}")
    file.write_text(POINTER)
    keys = [f"data.train={file}"] if name == "train.jsonl" else [f"model.path={tmp_path / 'model'}"]
    text = refused(capsys, *base, *keys)
    assert "Git LFS pointer" in text and "git lfs pull" in text and str(file) in text


def test_plan_doctor_and_run_refuse_a_head_size_that_engines_cannot_compute(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    arguments = [
        "--out",
        str(tmp_path),
        "--random",
        "--hidden",
        "48",
        "--train-questions",
        "16",
        "--test-questions",
        "4",
    ]
    assert make_tiny_model.main(arguments) == 0
    head = json.loads((model / "config.json").read_text())
    size = head.get("head_dim") or head["hidden_size"] // head["num_attention_heads"]
    expected = f"head_dim {size} is not one that vLLM's CPU attention supports"
    for command in ("run", "plan", "doctor"):
        capsys.readouterr()
        code = main([command, *base, f"model.path={model}"])
        assert code and expected in "".join(capsys.readouterr()), command


def test_a_bad_model_is_named(
    capsys: pytest.CaptureFixture[str], base: list[str], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", tiny / "model", model], check=True)
    weights = (model / "model.safetensors").read_bytes()

    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors is damaged or incomplete" in refused(
        capsys, *base, f"model.path={model}"
    )
    (model / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(
        capsys, *base, f"model.path={model}"
    )
    (model / "model.safetensors").write_bytes(weights)
    (model / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refused(capsys, *base, f"model.path={model}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "architecture 'mamba' is not supported" in refused(capsys, *base, f"model.path={model}")
    (model / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(capsys, *base, f"model.path={model}")
