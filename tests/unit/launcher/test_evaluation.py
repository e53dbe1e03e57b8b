"""`pa-npu evaluate` over an engine that is attached: a table, results by question, a comparison; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pa_npu.config.sections.inputs import DataConfig
from pa_npu.data.prompt_format import write_prompt_format
from pa_npu.data.prompts import PromptSet
from pa_npu.errors import UserError
from pa_npu.evaluation.results import read_results
from pa_npu.launcher import evaluation
from pa_npu.launcher.cli import main
from tests.helpers.coordinator_run import write_model
from tests.helpers.stand_in_engine import API_KEY, stand_in_engines
from tools.stand_in import Speed


def test_a_model_is_evaluated_and_compared_by_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)
    write_model(tmp_path / "model")
    rows = [{"question": f"w{3 + i} w{4 + i}", "answer": str(i)} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with stand_in_engines(1, Speed(stride=4)) as engines:
        command = [
            "evaluate",
            "--model",
            str(tmp_path / "model"),
            "--data",
            f"a={tmp_path / 'a.jsonl'}",
        ]
        keys = [
            f"rollout.attach=[{engines[0].url}]",
            "run.device=cpu",
            "rollout.max_response_tokens=24",
            "evaluate.samples=4",
        ]
        assert main([*command, "--output", str(tmp_path / "one"), *keys]) == 0
        first = capsys.readouterr().out
        results = tmp_path / "one" / "evaluations" / "version_000000.parquet"
        assert (
            main([*command, "--output", str(tmp_path / "two"), "--compare", str(results), *keys])
            == 0
        )
    second = capsys.readouterr().out
    for name in ("greedy", "avg@4", "pass@2", "pass@4", "maj@4"):
        assert f"a {name}: " in first
    assert "a: 6 questions, 30 answers" in first and str(results) in first
    assert len(read_results(results)) == 6 * 5
    assert f"a greedy: +0.000 (-0.500 to +0.500) against {results}, 6 questions in both" in second

    # the same from the files alone
    assert main(["evaluate", "--results", str(results), "--compare", str(results)]) == 0
    shown = capsys.readouterr().out.splitlines()
    checking, *reported = first.splitlines()
    assert checking == "checking model, data and rewards"
    assert [line for line in shown if "against" not in line] == reported[: len(shown) - 5]
    assert sum(" +0.000 (-0.500 to +0.500) against " in line for line in shown) == 5


def test_a_trained_model_is_asked_as_its_run_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    check = evaluation.check_held_out

    def noted(*arguments: Any) -> PromptSet:
        prompts = check(*arguments)
        asked.append(prompts.prompts[0].text)
        return prompts

    def stop(*_: Any) -> None:
        raise UserError("enough")

    monkeypatch.setattr(evaluation, "check_held_out", noted)
    monkeypatch.setattr(evaluation, "_engines", stop)
    write_model(tmp_path / "model")
    write_prompt_format(
        tmp_path / "model",
        DataConfig(train="t", instruction="w9 w9", system_prompt="w8"),
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    )
    (tmp_path / "a.jsonl").write_text('{"question": "w3 w4", "answer": "1"}\n')
    command = [
        "evaluate",
        "--model",
        str(tmp_path / "model"),
        "--data",
        f"a={tmp_path / 'a.jsonl'}",
    ]
    command += ["--output", str(tmp_path / "out"), "run.device=cpu"]
    assert main(command) == 2
    assert main([*command, "data.instruction=w7"]) == 2
    assert (
        main([*command, "data.instruction=w7", "data.system_prompt=w6", "data.chat_template=never"])
        == 2
    )
    assert asked == ["[system]w8[user]w3 w4\nw9 w9", "[system]w8[user]w3 w4\nw7", "w6\nw3 w4\nw7"]
    output = capsys.readouterr().out
    assert "data.instruction, data.system_prompt: as in the run that trained" in output


def test_questions_are_read_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "pa_npu.launcher.evaluation._engines", lambda *_: pytest.fail("engines were started")
    )
    write_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"question": "w3 w4", "answer": "1"}\n{"question": ')
    command = [
        "evaluate",
        "--model",
        str(tmp_path / "model"),
        "--output",
        str(tmp_path / "out"),
        "run.device=cpu",
    ]
    assert main([*command, "--data", f"a={tmp_path / 'a.jsonl'}"]) == 2
    assert "a.jsonl:2: not valid JSON" in capsys.readouterr().err
    assert main([*command, "--data", f"a={tmp_path / 'b.jsonl'}"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: --data a: {tmp_path / 'b.jsonl'} does not exist"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "m", "--data", "x.jsonl"], "is not NAME=FILE"),
        (["--model", "m", "--data", "a b=x.jsonl"], "--data: 'a b' is no name of a set"),
        (["--model", "m", "--data", "a=x.jsonl", "--frobnicate"], "unknown option"),
        (
            ["--model", "m", "--data", "a=x.jsonl", "--data", "a=y.jsonl"],
            "a set is called a already",
        ),
        (
            ["--model", "/nowhere/m", "--data", "a=x.jsonl"],
            "error: --model: /nowhere/m is not a directory",
        ),
        (["--model", "m", "--data", "a=x.jsonl", "--output", " "], "--output: ' ' is blank"),
        (
            ["--checkpoint", "/nowhere", "--data", "a=x.jsonl"],
            "error: --checkpoint: /nowhere is not a complete checkpoint",
        ),
        (["--model", "m"], "--data NAME=FILE is needed"),
        (["--results", "none.parquet"], "none.parquet: does not exist"),
        (["--results", "a.parquet", "evaluate.samples=4"], "would be read by nothing"),
        (
            ["--model", "m", "--data", "a=x.jsonl", "--compare", "none.parquet"],
            "none.parquet: does not exist",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *arguments]) == 2
    output = capsys.readouterr().err
    assert words in output and len(output.splitlines()) == 1
