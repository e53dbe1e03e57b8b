"""Evaluation harnesses ask engines and runs, unmodified, in an environment of their own: lm-eval and Inspect."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from pa_npu.config.schema import Config
from pa_npu.evaluation.harness_file import write_harness_results
from pa_npu.evaluation.results import Judged
from tests.helpers.engine_process import API_KEY, EngineProcess
from tests.helpers.environments import needs, python_of
from tests.helpers.launched import Launched, settings
from tools import make_tiny_model

PYTHON = python_of("harnesses")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    needs("harnesses"),
]

TIMEOUT_S = 400.0
MAX_TOKENS = 4
CHOICES = ["#### 17", "#### 42"]
ASKED = "<|user|>{{question}}<|assistant|>"
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def tiny():
    rows = json_dataset({rows!r}, FieldSpec(input="question", target="written"))
    return Task(dataset=rows, solver=generate(), scorer=exact())
"""


@dataclass(frozen=True)
class Questions:
    """A random model, and what transformers says of its questions.

    rows: by question, which of its choices is the likelier (`label`), and the greedy answer
        (`written`).
    """

    tiny: Path
    rows: Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    tiny = tmp_path_factory.mktemp("tiny")
    arguments = ["--out", str(tiny), "--random", "--train-questions", "64"]
    assert make_tiny_model.main([*arguments, "--test-questions", "24"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    rows = []
    for number, line in enumerate((tiny / "test.jsonl").read_text().splitlines()):
        choices = CHOICES[:: 1 if number % 2 else -1]  # else one of them were always the likelier
        question = json.loads(line)["question"]
        context = tokenizer(f"<|user|>{question}<|assistant|>")["input_ids"]
        scores = [_loglikelihood(model, context, tokenizer(text)["input_ids"]) for text in choices]
        ids = torch.tensor([context])
        out = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        written = tokenizer.decode(out[0, len(context) :], skip_special_tokens=True)
        label = int(scores[1] > scores[0])
        rows.append({"question": question, "choices": choices, "label": label, "written": written})
    assert {row["label"] for row in rows} == {0, 1}
    return Questions(tiny, rows)


def _loglikelihood(model: torch.nn.Module, context: list[int], choice: list[int]) -> float:
    tokens = torch.tensor([[*context, *choice]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
    return float(own[len(context) - 1 :].sum())


def _run(command: Sequence[object], directory: Path, **variables: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(PYTHON), *map(str, command)],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def _write_rows(questions: Questions, directory: Path) -> Path:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions.rows))
    return file


def _assert_lm_eval_agrees(url: str, key: str, questions: Questions, directory: Path) -> None:
    """With the likelihood of given texts, several at once, and with written ones."""
    rows = _write_rows(questions, directory)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": ASKED,
        "target_delimiter": "",
    }
    tasks = directory / "tasks"
    tasks.mkdir()
    likely = {**common, "task": "tiny_likely", "output_type": "multiple_choice"}
    likely |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    (tasks / "likely.yaml").write_text(yaml.safe_dump(likely))
    text = {**common, "task": "tiny_text", "output_type": "generate_until"}
    text |= {"doc_to_target": "{{written}}", "metric_list": [{"metric": "exact_match"}]}
    text |= {"generation_kwargs": {"until": ["@@"], "max_gen_toks": MAX_TOKENS, "temperature": 0.0}}
    (tasks / "text.yaml").write_text(yaml.safe_dump(text))
    where = f"base_url={url}/v1/completions,model=policy,max_length=196"
    tokens = f"tokenizer_backend=huggingface,tokenizer={questions.tiny / 'model'}"
    command = ["-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", f"{where},{tokens}", "--tasks", "tiny_likely,tiny_text"]
    command += ["--include_path", str(tasks), "--batch_size", "4"]
    command += ["--output_path", str(directory / "results")]
    _run(command, directory, OPENAI_API_KEY=key)
    (actual,) = (directory / "results").rglob("results_*.json")
    results = json.loads(actual.read_text())["results"]
    assert results["tiny_likely"]["acc,none"] == 1.0
    assert results["tiny_text"]["exact_match,none"] == 1.0


async def test_lm_eval_finds_of_an_engine_what_transformers_finds(
    questions: Questions, tmp_path: Path
) -> None:
    """A random model: what it finds likelier, and what it writes, question by question."""
    model = questions.tiny / "model"
    engine = EngineProcess("transformers", model, tmp_path, {"max_num_seqs": 16})
    try:
        await engine.wait_ready()
        _assert_lm_eval_agrees(engine.url, API_KEY, questions, tmp_path)
    finally:
        engine.kill()


def test_lm_eval_and_inspect_find_of_a_run_what_transformers_finds(
    questions: Questions, tmp_path: Path
) -> None:
    """While it trains, at a rate that changes nothing."""
    keys: dict[str, object] = {
        "agent.port": 0,
        "data.max_prompt_tokens": 120,
        "data.test": "null",
        "optimizer.learning_rate": "1e-12",
        "rollout.max_response_tokens": 64,
        "schedule.iterations": 100_000,
        "telemetry.trackers": "[]",
    }
    directory = tmp_path / "run"
    run = Launched(tmp_path, "run", *settings(questions.tiny, directory, **keys))
    try:
        metrics = directory / "metrics.jsonl"
        run.wait_for(
            lambda: metrics.is_file() and bool(metrics.read_text()), "an iteration", TIMEOUT_S
        )
        url = json.loads((directory / "gateway.json").read_text())["url"]
        key = (directory / "api_key").read_text().strip()
        _assert_lm_eval_agrees(url, key, questions, tmp_path)

        task = tmp_path / "tiny.py"
        task.write_text(INSPECT_TASK.format(rows=str(_write_rows(questions, tmp_path))))
        command = ["-m", "inspect_ai", "eval", task.name, "--model", "openai-api/run/policy"]
        command += ["--temperature", 0, "--max-tokens", MAX_TOKENS, "--display", "none"]
        command += ["--log-format", "json", "--log-dir", tmp_path / "logs"]
        _run(command, tmp_path, RUN_API_KEY=key, RUN_BASE_URL=f"{url}/v1")
        (log,) = (tmp_path / "logs").glob("*.json")
        results = json.loads(log.read_text())["results"]
        assert results["completed_samples"] == len(questions.rows)
        assert results["scores"][0]["metrics"]["mean"]["value"] == 1.0
    finally:
        run.close()


def test_lm_eval_shows_the_results_that_evaluate_writes(tmp_path: Path) -> None:
    answers = [
        Judged("sums", number, "1+1?", "2", "greedy", 0, "2", "2", number < 3, 1.0, 5, True)
        for number in range(4)
    ]
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    file = tmp_path / "version_000000.json"
    write_harness_results(file, answers, config)
    table = _run(
        [
            "-c",
            "import json, sys; from lm_eval.utils import make_table; "
            "print(make_table(json.load(open(sys.argv[1]))))",
            file,
        ],
        tmp_path,
    )
    (row,) = [line for line in table.splitlines() if line.startswith("|sums")]
    assert "exact_match" in row and "0.75" in row and "0.25" in row, table
