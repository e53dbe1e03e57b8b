#!/usr/bin/env python
"""Train tiny random models of many architectures for two iterations with trainer.backend=fsdp, and write docs/models.md's table.

    python tools/try_models.py                      all, by vLLM where it serves them, else by the transformers engine
    python tools/try_models.py mistral --engine transformers --work .cache/models

A row has what `pa-npu run` says: how the model is packed, the engine, and the difference of
engine's and trainer's log-probs after each publish, the second of which is of trained weights.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tools import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- by tools/try_models.py -->"
END = "<!-- end -->"
TIMEOUT_S = 400.0
# Graded, so that responses of a random model differ in it: without differences there would be no
# gradient.
PATTERNS = ("[0-4]", "[5-9]", "[a-h]", "[i-q]", "[r-z]", "[A-Z]", "[^0-9A-Za-z ]")
REWARD = json.dumps([{"name": "format", "pattern": pattern} for pattern in PATTERNS])
SHOWN = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma3_text",
    "phi",
    "phi3",
    "glm4",
    "granite",
    "olmo2",
    "qwen3_moe",
    "qwen3_5_text",
    "gemma2",
    "deepseek_v3",
)

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 16,
}
# Models without a family file by model_type, with what their configurations need beside the usual.
OTHERS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True},
    "phi": {},
    "phi3": {},
    "glm4": {"head_dim": 32},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "olmo2": {},
    "cohere2": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.25,
    },
    "gpt2": {"resid_pdrop": 0.1},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        **_LATENT,
        **{
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        **{"q_lora_rank": 16, "first_k_dense_replace": 1},
    },
    "qwen3_next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32, "head_dim": 32},
    "qwen3_5_text": {**_LINEAR, "head_dim": 32},
}


def make_other(directory: Path, kind: str, *, seed: int = 0, **changes: object) -> Path:
    """Write a random model (2 layers, 4 heads, fp32) of OTHERS, or of any other model_type, and
    return its directory.
    """
    usual = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    others = {
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(
        kind, **{**usual, **others, **tokens, **OTHERS.get(kind, {}), **changes}
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # biases and norms start at constants, which would hide a mistake in their mapping
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "weight" in name or "experts" in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory


def make_usable(directory: Path, kind: str, tiny: Path) -> Path:
    """Write make_other's model with the tokenizer of tiny/model beside it, and return its
    directory.
    """
    vocabulary = json.loads((tiny / "model" / "config.json").read_text())["vocab_size"]
    make_other(directory, kind, vocab_size=vocabulary)
    for file in (*(tiny / "model").glob("*token*"), *(tiny / "model").glob("chat_template*")):
        shutil.copyfile(file, directory / file.name)
    return directory


def run(kind: str, engine: str, tiny: Path, work: Path) -> tuple[list[dict[str, float]], str] | str:
    """Train two iterations; returns their records and how the model is packed, or the line that
    says why there are none.
    """
    model = work / kind / "model"
    directory = work / kind / engine
    shutil.rmtree(work / kind, ignore_errors=True)
    make_usable(model, kind, tiny)
    settings = {
        **{"run.dir": directory, "run.device": "cpu", "model.path": model, "model.dtype": "fp32"},
        **{
            "data.train": tiny / "train.jsonl",
            "data.max_prompt_tokens": 32,
            "trainer.backend": "fsdp",
        },
        **{
            "rollout.backend": engine,
            "rollout.responses_per_prompt": 4,
            "rollout.max_response_tokens": 16,
        },
        **{
            "rollout.max_num_batched_tokens": 4096,
            "rollout.kv_cache_gib": 0.125,
            "publish.noise_margin": "null",
        },
        **{
            "schedule.iterations": 2,
            "schedule.prompts_per_iteration": 4,
            "optimizer.learning_rate": 1e-3,
        },
        **{"reward.functions": REWARD, "telemetry.trackers": "[]", "checkpoint.every": 0},
    }
    command = [
        sys.executable,
        "-m",
        "pa_npu.launcher",
        "run",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not done in {TIMEOUT_S:.0f} s"
    (work / f"{kind}-{engine}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return lines[-1][:200] if lines else f"code {done.returncode}"
    match = re.search(
        r"model\.path: transformers \w+, (.*?)(?:, as a trial|$)", done.stdout, re.MULTILINE
    )
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return records, match[1] if match else "prompts are shared (family file)"


def row(kind: str, engine: str, records: list[dict[str, float]], way: str) -> str:
    differences = " | ".join(
        f"{r['logprob_diff_mean']:.1e}, {r['logprob_diff_max']:.1e}" for r in records
    )
    return f"| {kind} | {way} | {engine} | {differences} | {records[0]['grad_norm']:.2g} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=SHOWN, help="model_types; those of the page by default"
    )
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--work", default=".cache/models", help="directory of models and runs")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the rows into docs/models.md, beside those of other models",
    )
    arguments = parser.parse_args(argv)
    work = Path(arguments.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    made = [
        "--out",
        str(work / "tiny"),
        "--random",
        "--train-questions",
        "64",
        "--test-questions",
        "8",
    ]
    make_tiny_model.main(made)
    failed = 0
    for kind in arguments.models:
        for engine in (
            ("vllm", "transformers") if arguments.engine == "auto" else (arguments.engine,)
        ):
            outcome = run(kind, engine, work / "tiny", work)
            if isinstance(outcome, tuple):
                line = row(kind, engine, *outcome)
                print(line, flush=True)
                if arguments.write:
                    write(kind, line)
                break
            print(f"{kind} by {engine}: {outcome}", flush=True)
        else:
            failed += 1
    return min(failed, 1)


def write(kind: str, line: str) -> None:
    """Replace or add the model's row."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    head, rule, *rows = table.strip().splitlines()
    known = {row_text.split("|")[1].strip(): row_text for row_text in rows} | {kind: line}
    PAGE.write_text(f"{before}{BEGIN}\n{chr(10).join([head, rule, *known.values()])}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
