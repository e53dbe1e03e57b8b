"""vLLM on the CPU with a mixture of experts, in one process: python -m tests.helpers.vllm_mixture MODEL NEW OUT

Loads MODEL, then the weights of NEW twice as the worker extension loads a publish: without and with
its repair of experts. OUT: JSON of the largest difference of log-probs from transformers at each of
the three, of what the extension says of NEW without the experts of its last layer ("missing"), and
of what of its live memory is other than NEW ("live") and other than NEW with one expert and one
norm scaled by 1% on the way into vLLM's loader ("scaled").
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pa_npu.weight_transfer.transport import WeightSyncError

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def whole_weights() -> SimpleNamespace:
    """Stands where a worker's receiver is: weights come whole, untied, each time."""
    return SimpleNamespace(is_tied=False, merges=False, whole=iter, is_sent_once=lambda name: False)


def reload(worker: Any, directory: str, repair: bool, without: str = "nothing") -> str:
    """Loads a directory's weights, and returns what was said where they were refused. without: in
    the names of those left out.
    """
    from pa_npu.engines.vllm import worker as extension

    pack_again = extension.pack_again
    extension.pack_again = pack_again if repair else lambda model: None
    weights = load_file(Path(directory) / "model.safetensors")
    worker = getattr(worker, "worker", worker)  # vLLM hands over what wraps it
    worker._pa_receiver = whole_weights()
    try:
        worker._pa_load(
            0, [(name, weight) for name, weight in weights.items() if without not in name], tuple
        )
    except WeightSyncError as error:
        return str(error)
    finally:
        extension.pack_again = pack_again
        del worker._pa_receiver
    return ""


def differing(
    worker: Any, directory: str, scaled: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Loads a directory's weights, those with `scaled` in their names times 1.01 on their way into
    the loader.

    Returns the names of live memory that holds something else than the directory, and of tensors
    that have no place.
    """
    from pa_npu.engines.vllm import worker as extension
    from pa_npu.weight_transfer.contents import follows

    weights = load_file(Path(directory) / "model.safetensors")
    worker = getattr(worker, "worker", worker)
    worker._pa_receiver = whole_weights()
    load = extension.WorkerExtension._pa_load_weights

    def change(self: Any, version: int, received: Any, kept: bool) -> list[str]:
        changed = (
            (name, w * 1.01 if any(part in name for part in scaled) else w) for name, w in received
        )
        return load(self, version, changed, kept)

    extension.WorkerExtension._pa_load_weights = change  # type: ignore[method-assign]
    try:
        report = worker._pa_load(0, list(weights.items()), tuple)["live"]
    finally:
        extension.WorkerExtension._pa_load_weights = load  # type: ignore[method-assign]
        del worker._pa_receiver
    wrong = [
        name
        for name, (contents, _, inputs, _) in report["memory"].items()
        if not follows(contents, inputs, 1)
    ]
    return wrong, report["unplaced"]


def main(directory: str, new: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        disable_log_stats=True,
        worker_extension_cls="pa_npu.engines.vllm.worker.WorkerExtension",
    )

    def worst(path: str) -> float:
        asked = SamplingParams(
            max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False
        )
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False
        )
        model, most = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.0
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens = list(answer.outputs[0].token_ids)
            actual = torch.tensor(
                [next(iter(logprob.values())).logprob for logprob in answer.outputs[0].logprobs]
            )
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            most = max(most, (actual - expected).abs().max().item())
        return most

    result: dict[str, Any] = {"loaded": worst(directory)}
    for name, repair in (("without the repair", False), ("with it", True)):
        assert llm.collective_rpc(reload, args=(new, repair)) == [""]
        result[name] = worst(new)
    (result["missing"],) = llm.collective_rpc(reload, args=(new, True, "layers.1.mlp.experts"))
    (result["live"],) = llm.collective_rpc(differing, args=(new,))
    (result["scaled"],) = llm.collective_rpc(
        differing, args=(new, ("experts.2.up_proj", "layers.0.input_layernorm"))
    )
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
