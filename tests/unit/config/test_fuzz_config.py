"""Whatever a user writes into YAML files and overrides: a Config, or one line of a ConfigError."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.config.keys import all_keys
from pa_npu.config.load import dump_config, load_config
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError, DataError
from pa_npu.families.spec import ModelSpec
from pa_npu.planning.plan_text import derived_lines
from tests.helpers.mutations import BYTES, VALUES, changed_bytes, changed_tree, json_near, to_json

CONFIGS = Path(__file__).parents[3] / "configs"
KEYS = [key.name for key in all_keys()]
EXAMPLE = """
run: {dir: runs/x, seed: 3, device: cpu}
model: {path: m, dtype: fp32}
data:
  train: a.jsonl
  test: null
  max_prompt_tokens: 64
rollout:
  engines: 2
  attach: [http://127.0.0.1:1, http://127.0.0.1:2]
  window: auto
  temperature: 0.9
  extra_args: [--block-size, "64"]
  env: {A: b}
reward:
  functions:
    - {name: math}
    - {name: format, pattern: "<a>.*", weight: 0.5}
    - {name: overlong}
algorithm: {name: dapo}
optimizer:
  learning_rate: 1e-5
trainer: {devices: 4, tensor_parallel: 2}
microbatch: {responses: 4}
placement: {devices: [0, 1, 2, 3, 4, 5]}
"""
SMALL = (
    b"model: {path: m}\ndata: {train: t}\nreward: {functions: [{name: math}]}\nrollout: {env: "
    b"{A: b}}\n"
)
TREE = yaml.safe_load(EXAMPLE)
TEXTS = [
    "",
    "~",
    "true",
    "yes",
    "1",
    "-1",
    "1e999",
    ".nan",
    ".inf",
    "0x",
    "0o9",
    "1_000",
    "9" * 5000,
    "'",
    '"',
    "[",
    "{",
    "a: b",
    "&a [*a]",
    "*a",
    "&a {b: *a}",
    "<<: {a: 1}",
    "{<<: [1]}",
    "? a",
    "- a",
    "!!int x",
    "!!float [1]",
    "!!timestamp x",
    "!!binary x",
    "!!python/object/apply:os.getcwd []",
    "!!set {a}",
    "!!omap [a]",
    "!x y",
    "%YAML 9",
    "--- a\n--- b",
    "2024-01-01",
    "[" * 1200,
    "{a: 1, a: 2}",
    "[1, 2]",
    "{name: math}",
    "[{name: format}]",
    "\u2028",
    "\x00",
    "\ud800",
    "\x85",
    "a\tb",
    "#",
    "|",
    ">",
    "@",
    "`",
]


def load(directory: Path, data: bytes, *overrides: str) -> Config | None:
    file = directory / "fuzzed.yaml"
    file.write_bytes(data)
    try:
        config = load_config([str(file)], overrides)
    except ConfigError as error:
        message = str(error)
        assert message and message.isprintable(), f"not one printable line: {message!r}"
        return None
    if zlib.crc32(data) % 8 == 0:  # the whole tree as YAML takes long
        again = directory / "again.yaml"
        again.write_text(dump_config(config), encoding="utf-8")
        assert load_config([str(again)]) == config
    assert math.isfinite(config.optimizer.learning_rate) and math.isfinite(config.reward.timeout_s)
    assert (
        config.devices.num_devices > 0
        and config.microbatches_per_group > 0
        and config.groups_per_replica > 0
    )
    return config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_the_unchanged_examples_are_accepted(directory: Path) -> None:
    for text in (EXAMPLE, *(file.read_text() for file in CONFIGS.glob("*.yaml"))):
        assert load(directory, text.encode()) is not None


@given(data=changed_bytes(EXAMPLE.encode()))
def test_changed_yaml_text_is_a_config_or_a_config_error(directory: Path, data: bytes) -> None:
    load(directory, data)


@given(tree=changed_tree(TREE, max_changes=2), flow=st.booleans())
def test_changed_values_are_a_config_or_a_config_error(
    directory: Path, tree: Any, flow: bool
) -> None:
    text = to_json(tree) if flow else yaml.safe_dump(tree).encode("utf-8", "surrogatepass")
    load(directory, text)


KEY_TEXTS = st.sampled_from(KEYS) | st.sampled_from(
    ["", ".", "a", "run", "run.", "reward.functions.0.weight", "rollout.env.X"]
)
KEY_TEXTS |= st.tuples(
    st.sampled_from(KEYS), st.sampled_from([".x", "s", ".0", ".0.name", " ", ".", "\n", "é", "=1"])
).map("".join)
VALUE_TEXTS = (
    st.sampled_from(TEXTS)
    | st.sampled_from(VALUES).map(lambda value: to_json(value).decode())
    | st.text(max_size=8)
)


@given(
    overrides=st.lists(
        st.tuples(KEY_TEXTS, VALUE_TEXTS).map("=".join) | st.text(max_size=12),
        min_size=1,
        max_size=3,
    )
)
def test_overrides_are_a_config_or_a_config_error(directory: Path, overrides: list[str]) -> None:
    load(directory, SMALL, *overrides)


HF_CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
    "max_position_embeddings": 512,
    "eos_token_id": [2, 3],
    "tie_word_embeddings": True,
}


@given(data=json_near(HF_CONFIG, max_changes=2))
def test_a_models_config_json_is_a_spec_or_a_data_error(directory: Path, data: bytes) -> None:
    (directory / "config.json").write_bytes(data)
    try:
        spec = ModelSpec.read(str(directory))
    except DataError as error:
        assert "\n" not in str(error)
        return
    sizes = (
        spec.num_layers,
        spec.hidden_size,
        spec.ffn_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
    )
    assert min(*sizes, spec.max_positions, spec.num_parameters) > 0
    assert (
        math.isfinite(spec.rope.theta)
        and spec.norm_eps > 0
        and all(isinstance(token, int) for token in spec.eos_token_ids)
    )
    assert derived_lines(
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}), spec, None, True
    )


def test_hostile_bytes_are_not_all_refused_for_the_same_reason(directory: Path) -> None:
    """A control: the texts above reach different checks."""
    reasons = set()
    for text in (*TEXTS, *(item.decode("latin-1") for item in BYTES)):
        try:
            load_config([], ["model.path=m", "data.train=t", f"rollout.engines={text}"])
        except ConfigError as error:
            reasons.add(str(error).partition("; ")[2])
    assert len(reasons) >= 5, reasons
