"""Keys of the data: a path or several datasets, overrides into them, and one line for each mistake."""

from __future__ import annotations

import pytest

from pa_npu.config.load import dump_config, load_config
from pa_npu.errors import ConfigError


def load(*overrides: str):
    return load_config([], ["model.path=m", *overrides])


def test_a_path_stays_a_path_and_a_list_takes_overrides(tmp_path) -> None:
    assert load("data.train=2024").data.train == "2024", "a text, though YAML reads a number"
    config = load(
        "data.train=[{path: gsm8k/train.jsonl, weight: 3}, {path: b.jsonl}]",
        "data.train.1.name=second",
        "data.test={path: d, split: validation}",
        "evaluate.sets.aime=aime.jsonl",
    )
    assert [(dataset.path, dataset.called) for dataset in config.data.datasets] == [
        ("gsm8k/train.jsonl", "gsm8k"),
        ("b.jsonl", "second"),
    ]
    assert config.data.shares == [0.75, 0.25]
    sets = {
        name: (one.path, one.split)
        for name, one in config.evaluate.all_sets(config.data.test).items()
    }
    assert sets == {"test": ("d", "validation"), "aime": ("aime.jsonl", None)}
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config([str(file)]) == config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train="], 'data.train: "" is not allowed'),
        (["data.train=[]"], "data.train: [] is not allowed"),
        (["data.train=[3]"], "data.train.0: 3 is not a section"),
        (["data.train={path: a}"], 'data.train: {"path": "a"} is not allowed; use text | [{path'),
        (["data.train=[{weight: 2}]"], "data.train.0.path: required"),
        (["data.train=[{path: a, weight: -2}]"], "data.train.0.weight: -2 is out of range"),
        (["data.train=[{path: a, weight: no}]"], 'data.train.0.weight: "no" is not allowed'),
        (["data.train=[{path: a, wight: 2}]"], "data.train.0.wight: unknown key; did you mean "
                                               "data.train.0.weight?"),
        (["data.train=[{path: x/a.jsonl}, {path: y/a.jsonl}]"], "data.train: 2 datasets are called "
                                                                "a"),
        (["data.train=[{path: \"a\\tb\"}]"], "data.train.0: 'a\\tb' holds control characters"),
        (["data.train=a", "data.test={path: b, splt: c}"], "data.test.splt: unknown key; did you "
                                                           "mean data.test.split?"),
        (["data.train=a", "evaluate.sets={x: {path: 3}}"], "evaluate.sets.x.path: 3 is not "
                                                           "allowed"),
        (["data.train=a", "evaluate.samples=3"], "there are no held-out sets"),
        (["data.train=a", "data.template_options.thinking=true", "data.chat_template=never"], "would be read by "
                                                                                              "nothing"),
        (["data.train=a", "data.chat_template=sometimes"], "data.chat_template: 'sometimes' is not "
                                                           "auto, always, never"),
        (["data.train=a", "data.skip=solved"], "data.skip: removed in an earlier release; use "
                                               "schedule.dynamic_sampling"),
        (["data.train=a", "data.skip_epochs=2"], "data.skip_epochs: removed in an earlier release"),
        (["data.train=a", "schedule.on_publish=continue"], "schedule.on_publish: removed in an "
                                                           "earlier release"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert expected in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
