"""The tiny model maker: cached by its arguments, loadable by transformers in every family, and its teacher teaches the task."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pa_npu.config.sections.inputs import DataConfig, Dataset
from pa_npu.data.prompts import load_prompts
from pa_npu.rewards.answers import is_correct
from tools import make_tiny_model as tiny
from tools import tiny_edits

SMALL = ["--hidden", "64", "--layers", "1", "--train-questions", "40", "--test-questions", "10"]


def make(out: Path, *arguments: str) -> dict[str, Any]:
    assert tiny.main(["--out", str(out), *SMALL, *arguments]) == 0
    return json.loads((out / "tiny_model.json").read_text())


def snapshot(out: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(out)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in out.rglob("*.*")
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_was_made(family: str, tied: bool, tmp_path: Path) -> None:
    report = make(tmp_path / "m", "--random", "--family", family, *(["--tied"] if tied else []))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m" / "model")
    assert model.config.model_type == family and model.config.tie_word_embeddings is tied
    assert sum(parameter.numel() for parameter in model.parameters()) == report["parameters"]
    assert (
        model.dtype == torch.float32
        and model.config.eos_token_id == model.generation_config.eos_token_id == 1
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "model")
    assert len(tokenizer) == model.config.vocab_size == tiny.VOCAB_SIZE
    assert tokenizer.eos_token_id == model.config.eos_token_id

    # transformers puts its own pre-tokenizer in front of some families: tokens must not depend on
    # it.
    text = "<|user|>What is 47+38?\n\nÄpfel’s cost $1,234.50 -- 12 €\t#### 85<|end|>"
    expected = tiny.make_tokenizer()(text).input_ids
    assert tokenizer(text).input_ids == expected
    assert tokenizer.decode(expected) == text


def test_the_teacher_of_edits_writes_calls_that_repair_files_or_do_not(tmp_path: Path) -> None:
    report = make(tmp_path / "m", "--task", "edit", "--steps", "100", "--hidden", "128")
    assert report["right_after_asking"] > 0.9, (
        "it reads and writes files, also those of held-out tasks, and leaves mistakes in"
    )
    rows, held_out = (
        [json.loads(line) for line in (tmp_path / "m" / f"{of}.jsonl").open()]
        for of in ("train", "test")
    )
    assert not {name for row in rows for name in row["files"]} & {
        name for row in held_out for name in row["files"]
    }
    drawn = random.Random(1)
    signs = [
        tiny_edits.teacher_sign(row, drawn) in row["answer"] for row in rows for _ in range(50)
    ]
    assert 0.1 < sum(signs) / len(signs) < 0.35, "there is something to learn"
    for row in (*rows, *held_out):
        ((name, text),) = row["files"].items()
        assert text != row["answer"]
        (_, _, (written, _), *_) = tiny_edits.edit_turns(
            row, "+", ("<|user|>", "<|assistant|>"), ""
        )
        call = json.loads(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert call["arguments"]["name"] == name and " + " in call["arguments"]["text"]
        functions: dict[str, Any] = {}
        exec(row["answer"], functions)
        for test in row["tests"]:
            exec(test.partition("; ")[2], functions)


def test_an_agents_call_is_few_tokens_which_its_files_keep(tmp_path: Path) -> None:
    """Numbers are copied over as many; a model of this size learns that over eight, and not over
    seventy.
    """
    make(tmp_path / "m", "--random", "--task", "agent")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "model")
    assert len(tokenizer) == tiny.VOCAB_SIZE
    (call, _), *_ = tiny.call_turns(83, 73, "agent")
    asked = [{"role": "user", "content": "q"}]
    arguments = {"name": "calculator", "arguments": {"x": "83*73"}}
    output = {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]}
    begin, whole = (
        tokenizer.apply_chat_template(m, tokenize=False) for m in (asked, [*asked, output])
    )
    assert whole == begin + tiny.ASSISTANT + call, "as the template writes it"
    tokens = tokenizer(call).input_ids
    assert len(tokens) == len("83*73") + 3 and tokenizer.decode(tokens) == call


def test_a_second_call_does_nothing_and_other_arguments_make_it_anew(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "m"
    make(out, "--random", "--seed", "1")
    first = snapshot(out)
    make(out, "--random", "--seed", "1", "--threads", "2")
    assert snapshot(out) == first and "up to date" in capsys.readouterr().out
    make(out, "--random", "--seed", "2")
    second = snapshot(out)
    for name in ("model/model.safetensors", "train.jsonl", "test.jsonl"):
        assert second[name][1] != first[name][1], f"{name} does not depend on the seed"
    make(out, "--random", "--seed", "1")
    assert {name: data for name, (_, data) in snapshot(out).items()} == {
        name: data for name, (_, data) in first.items()
    }


def test_a_new_format_version_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "m", "--random")
    before = snapshot(tmp_path / "m")
    monkeypatch.setattr(tiny, "FORMAT_VERSION", tiny.FORMAT_VERSION + 1)
    make(tmp_path / "m", "--random")
    assert snapshot(tmp_path / "m") != before


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert tiny.main(["--out", str(tmp_path), *SMALL, "--random"]) == 2
    assert "was not made by this tool" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failing_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "make_model", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny.main(["--out", str(tmp_path / "m"), *SMALL])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hidden", "66", "--heads", "4"],
        ["--heads", "3"],
        ["--vocab", "300"],
        ["--train-questions", "0"],
    ],
)
def test_impossible_arguments_are_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        tiny.main(["--out", str(tmp_path / "m"), *SMALL, *arguments])
    assert caught.value.code == 2


def test_questions_are_disjoint_readable_and_right(tmp_path: Path) -> None:
    make(tmp_path / "m", "--random", "--train-questions", "500", "--test-questions", "100")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m" / "model")
    sets = []
    for name, number in (("train", 500), ("test", 100)):
        path = str(tmp_path / "m" / f"{name}.jsonl")
        prompts = load_prompts(
            Dataset(path=path), tokenizer, DataConfig(train=path), "data.test"
        ).prompts
        assert len(prompts) == number
        for prompt in prompts:
            x, y = map(int, prompt.row["question"][len("What is ") : -1].split("+"))
            assert int(prompt.answer) == x + y
            assert is_correct(prompt.row["answer"], prompt.answer)
        sets.append({prompt.text for prompt in prompts})
    assert len(sets[0]) == 500 and len(sets[1]) == 100 and not sets[0] & sets[1]


def test_the_student_of_two_teachers_has_rows_that_name_their_task(tmp_path: Path) -> None:
    make(tmp_path / "m", "--task", "both", "--steps", "1", "--slip-steps", "1")
    rows = [json.loads(line) for line in (tmp_path / "m" / "train.jsonl").read_text().splitlines()]
    signs = {"sums": "+", "products": "*"}
    assert [row["task"] for row in rows].count("sums") == 20 and len(rows) == 40
    assert all(signs[row["task"]] in row["question"] for row in rows)
    arguments = tiny.parse_arguments(["--out", "", "--task", "both", "--call-rate", "1"])
    (asked,) = tiny.answered_products(arguments, [(47, 83)], random.Random(1))
    assert asked == ("What is 47*83?", tiny.call_turns(47, 83, "calculator"))
    arguments.call_rate = 0
    (guessed,) = tiny.answered_products(arguments, [(47, 83)], random.Random(1))
    assert guessed[1][0][0].startswith("#### ")


def test_every_solution_ends_in_the_sum_and_a_slip_in_one_more() -> None:
    numbers = range(tiny.SMALLEST, tiny.LARGEST + 1)
    for x in numbers:
        for y in numbers:
            right, slipped = tiny.solution(x, y), tiny.solution(x, y, slip=1)
            assert right.endswith(f"\n#### {x + y}") and slipped.endswith(f"\n#### {x + y + 1}")
    assert tiny.solution(47, 38) == "7+8=15\n4+3+1=8\n#### 85"
    assert tiny.solution(41, 38, slip=1) == "1+8=10\n4+3+1=8\n#### 80"


def test_the_supervised_phase_learns_and_the_slipping_teacher_slips(tmp_path: Path) -> None:
    arguments = tiny.parse_arguments(["--out", "", "--hidden", "64", "--layers", "1"])
    tokenizer = tiny.make_tokenizer()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = tiny.make_model(arguments, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Five questions only: enough to see that loss and labels are right, in seconds.
    pairs = [(10 + 7 * number, 93 - 5 * number) for number in range(5)]
    order = random.Random(1)
    for slip_rate, expected in ((0.0, 0), (1.0, 1)):
        for _ in range(100):
            loss = tiny.supervised_step(model, tokenizer, optimizer, 3e-3, pairs, order, slip_rate)
        assert loss < 0.05
        assert [answer - x - y for (x, y), answer in tiny.greedy(model, tokenizer, pairs)] == [
            expected
        ] * 5


def test_demonstrations_are_the_training_questions_with_slips_in_their_answers(
    tmp_path: Path,
) -> None:
    make(tmp_path / "m", "--random", "--train-questions", "400", "--slip-rate", "0.25")
    right = [json.loads(line) for line in (tmp_path / "m" / "train.jsonl").read_text().splitlines()]
    shown = (tmp_path / "m" / "demonstrations.jsonl").read_text().splitlines()
    slips = 0
    for row, line in zip(right, shown, strict=True):
        demonstration = json.loads(line)
        assert demonstration["question"] == row["question"]
        difference = int(demonstration["answer"].split()[-1]) - int(row["answer"].split()[-1])
        assert difference in (0, 1) and (difference or demonstration == row)
        slips += difference
    assert 70 < slips < 130
