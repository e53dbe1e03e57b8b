"""lm-eval asks an engine for texts and for the likelihood of given ones, unmodified, in an environment of its own.

PA_NPU_LM_EVAL names the Python that has it: pip install 'lm-eval[api]' transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.engine_process import API_KEY, EngineProcess
from tools import make_tiny_model

PYTHON = os.environ.get("PA_NPU_LM_EVAL")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="PA_NPU_LM_EVAL names no Python with lm-eval"),
]

CHOICES = ["#### 17", "#### 42"]
ASKED = "<|user|>{{question}}<|assistant|>"


async def test_its_accuracies_are_those_of_transformers(tmp_path: Path) -> None:
    """A random model: what it finds likelier, and what it writes, is checked question by question."""
    tiny = tmp_path / "tiny"
    arguments = ["--out", str(tiny), "--random", "--test-questions", "24"]
    assert make_tiny_model.main(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    rows = [json.loads(line) for line in (tiny / "test.jsonl").read_text().splitlines()]
    likelier, written = [], []
    for row in rows:
        context = tokenizer(f"<|user|>{row['question']}<|assistant|>")["input_ids"]
        scores = [_loglikelihood(model, context, tokenizer(text)["input_ids"]) for text in CHOICES]
        likelier.append(int(scores[1] > scores[0]))
        ids = torch.tensor([context])
        out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        written.append(tokenizer.decode(out[0, len(context) :], skip_special_tokens=True))
    data = tmp_path / "rows.jsonl"
    with data.open("w") as file:
        for number, row in enumerate(rows):
            output = {"label": likelier[number], "written": written[number]}
            file.write(
                json.dumps({"question": row["question"], "choices": CHOICES, **output}) + "\n"
            )
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": ASKED,
        "target_delimiter": "",
    }
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    likely = {**common, "task": "tiny_likely", "output_type": "multiple_choice"}
    likely |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    (tasks / "likely.yaml").write_text(yaml.safe_dump(likely))
    text = {**common, "task": "tiny_text", "output_type": "generate_until"}
    text |= {"doc_to_target": "{{written}}", "metric_list": [{"metric": "exact_match"}]}
    text |= {"generation_kwargs": {"until": ["@@"], "max_gen_toks": 4, "temperature": 0.0}}
    (tasks / "text.yaml").write_text(yaml.safe_dump(text))

    engine = EngineProcess("transformers", tiny / "model", tmp_path, {"max_num_seqs": 16})
    try:
        await engine.wait_ready()
        where = f"base_url={engine.url}/v1/completions,model=policy,max_length=196"
        tokens = f"tokenizer_backend=huggingface,tokenizer={tiny / 'model'}"
        assert PYTHON is not None
        command = [PYTHON, "-m", "lm_eval", "run", "--model", "local-completions"]
        command += ["--model_args", f"{where},{tokens}", "--tasks", "tiny_likely,tiny_text"]
        command += ["--include_path", str(tasks), "--batch_size", "4"]
        command += ["--output_path", str(tmp_path / "results")]
        environment = {**os.environ, "OPENAI_API_KEY": API_KEY, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        engine.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    (actual,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(actual.read_text())["results"]
    assert results["tiny_likely"]["acc,none"] == 1.0
    assert results["tiny_text"]["exact_match,none"] == 1.0


def _loglikelihood(model: torch.nn.Module, context: list[int], choice: list[int]) -> float:
    tokens = torch.tensor([[*context, *choice]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
    return float(own[len(context) - 1 :].sum())
