"""The command line and the Python interface lose no character of a text, and take `~` for the home directory everywhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pa_npu import Run
from pa_npu.config.load import dump_config, load_config
from pa_npu.config.schema import Config
from pa_npu.config.yaml_source import read_yaml
from pa_npu.errors import ConfigError, UserError
from pa_npu.launcher.cli import _parser, main
from pa_npu.launcher.subcommands import _evaluated

BARE = ["model.path=m", "data.train=t"]
TEXTS = [
    "Put the final answer after ####",
    "#### first",
    "# all of it",
    "&amp",
    "&anchor text",
    "*bold*",
    "@user",
    "%percent",
    "!tag",
    "| block",
    "> folded",
    "- item",
    "? key",
    "key: value # and more",
    "a: b",
    "[a, b",
    "[a] and [b]",
    "{prompt}",
    "{{row.question}}",
    "`code`",
    " both ends ",
    "\ttab",
    "two\nlines",
    "trailing line\n",
    "'half quoted",
    '"he said" and "she said"',
    "it's",
    "3",
    "true",
    "1e-6",
    "---",
    "...",
    "%YAML 1.1",
    "a\\nb",
    "\\boxed{}",
    "答案写在 #### 后面",
    "wide　space",
    "👨‍👩‍👧",
]


def value_at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_the_command_line_is_what_was_given(text: str, tmp_path: Path) -> None:
    keys = ["data.instruction", "data.system_prompt", "reward.functions.0.pattern"]
    arguments = [
        *BARE,
        "reward.functions=[{name: format, pattern: x}]",
        *(f"{key}={text}" for key in keys),
    ]
    config = load_config([], arguments)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    written = load_config([str(file)])  # the run's own file says the same
    for key in keys:
        assert value_at(config, key) == value_at(written, key) == text


@pytest.mark.parametrize(
    "path",
    [
        "runs/try #2",
        "my set #2.jsonl",
        "[draft] set.jsonl",
        "a: b",
        "2024",
        " spaced",
        "*.jsonl",
        "&x",
        "- x",
    ],
)
def test_a_path_of_the_command_line_is_what_was_given(path: str) -> None:
    keys = ["run.dir", "data.train", "data.test", "model.path", "checkpoint.load"]
    config = load_config([], [f"{key}={path}" for key in keys])
    assert {value_at(config, key) for key in keys} == {path}


def test_lists_sections_and_no_value_are_still_yaml() -> None:
    config = load_config(
        [],
        [
            "model.path=m",
            "data.train=[{path: 'a # b', weight: 2}, {path: c}]",
            "data.test={path: t, max_rows: 3}",
            "data.system_prompt=null",
            "data.instruction=~",
            'rollout.extra_args=["--a # b"]',
            "environment.name=tools",
            "environment.options.hint='after ####'",
            "rollout.env.HINT=after ####",
        ],
    )
    assert [dataset.path for dataset in config.data.datasets] == ["a # b", "c"]
    assert (config.data.system_prompt, config.data.instruction) == (None, None)
    assert config.rollout.extra_args == ("--a # b",) and config.rollout.env == {
        "HINT": "after ####"
    }
    assert config.environment.options == {"hint": "after ####"}


def test_a_text_that_all_stands_in_quotes_may_hold_escapes() -> None:
    config = load_config(
        [], [*BARE, 'data.instruction="one\\ntwo"', "data.system_prompt='it''s # here'"]
    )
    assert (config.data.instruction, config.data.system_prompt) == ("one\ntwo", "it's # here")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "rollout.engines=2 # of three",
            "YAML takes what follows # for a comment; put the text in quotes",
        ),
        ("rollout.extra_args=[--a] #--b", "YAML takes what follows # for a comment"),
        ("environment.options.hint=after ####", "YAML takes what follows # for a comment"),
        ("environment.options.hint=#### first", "YAML takes what follows # for a comment"),
        ("environment.options.hint=&amp", "& and * begin YAML's anchors and aliases"),
        ("data.template_options={a: &b c}", "& and * begin YAML's anchors"),
        ("data.instruction=a\x07b", "holds control characters"),
        ("data.instruction=\udcff", "holds control characters"),
        (
            'data.instruction="in \\boxed{}"',
            "holds the control character '\\x08'; in YAML's double quotes",
        ),
        ("data.test=", 'data.test: "" is not allowed'),
        ("run.dir=", 'run.dir: "" is not allowed'),
    ],
)
def test_what_would_be_lost_of_other_values_is_refused_in_a_line(
    override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([], [*BARE, override])
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_a_control_character_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text('data: {train: t, instruction: "Put it in \\boxed{}"}\nmodel: {path: m}\n')
    with pytest.raises(
        ConfigError, match=r"c\.yaml:1: data\.instruction: .* holds the control character"
    ):
        load_config([str(file)])
    file.write_text("data: {train: t, instruction: 'Put it in \\boxed{}'}\nmodel: {path: m}\n")
    assert load_config([str(file)]).data.instruction == "Put it in \\boxed{}"


def evaluated(*arguments: str) -> Config:
    command = ["evaluate", *arguments]
    options, rest = _parser(command).parse_known_args(command)
    return _evaluated(options, rest)


def test_evaluate_takes_paths_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = evaluated(
        "--model",
        "models/m #2",
        "--data",
        "a=sets/my set #2.jsonl",
        "--data",
        "b.c=~/t.jsonl",
        "--output",
        "runs/[x] #1",
        "data.instruction=after ####",
    )
    assert config.model.path == "models/m #2" and config.run.dir == "runs/[x] #1"
    assert {
        name: held_out.path for name, held_out in config.evaluate.all_sets(config.data.test).items()
    } == {
        "a": "sets/my set #2.jsonl",
        "b.c": "/home/somebody/t.jsonl",
    }
    assert config.data.instruction == "after ####"


PATH_KEYS = [
    "run.dir",
    "model.path",
    "model.adapter",
    "data.train",
    "data.test",
    "rollout.python",
    "checkpoint.load",
]


@pytest.mark.parametrize("key", PATH_KEYS)
def test_a_leading_tilde_is_the_home_directory_in_every_key(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    inputs = [*BARE, *(["trainer.backend=fsdp"] if key == "model.adapter" else [])]
    section, _, name = key.partition(".")
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}: {{{name}: ~/x}}\n")
    for config in (
        load_config([], [*inputs, f"{key}=~/x"]),
        load_config([str(file)], [line for line in inputs if not line.startswith(key)]),
    ):
        assert value_at(config, key) == "/home/somebody/x"
        assert read_yaml_value(dump_config(config), key, tmp_path) == "/home/somebody/x"
    with pytest.raises(ConfigError, match="begins with ~, but there is no such home directory"):
        load_config([], [*inputs, f"{key}=~nobody-of-that-name/x"])
    assert value_at(load_config([], [*inputs, f"{key}=./~x"]), key) == "./~x"


def read_yaml_value(text: str, key: str, directory: Path) -> Any:
    file = directory / "dumped.yaml"
    file.write_text(text)
    section, _, name = key.partition(".")
    return read_yaml(str(file))[0][section][name]


def test_a_leading_tilde_is_the_home_directory_inside_lists_and_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    root = re.escape("/")
    user = os.path.expanduser("~root")
    config = load_config(
        [],
        [
            "model.path=~root/m",
            "data.train=[{path: ~/a.jsonl}, {path: b~/c}]",
            "evaluate.sets={e: ~/e, f: {path: ~/f}}",
            "data.chat_template=~/t.jinja",
        ],
    )
    assert config.model.path == f"{user}/m" and re.match(root, user)
    assert [dataset.path for dataset in config.data.datasets] == ["/home/somebody/a.jsonl", "b~/c"]
    assert [held_out.path for held_out in config.evaluate.all_sets(config.data.test).values()] == [
        "/home/somebody/e",
        "/home/somebody/f",
    ]
    assert config.data.chat_template == "/home/somebody/t.jinja"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "~/runs/none"],
        ["view", "~/runs/none"],
        ["plan", "--config", "~/none.yaml"],
        ["export", "--checkpoint", "~/c/iteration_000001", "--output", "o"],
        ["evaluate", "--results", "~/none.jsonl"],
    ],
)
def test_options_take_a_tilde_too(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "/home/somebody/" in error and "~" not in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("s3://bucket/run", "is a URL"),
        ("http://host/run", "is a URL"),
        ("file:///tmp/run", "is a URL"),
        ("hdfs://name/run", "is a URL"),
        ("$HOME/run", "holds a variable that no shell has replaced"),
        ("${HOME}/run", "holds a variable"),
        ("runs/$NAME", "holds a variable"),
        ("runs/$(date)", "holds a variable"),
        ("runs/`date`", "holds a variable"),
    ],
)
def test_a_run_goes_into_no_directory_that_is_called_like_a_url_or_a_variable(
    path: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"run\\.dir: .* {re.escape(why)}"):
        load_config([], [*BARE, f"run.dir={path}"])
    with pytest.raises(ConfigError, match=f"--output|run.dir: .* {re.escape(why)}"):
        evaluated("--model", "m", "--data", "a=t", "--output", path)
    with pytest.raises(UserError, match=re.escape(why)):
        _parser(["export"]).parse_args(["export", "--checkpoint", "c", "--output", path])


@pytest.mark.parametrize("path", ["runs/a:b", "runs/100$", "runs/s3:bucket", "runs/a~b"])
def test_unusual_directories_that_are_meant_are_taken(path: str) -> None:
    """A control."""
    assert load_config([], [*BARE, f"run.dir={path}"]).run.dir == path


def test_the_python_interface_takes_values_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    text = '"quoted" # and more'
    run = Run(
        "~/c.yaml", {"data.instruction": text, "run.dir": tmp_path / "try #2", "data.test": None}
    )
    assert run.config.data.instruction == text and run.dir == tmp_path / "try #2"
    again = Run(run.config, {"evaluate.sets.a": "my set #2.jsonl", "data.system_prompt": "null"})
    assert (
        again.config.evaluate.sets == {"a": "my set #2.jsonl"}
        and again.config.data.system_prompt == "null"
    )
