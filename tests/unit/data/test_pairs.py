"""Pairs of answers: which tokens are compared, by layout, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.schema import Config
from pa_npu.data.pair_sets import PairSet, load_pairs
from pa_npu.data.trained_sets import load_held_out_rows, load_training_rows, num_items, stream_of
from pa_npu.errors import DataError, plain
from tests.unit.data.test_training_rows import CHATML, shown, tokenizer

ASKED = {"role": "user", "content": "ab"}
RIGHT = {"role": "assistant", "content": "cd"}
WRONG = {"role": "assistant", "content": "ef"}
USER = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"


def config(directory: Path, *rows: Any, **sections: Any) -> Config:
    file = directory / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "run": {"seed": 7},
        "model": {"path": "m"},
        "data": {"train": str(file), "max_prompt_tokens": 900},
        "algorithm": {"name": "dpo"},
        "rollout": {"max_response_tokens": 100},
        "schedule": {"prompts_per_iteration": 2},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


def load(directory: Path, *rows: Any, template: str | None = CHATML, **sections: Any) -> PairSet:
    made = config(directory, *rows, **sections)
    return load_pairs(made.data.datasets[0], tokenizer(template), made, "data.train")


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "ab", "chosen": "cd", "rejected": "ef"}, "ab[[cd<|im_end|>]]", None),
        ({"question": "ab", "chosen": "cd", "rejected": "ef"}, USER + "[[cd<|im_end|>]]\n", None),
        ({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}, None, None),
        ({"prompt": [ASKED], "chosen": "cd", "rejected": "ef"}, None, None),
        ({"prompt": [ASKED], "chosen": RIGHT, "rejected": WRONG}, None, None),
        ({"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, None, None),
        ({"prompt": "ab", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, None, None),
        ({"prompt": [ASKED], "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, None, None),
        ({"messages": [ASKED], "chosen": RIGHT, "rejected": WRONG}, None, None),
        (
            {
                "conversations": [{"from": "human", "value": "ab"}],
                "chosen": {"from": "gpt", "value": "cd"},
                "rejected": {"from": "gpt", "value": "ef"},
            },
            None,
            None,
        ),
    ],
    ids=[
        "texts",
        "question",
        "messages",
        "messages and texts",
        "single messages",
        "no prompt",
        "the prompt's text beside conversations",
        "the prompt twice",
        "messages as prompt",
        "ShareGPT",
    ],
)
def test_the_answers_are_compared_behind_their_prompt(
    row: dict[str, Any], chosen: str | None, rejected: str | None, tmp_path: Path
) -> None:
    (pair,) = load(tmp_path, row).items
    expected = chosen or USER + "[[cd<|im_end|>]]\n"
    assert shown(pair.chosen) == expected
    assert shown(pair.rejected) == expected.replace("cd", "ef")


def test_texts_without_a_prompt_are_compared_behind_the_tokens_that_both_begin_with(
    tmp_path: Path,
) -> None:
    (pair,) = load(tmp_path, {"chosen": "Human: ab AI: cd", "rejected": "Human: ab AI: ef"}).items
    assert shown(pair.chosen) == "Human: ab AI: [[cd<|im_end|>]]"
    assert shown(pair.rejected) == "Human: ab AI: [[ef<|im_end|>]]"


def test_answers_with_a_prompt_are_compared_from_their_first_token(tmp_path: Path) -> None:
    """What both answers begin with is theirs: it counts where log-probs are means over tokens."""
    (pair,) = load(tmp_path, {"prompt": "ab", "chosen": "xcd", "rejected": "xef"}).items
    assert shown(pair.chosen) == "ab[[xcd<|im_end|>]]"


def test_several_turns_are_the_prompt_as_far_as_both_have_them(tmp_path: Path) -> None:
    more = {"role": "user", "content": "gh"}
    chosen = [ASKED, RIGHT, more, {"role": "assistant", "content": "ij"}]
    rejected = [ASKED, RIGHT, more, {"role": "assistant", "content": "kl"}]
    (pair,) = load(tmp_path, {"chosen": chosen, "rejected": rejected}).items
    assert shown(pair.chosen).count("[[") == 1
    assert shown(pair.chosen).endswith("[[ij<|im_end|>]]\n")


def test_a_weight_is_that_of_the_pair(tmp_path: Path) -> None:
    row = {"prompt": "ab", "chosen": "cd", "rejected": "ef", "weight": 0.5}
    (pair,) = load(tmp_path, row).items
    assert {*pair.chosen.weight.tolist(), *pair.rejected.weight.tolist()} == {0.0, 0.5}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "chosen": "cd"}, "no rejected"),
        ({"prompt": "ab", "completion": "cd"}, "no chosen and no rejected"),
        ({"prompt": "ab", "chosen": "cd", "rejected": "cd"}, "same tokens"),
        ({"chosen": [ASKED, RIGHT], "rejected": [ASKED, RIGHT]}, "the pair is equal"),
        ({"chosen": "cd", "rejected": "cd"}, "same tokens"),
        ({"prompt": "ab", "chosen": "cd", "rejected": " "}, "rejected is empty"),
        ({"prompt": "ab", "chosen": "cd", "rejected": [WRONG]}, "give two texts, or two lists"),
        ({"prompt": "ab", "chosen": 3, "rejected": 4}, "not a text or a list"),
        ({"prompt": "ab", "chosen": [], "rejected": []}, "not a text or a list"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "begin with different messages"),
        ({"chosen": [ASKED, RIGHT], "rejected": [ASKED]}, "rejected has no message of role"),
        ({"prompt": "ab", "chosen": "cd", "rejected": "ef", "weight": -1}, "at least 0"),
        ({"prompt": "ab", "chosen": "cd", "rejected": "ef", "weight": 0}, "no token of one answer"),
        (
            {"prompt": [ASKED], "chosen": {**RIGHT, "weight": 0.5}, "rejected": WRONG},
            "in the column weight",
        ),
        (["ab"], "not an object"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_in_one_line(
    row: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        load(tmp_path, row)
    line = str(refused.value)
    assert message in line and "pairs.jsonl:1" in line and "\n" not in line


def test_what_is_too_long_is_refused_cut_or_left_out(tmp_path: Path) -> None:
    long = {"prompt": "ab", "chosen": "cd" * 20, "rejected": "ef"}
    alike = {"prompt": "ab", "chosen": "x" * 40 + "c", "rejected": "x" * 40 + "d"}
    short = {"prompt": "ab", "chosen": "cd", "rejected": "ef"}
    limits = {"data": {"max_prompt_tokens": 10}, "rollout": {"max_response_tokens": 10}}
    with pytest.raises(DataError, match=r"the row|an answer has \d+ tokens"):
        load(tmp_path, long, **limits)
    limits["data"]["overlong_prompt"] = "truncate"
    made = load(tmp_path, long, alike, short, **limits)
    assert (made.num_read, made.num_truncated, made.num_skipped) == (3, 1, 1)
    assert len(made.items[0].chosen.tokens) == 20 and not made.items[0].chosen.finished
    limits["data"]["overlong_prompt"] = "skip"
    made = load(tmp_path, long, alike, short, **limits)
    assert (made.num_read, made.num_truncated, made.num_skipped) == (3, 0, 2)


def test_pairs_come_as_groups_with_the_chosen_row_first_once_in_an_epoch(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ", "chosen": "cd", "rejected": "ef" * (n + 1)} for n in range(6)]
    made = config(tmp_path, *rows)
    loaded = load_training_rows(made, tokenizer(CHATML), "pair")
    assert num_items(made, "pair") == 2
    stream = stream_of(made, loaded, "pair")
    taken = [group for _ in range(3) for group in stream.next_items(2)]
    assert sorted(group.prompt_id for group in taken) == list(range(6))
    for group in taken:
        chosen, rejected = group.rows
        assert "cd" in chosen.text and "ef" in rejected.text
        assert len(group.tokens) >= 2, "the prompt is what both begin with"
    state = stream.state()
    again = stream_of(made, loaded, "pair")
    again.restore(state)
    following = [group.prompt_id for group in again.next_items(2)]
    assert following == [group.prompt_id for group in stream.next_items(2)]


def test_the_first_pair_is_shown_with_both_answers(tmp_path: Path) -> None:
    made = load(tmp_path, {"prompt": "ab", "chosen": "cd", "rejected": "ef"})
    lines = [plain(line) for line in made.first_lines(tokenizer(CHATML))]
    assert lines[0].startswith("chosen answer of the first pair, 5 tokens, of which 3")
    assert "  ab[[cd<|im_end|>]]" in lines and "  ab[[ef<|im_end|>]]" in lines
    assert "1 pair from" in made.summary and "3 tokens of the chosen" in made.summary


def test_held_out_sets_are_pairs_too(tmp_path: Path) -> None:
    row = {"prompt": "ab", "chosen": "cd", "rejected": "ef"}
    made = config(tmp_path, row)
    made = config(tmp_path, row, data={"test": str(tmp_path / "pairs.jsonl")})
    assert isinstance(load_held_out_rows(made, tokenizer(CHATML), "pair")["test"], PairSet)
