"""Configuration loading: precedence, YAML typing, round trip, and one clear line for every mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_npu.algorithm.registry import KINDS
from pa_npu.algorithm.rules import load_config
from pa_npu.config.keys import ENTRIES, all_keys, find_annotation, keys_help
from pa_npu.config.load import dump_config
from pa_npu.config.removed import REMOVED
from pa_npu.config.rules.unread import CONDITIONS, value_and_default
from pa_npu.config.schema import Config
from pa_npu.config.sections.learning import AlgorithmConfig
from pa_npu.errors import ConfigError
from tests.helpers.algorithms import algorithm_of

ROOT = Path(__file__).parents[3]

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
BARE = ["model.path=m", "data.train=t"]
SMALL = load_config([], BARE)


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
    config = load_config(
        [base, str(second)], ["rollout.max_num_seqs=9", "run.dir=2024", "rollout.env.OMP=1"]
    )
    assert (config.rollout.engines, config.rollout.max_num_seqs, config.model.path) == (
        3,
        9,
        "models/tiny",
    )
    assert config.optimizer.learning_rate == 1e-4  # YAML 1.2: a number, not text
    assert config.run.dir == "2024"
    assert config.rollout.env == {"OMP": "1"}


def test_a_maximum_of_engines_needs_a_cluster_and_is_none_below_their_number(base: str) -> None:
    rollout = load_config([base], ["placement.cluster=ray", "rollout.max_engines=4"]).rollout
    assert (rollout.engines, rollout.max_engines) == (2, 4)
    assert "come with nodes of a Ray cluster only" in message([base], "rollout.max_engines=4")
    assert message([base], "rollout.max_engines=1").endswith("lower it, or raise the maximum")
    assert (
        message([base], "rollout.engines=1..4")
        == 'command line: rollout.engines: "1..4" is not allowed; use int >= 0, <= 16384'
    )


def test_override_values_are_yaml(base: str) -> None:
    overrides = [
        "schedule.stream=false",
        "reward.functions=[{name: math}, {name: 'a:b'}]",
        "reward.functions.1.weight=2",
    ]
    config = load_config([base], [*overrides, "placement.devices=[1, 0, 2]", "data.test=null"])
    assert config.schedule.stream is False
    assert [(f.name, f.weight) for f in config.reward.functions] == [("math", 1.0), ("a:b", 2.0)]
    assert config.placement.devices == (1, 0, 2)
    assert config.data.test is None


@pytest.mark.parametrize(
    ("line", "number", "expected"),
    [
        ("  windw: 8", 9, "rollout.windw: unknown key; did you mean rollout.window?"),
        (
            "  learning_rate: 1",
            9,
            "rollout.learning_rate: unknown key; did you mean optimizer.learning_rate?",
        ),
        ("  window: many", 9, 'rollout.window: "many" is not allowed; use auto | int'),
        ("  temperature: 0", 9, "rollout.temperature: 0 is out of range; use number > 0, <= 10"),
        ("  max_num_seqs: 1.5", 9, "rollout.max_num_seqs: 1.5 is not allowed; use int >= 1"),
        ("  max_num_seqs: true", 9, "rollout.max_num_seqs: true is not"),
        ("  ignore_eos: 1", 9, "rollout.ignore_eos: 1 is not allowed; use true | false"),
        (
            "  top_p: 0.9",
            9,
            "rollout.top_p: removed in an earlier release; engines sample from the whole "
            "distribution",
        ),
        ("  engines: 3", 9, "rollout.engines: written twice"),
        ("  a: [", 10, "not valid YAML"),
        ("schedule: 3", 9, "schedule: 3 is not a section"),
        (
            "schedul:\n  stream: true",
            10,
            "schedul.stream: unknown key; did you mean schedule.stream?",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_its_place(
    base: str, line: str, number: int, expected: str
) -> None:
    Path(base).write_text(BASE + line + "\n")
    text = message([base])
    assert text.startswith(f"{base}:{number}: "), text
    assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rollout.engins=1",
            "command line: rollout.engins: unknown key; did you mean rollout.engines?",
        ),
        (
            "run.device=tpu",
            'command line: run.device: "tpu" is not allowed; use auto | npu | cuda | cpu',
        ),
        ("trainer.devices=0", "command line: trainer.devices: 0 is out of range; use int >= 1"),
        ("reward.functions=[{name: math, wight: 2}]", "did you mean reward.functions.0.weight?"),
        ("reward.functions.3.weight=2", "reward.functions"),
        ("rollout.engines.x=1", "rollout.engines is a value, not a section"),
        ("rollout", "is not of the form section.key=value"),
        ("rollout.extra_args=[", "command line: rollout.extra_args:1: not valid YAML"),
        ("algorithm.advantage=batch-std", "set schedule.stream=false"),
        (
            "rollout.max_num_batched_tokens=767",
            "512 + 256, so that a sequence would be prefilled in chunks",
        ),
        (
            "rollout.max_num_seqs=40000",
            "rollout.max_num_seqs: 40000 exceeds rollout.max_num_batched_tokens = 32768",
        ),
        ("rollout.temperature=0.005", "rollout.temperature: 0.005: engines sample at 0.01 instead"),
        ("algorithm.delta=1.1", "algorithm.delta: 1.1 is not above 1 + algorithm.clip_high = 1.2"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip: 1 is out of range; use number | null > 1"),
    ],
)
def test_a_mistake_on_the_command_line_says_so(base: str, override: str, expected: str) -> None:
    text = message([base], override)
    assert expected in text
    assert "command line" in text


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_names_what_took_its_place(base: str, key: str) -> None:
    section, of_entry, entry = key.partition("[].")
    override = key if "=" in key else f"{key}=1"
    if of_entry:
        override = f"{section}=[{{{entry}: 1}}]"
    text = message([base], override)
    assert text.startswith(
        f"command line: {key.replace('[]', '.0')}: removed in an earlier release; {REMOVED[key]}"
    )
    successors = [known.name for known in all_keys() if known.name in text]
    assert successors and key not in {known.name for known in all_keys()}, (
        "a row names a key that exists"
    )


OTHER_VALUES = {
    "data.template_options": "{enable_thinking: true}",
    "environment.options": "{tool: calculator}",
    "reward.judge": "{model: m}",
    "reward.code": "{tests: t}",
    "algorithm.importance_floor": "0.1",
    "agent.discards": "[turns]",
    "agent.tool_parser": "hermes",
    "rollout.sleep": "true",
    "lora.targets": "[q_proj]",
    "telemetry.project": "a",
    "telemetry.metric_names": "verl",
    "algorithm.advantage": "centred",
}
# What makes a key unread where the default does not.
BESIDE = {
    "data.template_options": ["data.chat_template=never"],
    "algorithm.ratio": ["algorithm.loss=reinforce"],
    "algorithm.clip_low": ["algorithm.loss=reinforce"],
    "algorithm.clip_high": ["algorithm.loss=reinforce"],
    "algorithm.dual_clip": ["algorithm.loss=reinforce"],
    "algorithm.delta": ["algorithm.loss=reinforce"],
    "algorithm.aggregation": ["algorithm.loss=dpo", "algorithm.kl_coef=0"],
    **{
        f"algorithm.{name}": ["algorithm.loss=cross-entropy", "rollout.engines=0"]
        for name in ("advantage", "kl_coef", "importance_sampling", "entropy_coef")
    },
    "trainer.distributed_optimizer": ["trainer.backend=fsdp"],
    "publish.probe_tolerance": ["publish.probe_tokens=0"],
    **{f"telemetry.{name}": ["telemetry.trackers=[]"] for name in ("project", "metric_names")},
}
OF_ALGORITHMS = [
    condition
    for loss in KINDS
    for condition in algorithm_of(AlgorithmConfig(loss=loss, kl_coef=0.1)).unread
]
CONDITIONAL = dict.fromkeys(
    key for condition in (*CONDITIONS, *OF_ALGORITHMS) for key in condition.keys.split()
)


def another_value(key: str) -> str:
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    annotation = find_annotation(tuple(key.split(".")))
    default = value_and_default(SMALL, key)[1]
    choices = [
        value
        for part in (annotation, *get_args(annotation))
        for value in get_args(part)
        if value != default
    ]
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, (int, float)):
        return str(default * 0.5 if isinstance(default, float) and default else default + 1)
    texts = [value for value in choices if isinstance(value, str)]
    numbers = {int: "2", float: "1.5", str: "a"}
    return (
        texts[0]
        if texts
        else next(numbers[kind] for kind in get_args(annotation) if kind in numbers)
    )


@pytest.mark.parametrize("key", CONDITIONAL)
def test_a_key_that_nothing_reads_under_this_configuration_is_refused(key: str) -> None:
    arguments = [*BARE, *BESIDE.get(key, []), f"{key}={another_value(key)}"]
    text = message([], *arguments)
    assert f"{key}: " in text and (
        "would be read by nothing" in text or "schedule.max_staleness" in text
    ), text


def test_fields_of_one_reward_are_not_taken_by_another() -> None:
    assert "reward.functions.0.pattern: is read by format, not by math" in message(
        [], *BARE, "reward.functions=[{name: math, pattern: x}]"
    )


LONG = "a" * 5000


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.dir='  '", "run.dir: '  ' is blank"),
        ("model.path=' '", "model.path: ' ' is blank"),
        ("checkpoint.load=' '", "checkpoint.load: ' ' is blank"),
        ('telemetry.project="a\\nb"', "telemetry.project: 'a\\nb' is blank or holds line ends"),
        (f"telemetry.project={LONG}", "has 5000 characters; give at most 200"),
        ("telemetry.project=../../etc", "leads out of the folder"),
        ("data.train=[{path: t, name: ../x}]", "data.train.0.name: '../x' leads out"),
        (f"data.train=[{{path: t, name: {LONG}}}]", "data.train.0.name: "),
        (f"data.question_column={LONG}", "data.question_column: "),
        (f"environment.name=m:{LONG}", "environment.name: "),
        (f"reward.functions=[{{name: 'm:{LONG}'}}]", "reward.functions.0.name: "),
        ("evaluate.sets={'..': t}", "evaluate.sets: '..' is no name of a set"),
        (f"evaluate.sets={{{'a' * 65}: t}}", "is no name of a set"),
        ("evaluate.sets={a/b: t}", "is no name of a set"),
        (
            "schedule.iterations=9223372036854775808",
            "schedule.iterations: '9223372036854775808' is beyond any run",
        ),
        (
            "microbatch.max_tokens=99999999999",
            "microbatch.max_tokens: '99999999999' is beyond any run",
        ),
        ("telemetry.samples=2147483648", "telemetry.samples: "),
    ],
)
def test_names_and_counts_that_no_run_can_have_are_refused(override: str, expected: str) -> None:
    assert expected in message(
        [], *(inputs for inputs in BARE if not override.startswith(inputs[:9])), override
    )


def test_usual_names_texts_and_paths_are_accepted() -> None:
    """A control."""
    config = load_config(
        [],
        ["model.path=../m", "data.train=[{path: ../d/t.jsonl, name: gsm8k}, {path: u}]", "data.system_prompt=\"a\\nb\"",
         "telemetry.project=a/b", "data.test=t", "evaluate.sets={a.b-c_d: ../t}", "schedule.iterations=2147483647"],
    )  # fmt: skip
    assert config.data.system_prompt == "a\nb"


def test_first_error_only_with_the_count_of_the_others(base: str) -> None:
    assert message([base], "rollout.engines=-1", "run.seed=-1", "trainer.devices=0").endswith(
        "(and 2 more errors)"
    )


def test_missing_required_key_and_missing_file(base: str) -> None:
    assert message([]).startswith("model.path: required, but not given;")
    assert "no such configuration file" in message(["/nowhere/x.yaml"])


def test_the_reference_lists_every_key_once() -> None:
    """Compares the rows of docs/configuration.md with the keys, and with those of entries of lists."""
    rows = re.findall(
        r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE
    )
    entries = sum(len(list(all_keys(entry))) for entry in ENTRIES.values())
    assert len(rows) == len(set(rows)) == len(list(all_keys())) + entries


def test_help_lists_every_key_with_its_meaning() -> None:
    text = keys_help()
    keys = list(all_keys())
    assert len(keys) > 70
    for key in keys:
        assert f"  {key.name}  (" in text
        assert key.description and key.description in text


TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    TEXT
    | st.sampled_from(
        ["1e-5", "yes", "null", "0x1", "~", "", "1_000", "12:30", "2024-01-01", "- a", "a: b"]
    )
)
def test_resolved_config_reads_back_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "instruction": text},
            "optimizer": {"learning_rate": 3e-7},
        }
    )
    file = tmp_path_factory.getbasetemp() / "resolved.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config([str(file)]) == config


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SECTIONS = st.sampled_from(
    ["run", "model", "data", "rollout", "reward", "trainer", "placement", "x"]
)
KEYS = st.sampled_from([key.name.partition(".")[2] for key in all_keys()]) | TEXT


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(SECTIONS, TREES | st.dictionaries(KEYS, TREES, max_size=4), max_size=4))
def test_any_tree_gives_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, tree: dict
) -> None:
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


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("reward.functions=[{name: math, weight: 1e39}]", "weight: 1e+39"),
        ("reward.functions=[{name: overlong, buffer_tokens: 0}]", "buffer_tokens: 0"),
        ("rollout.engine_settings=[{engines: [0], window: 0}]", "window: 0"),
        ("evaluate.sets={a: {path: x, max_rows: 0}}", "max_rows: 0"),
    ],
)
def test_a_number_out_of_range_inside_a_list_or_table_is_one_error_with_its_bound(
    override: str, line: str
) -> None:
    bound = "<= 1e+15" if "1e39" in override else ">= 1"
    with pytest.raises(ConfigError) as caught:
        load_config([], ["model.path=m", "data.train=t", override])
    assert str(caught.value).endswith(f"{line} is out of range; use a number {bound}"), caught.value
