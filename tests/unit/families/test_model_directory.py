"""A model directory whose files contradict each other is one line before anything starts, whatever is wrong with it."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from pa_npu.errors import DataError
from pa_npu.families.model_directory import (
    INDEX_FILE,
    SINGLE_FILE,
    check_end_tokens,
    check_plain_files,
    check_tokenizer,
    check_weights,
    located_weights,
    read_header,
    weight_files,
)
from pa_npu.families.spec import ModelSpec
from tests.helpers.models import make_model
from tests.helpers.mutations import changed_bytes, json_near

UP = "model.layers.1.mlp.up_proj.weight"


def check(directory: Path) -> ModelSpec:
    """All that is checked without a tokenizer."""
    spec = ModelSpec.read(str(directory))
    check_plain_files(directory)
    check_weights(spec)
    check_end_tokens(spec)
    return spec


def refusal(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        check(directory)
    message = str(caught.value)
    assert message.startswith("model.path: ") and "\n" not in message and "; " in message, message
    return message


def split(directory: Path) -> dict[str, str]:
    """The weights in two files with an index, which is returned."""
    tensors = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    index = {}
    for file, half in (("a.safetensors", 0), ("b.safetensors", 1)):
        names = sorted(tensors)[half::2]
        save_file({name: tensors[name] for name in names}, directory / file)
        index |= dict.fromkeys(names, file)
    write_index(directory, index)
    return index


def write_index(directory: Path, index: Any) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def rewrite(file: Path, **change: torch.Tensor | None) -> None:
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_passes(family: str, tied: bool, tmp_path: Path) -> None:
    make_model(tmp_path, family, tied=tied)
    check(tmp_path)
    split(tmp_path)
    check(tmp_path)
    assert weight_files(tmp_path).keys() == ModelSpec.read(str(tmp_path)).hf_tensors().keys()


def test_a_tied_models_head_and_old_rotary_buffers_pass(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", tied=True)
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file(tensors, tmp_path / SINGLE_FILE)
    check(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(127, 64)}, tmp_path / SINGLE_FILE)
    assert "lm_head.weight has shape (127, 64), but config.json says (128, 64)" in refusal(tmp_path)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shape": (
        lambda d: rewrite(d / SINGLE_FILE, **{UP: torch.zeros(127, 64)}),
        "has shape (127, 64), but config.json says",
    ),
    "a missing tensor": (
        lambda d: rewrite(d / SINGLE_FILE, **{UP: None}),
        f"lacks 1 tensor(s) of the model, the first is '{UP}'",
    ),
    "an extra tensor": (
        lambda d: rewrite(d / SINGLE_FILE, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}),
        "has 1 tensor(s) this model does not use",
    ),
    "quantised": (
        lambda d: rewrite(d / SINGLE_FILE, **{UP: torch.zeros(128, 64, dtype=torch.int8)}),
        "has type I8: quantised weights cannot be trained",
    ),
    "fp8": (
        lambda d: rewrite(d / SINGLE_FILE, **{UP: torch.zeros(128, 64).to(torch.float8_e4m3fn)}),
        "has type F8_E4M3: quantised weights cannot be trained",
    ),
    "half a file": (lambda d: os.truncate(d / SINGLE_FILE, 90_000), "is damaged or incomplete"),
    "no weights": (lambda d: (d / SINGLE_FILE).unlink(), "has neither model.safetensors nor"),
    "two files, no index": (
        lambda d: (d / "consolidated.safetensors").write_bytes((d / SINGLE_FILE).read_bytes()),
        "has consolidated.safetensors beside model.safetensors and no",
    ),
    "doubled tensor": (
        lambda d: (split(d), rewrite(d / "a.safetensors", **load_file(d / "b.safetensors"))),
        "is in both a.safetensors and b.safetensors",
    ),
    "index with a missing file": (
        lambda d: (split(d), (d / "b.safetensors").unlink()),
        "lacks b.safetensors, which its index names",
    ),
    "index that swaps files": (
        lambda d: write_index(
            d, {n: "ab"[f[0] == "a"] + ".safetensors" for n, f in split(d).items()}
        ),
        "restore the index",
    ),
    "index without a stored tensor": (
        lambda d: write_index(d, {n: f for n, f in split(d).items() if n != UP}),
        "says no file",
    ),
    "index with a tensor nobody has": (
        lambda d: write_index(d, split(d) | {"ghost": "a.safetensors"}),
        "'ghost' is in no file",
    ),
    "index that leads elsewhere": (
        lambda d: write_index(d, split(d) | {"x": "../a.safetensors"}),
        "names '../a.safetensors', which is no safetensors file of this directory",
    ),
    "index of another form": (
        lambda d: write_index(d, [split(d)]),
        "has no weight_map from tensors to files",
    ),
    "a pipe as index": (lambda d: os.mkfifo(d / INDEX_FILE), "is not a regular file"),
    "a pipe as weights": (
        lambda d: ((d / SINGLE_FILE).unlink(), os.mkfifo(d / SINGLE_FILE)),
        "it is not a regular file",
    ),
    "a pipe as tokenizer": (
        lambda d: os.mkfifo(d / "tokenizer.json"),
        "tokenizer.json cannot be used (it is not a regular file)",
    ),
    "an endless tokenizer": (
        lambda d: (d / "vocab.json").symlink_to("/dev/zero"),
        "vocab.json cannot be used (it is not a regular file)",
    ),
    "a dangling link": (
        lambda d: (d / "merges.txt").symlink_to(d / "blob"),
        "merges.txt cannot be read",
    ),
    "an enormous file": (
        lambda d: ((d / "tokenizer.json").touch(), os.truncate(d / "tokenizer.json", 2**33)),
        "more than any file of its kind",
    ),
    "a huge header": (
        lambda d: (
            (d / SINGLE_FILE).write_bytes(struct.pack("<Q", 2**40)),
            os.truncate(d / SINGLE_FILE, 2**41),
        ),
        "is damaged or incomplete",
    ),
    "an end token out of range": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [1, 128]}'),
        "generation_config.json: eos_token_id: 128 is not one of the 128 tokens",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_in_a_second(fault: str, tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", tied=False)
    make, says = FAULTS[fault]
    make(tmp_path)
    start = time.thread_time()
    assert says in refusal(tmp_path)
    assert time.thread_time() - start < 2.0


def test_end_tokens_of_config_json_and_of_the_tokenizer_are_in_the_vocabulary(
    tmp_path: Path,
) -> None:
    make_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 128}))
    assert "config.json: eos_token_id: 128 is not one of the 128 tokens" in refusal(tmp_path)

    class Tokenizer(PreTrainedTokenizerFast):
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    spec = ModelSpec.read(str(tmp_path))
    check_tokenizer(spec, Tokenizer({"a": 0, "b": 127}))
    with pytest.raises(
        DataError,
        match=r"token '<tool>' of the tokenizer has id 128, but config.json says vocab_size = 128",
    ):
        check_tokenizer(spec, Tokenizer({"a": 0, "<tool>": 128}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", layers=1)


HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@given(header=json_near(HEADER, max_changes=2), data=st.sampled_from([32, 32, 32, 24, 0]))
@example(
    header=b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    data=4,
)
@example(header=json.dumps(HEADER).encode(), data=32)
def test_a_header_is_read_as_safetensors_reads_it_or_refused(
    model: Path, header: bytes, data: int
) -> None:
    """A file that passes here opens there with the same tensors, so that no fault is left for the
    trainers to find.
    """
    file = model / "near.safetensors"
    file.write_bytes(raw_file(header, bytes(data)))
    try:
        actual = read_header(file)
    except DataError as error:
        assert "\n" not in str(error)
        return
    with safe_open(file, framework="pt") as stored:
        assert set(stored.keys()) == actual.keys()
        assert all(
            tuple(stored.get_slice(name).get_shape()) == tensor.shape
            for name, tensor in actual.items()
        )


@given(data=st.data())
def test_a_changed_directory_loads_or_is_one_line(model: Path, data: st.DataObject) -> None:
    """Damage to any of the files that say what the weights are; the bytes of the weights themselves
    may be anything.
    """
    config, weights = (model / "config.json").read_bytes(), (model / SINGLE_FILE).read_bytes()
    header_bytes = 8 + struct.unpack("<Q", weights[:8])[0]
    if data.draw(st.booleans()):
        new_config, new_weights = data.draw(json_near(json.loads(config), max_changes=2)), weights
    else:
        new_config, new_weights = (
            config,
            data.draw(changed_bytes(weights[:header_bytes])) + weights[header_bytes:],
        )
    try:
        (model / "config.json").write_bytes(new_config)
        (model / SINGLE_FILE).write_bytes(new_weights)
        try:
            spec = check(model)
        except DataError as error:
            assert "\n" not in str(error) and str(error).startswith("model.path: ")
            return
        places = located_weights(spec)
        for name, shape in spec.hf_tensors().items():
            with safe_open(places[name][0], framework="pt") as file:
                assert file.get_tensor(name).shape == shape
    finally:
        (model / "config.json").write_bytes(config)
        (model / SINGLE_FILE).write_bytes(weights)
