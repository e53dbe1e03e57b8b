"""Configuration loading: precedence, YAML typing, round trip, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.config import Config, dump_config, load_config
from pa_npu.config.help import keys_help
from pa_npu.config.keys import all_keys
from pa_npu.errors import ConfigError

BASE = """\
model:
  path: models/tiny
data:
  train: train.jsonl
optimizer:
  learning_rate: 1e-4
rollout:
  engines: 2
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    file = tmp_path / "base.yaml"
    file.write_text(BASE)
    return str(file)


def message(paths: list[str], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(paths, overrides)
    text = str(caught.value)
    assert "\n" not in text, f"more than one line: {text!r}"
    return text


def test_files_merge_in_order_and_overrides_win(base: str, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("rollout:\n  engines: 3\n  max_num_seqs: 7\nrun:\n")
    config = load_config([base, str(second)], ["rollout.max_num_seqs=9", "run.dir=2024", "rollout.env.OMP=1"])
    assert (config.rollout.engines, config.rollout.max_num_seqs, config.model.path) == (3, 9, "models/tiny")
    assert config.optimizer.learning_rate == 1e-4  # YAML 1.2: a number, not text
    assert config.run.dir == "2024"
    assert config.rollout.env == {"OMP": "1"}


def test_a_range_of_engines_is_short_for_two_keys(base: str, tmp_path: Path) -> None:
    given = ["placement.cluster=ray", "placement.ray_address=auto"]
    rollout = load_config([base], [*given, "rollout.engines=1..4"]).rollout
    assert (rollout.engines, rollout.max_engines) == (1, 4)
    second = tmp_path / "second.yaml"
    second.write_text("rollout: {engines: 2 .. 3}\n")
    rollout = load_config([base, str(second)], given).rollout
    assert (rollout.engines, rollout.max_engines) == (2, 3)
    assert message([base], *given, "rollout.engines=1..x") == (
        'command line: rollout.engines: "1..x" is not allowed; use int >= 1, <= 16384'
    )
    assert "engines: 1..2 names the maximum; remove max_engines" in message(
        [base], *given, "rollout.engines=1..2", "rollout.max_engines=3"
    )
    assert message([base], *given, "rollout.engines=4..2").startswith("command line: rollout.engines: 4 is above")


def test_override_values_are_yaml(base: str) -> None:
    overrides = [
        "schedule.stream=false",
        "reward.functions=[{name: math}, {name: 'a:b'}]",
        "reward.functions.1.weight=2",
    ]
    config = load_config([base], [*overrides, "placement.engine_devices=[1, 0]", "data.test=null"])
    assert config.schedule.stream is False
    assert [(f.name, f.weight) for f in config.reward.functions] == [("math", 1.0), ("a:b", 2.0)]
    assert config.placement.engine_devices == (1, 0)
    assert config.data.test is None


@pytest.mark.parametrize(
    ("line", "number", "expected"),
    [
        ("  windw: 8", 9, "rollout.windw: unknown key; did you mean rollout.window?"),
        ("  learning_rate: 1", 9, "rollout.learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("  window: many", 9, 'rollout.window: "many" is not allowed; use auto | int'),
        ("  temperature: 0", 9, "rollout.temperature: 0 is out of range; use number > 0, <= 10"),
        ("  max_num_seqs: 1.5", 9, "rollout.max_num_seqs: 1.5 is not allowed; use int >= 1"),
        ("  max_num_seqs: true", 9, "rollout.max_num_seqs: true is not"),
        ("  top_p: 0.9", 9, "rollout.top_p: 0.9: the trainer's log-probs would not match"),
        ("  engines: 3", 9, "rollout.engines: written twice"),
        ("  a: [", 10, "not valid YAML"),
        ("schedule: 3", 9, "schedule: 3 is not a section"),
        ("schedul:\n  stream: true", 9, "schedul: unknown key; did you mean schedule?"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(base: str, line: str, number: int, expected: str) -> None:
    Path(base).write_text(BASE + line + "\n")
    text = message([base])
    assert text.startswith(f"{base}:{number}: "), text
    assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.engins=1", "command line: rollout.engins: unknown key; did you mean rollout.engines?"),
        ("run.device=tpu", 'command line: run.device: "tpu" is not allowed; use auto | npu | cuda | cpu'),
        ("trainer.devices=0", "command line: trainer.devices: 0 is out of range; use int >= 1"),
        ("reward.functions=[{name: math, wight: 2}]", "did you mean reward.functions.0.weight?"),
        ("reward.functions.3.weight=2", "reward.functions"),
        ("rollout.engines.x=1", "rollout.engines is a value, not a section"),
        ("rollout", "is not of the form section.key=value"),
        ("run.dir=[", "command line: run.dir:1: not valid YAML"),
        ("algorithm.advantage=batch-std", "set schedule.stream=false"),
        ("rollout.max_num_batched_tokens=767", "512 + 256, so that a sequence would be prefilled in chunks"),
        ("rollout.max_num_seqs=40000", "rollout.max_num_seqs: 40000 exceeds rollout.max_num_batched_tokens = 32768"),
        ("rollout.temperature=0.005", "rollout.temperature: 0.005: engines sample at 0.01 instead"),
        ("algorithm.delta=1.1", "algorithm.delta: 1.1 is not above 1 + algorithm.clip_high = 1.2"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip: 1 is out of range; use number | null > 1"),
    ],
)
def test_a_mistake_on_the_command_line_says_so(base: str, override: str, expected: str) -> None:
    text = message([base], override)
    assert expected in text
    assert "command line" in text


def test_first_error_only_with_the_count_of_the_others(base: str) -> None:
    assert message([base], "rollout.engines=0", "run.seed=-1", "trainer.devices=0").endswith("(and 2 more errors)")


def test_missing_required_key_and_missing_file(base: str) -> None:
    assert message([]).startswith("model.path: required, but not given;")
    assert "no such configuration file" in message(["/nowhere/x.yaml"])


def test_help_lists_every_key_with_its_meaning() -> None:
    text = keys_help()
    keys = list(all_keys())
    assert len(keys) > 70
    for key in keys:
        assert f"  {key.name}  (" in text
        assert key.description and key.description in text


TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(TEXT | st.sampled_from(["1e-5", "yes", "null", "0x1", "~", "", "1_000", "12:30", "2024-01-01", "- a", "a: b"]))
def test_resolved_config_reads_back_to_the_same(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "t", "instruction": text}, "optimizer": {"learning_rate": 3e-7}}
    )
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config([str(file)]) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
SECTIONS = st.sampled_from(["run", "model", "data", "rollout", "reward", "trainer", "placement", "x"])
KEYS = st.sampled_from([key.name.partition(".")[2] for key in all_keys()]) | TEXT


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(SECTIONS, TREES | st.dictionaries(KEYS, TREES, max_size=4), max_size=4))
def test_any_tree_gives_a_config_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, tree: dict) -> None:
    import yaml

    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    try:
        load_config([str(file)])
    except ConfigError as error:
        assert "\n" not in str(error)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.tuples(KEYS, st.text(max_size=20)).map("=".join))
def test_any_override_gives_a_config_or_a_config_error(base_text: str, override: str) -> None:
    try:
        load_config([base_text], [override])
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def base_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("config") / "base.yaml"
    file.write_text(BASE)
    return str(file)


@pytest.mark.parametrize(
    "text",
    [
        "&a [*a]",
        "a: !!int ''",
        "a: !!timestamp x",
        "? [a]\n: b",
        "a: !!python/object:os.x {}",
        "[" * 2000,
        "\x00",
        "- a",
        "run: &r\n  dir: x\nmodel: *r",
    ],
)
def test_hostile_yaml_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    message([str(file)])
