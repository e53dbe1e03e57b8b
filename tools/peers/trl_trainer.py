"""One run of a TRL trainer on prompts of a file, in TRL's own environment; writes what TRL logs after each step, with the time.

    python trl_trainer.py SPECIFICATION.json

tools/bench_peers.py writes the specification (`Work`) and reads the log: a JSON object per line,
the time under "seconds".
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
    weight_transfer,
)
from trl.generation import vllm_client, vllm_generation
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.peers import cpu_stand_ins
from tools.peers.rewards import of_completions

# an environment variable, which reaches the rollout worker's process too
_FIXED_LENGTHS = "BENCH_PEERS_FIXED_LENGTHS"


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    for module in (vllm_client, weight_transfer):
        module.open_trainer_endpoint = cpu_stand_ins.trainer_end
        module.packed_nccl_broadcast_producer = cpu_stand_ins.send
    rank = int(os.environ.get("RANK", "0"))
    os.sched_setaffinity(0, {work["cores"][rank]})
    torch.set_num_threads(1)
    lines = Path(work["prompts"]).read_text().splitlines()
    prompts = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    common: dict[str, Any] = {
        "output_dir": work["scratch"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": work["iterations"],
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "num_generations": work["responses"],
        "max_completion_length": work["response_tokens"],
        "temperature": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    common |= work["options"]
    build = asynchronous if work["mode"] == "async" else synchronous
    trainer = build(work, common, Dataset.from_dict({"prompt": prompts}), tokenizer)
    trainer.add_callback(StepLog(Path(work["log"]) if rank == 0 else None))
    trainer.train()


class StepLog(TrainerCallback):
    def __init__(self, path: Path | None) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._path is None or not logs or "train_runtime" in logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        with self._path.open("a") as file:
            file.write(
                json.dumps({"seconds": time.monotonic(), "step": state.global_step, **numbers})
                + "\n"
            )


def synchronous(work: dict[str, Any], common: dict[str, Any], dataset: Any, tokenizer: Any) -> Any:
    """GRPOTrainer with a vLLM server, or with an engine in each of its own processes."""
    vllm: dict[str, Any] = {"use_vllm": True, "vllm_mode": work["mode"]}
    if work["mode"] == "server":
        vllm |= {"vllm_server_base_url": work["server"], "vllm_group_port": work["port"]}
        vllm_client.VLLMClient.init_communicator = join_on_cpu
    else:
        vllm |= {"vllm_max_model_length": work["max_model_len"]}
        generation = vllm_generation.VLLMGeneration
        generation.sync_weights = cpu_stand_ins.reload_packed(generation.sync_weights)
        vllm_generation.LLM = functools.partial(
            vllm_generation.LLM,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=2**29,
            block_size=work["block_size"],
            enable_chunked_prefill=False,
        )
    if work["fixed_lengths"]:
        vllm["generation_kwargs"] = {"ignore_eos": True}
    return GRPOTrainer(
        model=work["model"],
        reward_funcs=of_completions,
        args=GRPOConfig(**common, **vllm, shuffle_dataset=False),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(**work["lora"], task_type="CAUSAL_LM") if work["lora"] else None,
    )


def join_on_cpu(self: Any, device: Any = None) -> None:
    """VLLMClient.init_communicator without its check for a CUDA device; on a thread, because both
    ends wait for each other.
    """
    import threading

    info = {
        "master_address": "127.0.0.1",
        "master_port": self.group_port,
        "rank_offset": 1,
        "world_size": 2,
        "packed": True,
    }
    url = f"{self.base_url}/init_weight_transfer_engine"
    asked = threading.Thread(
        target=self._post, args=(url,), kwargs={"json": {"init_info": info}}, daemon=True
    )
    asked.start()
    self.communicator = cpu_stand_ins.trainer_end(info)
    asked.join()


def asynchronous(work: dict[str, Any], common: dict[str, Any], dataset: Any, tokenizer: Any) -> Any:
    if work["fixed_lengths"]:
        os.environ[_FIXED_LENGTHS] = "1"
    # the tiny model's chat template is none that TRL knows the answers of
    content = {"close_pattern": r"<\|end\|>\s*", "content": "text"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"content": content},
    }
    kernels = type("Kernels", (), {"flash_attn_varlen_func": staticmethod(cpu_stand_ins.attend)})
    packing._flash_attn = lambda: kernels
    # it asks CUDA for the device's name
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    trainer = AsyncGRPOTrainer(
        model=work["model"],
        reward_funcs=of_completions,
        # token_budget=0: microbatches of so many responses, not of so many tokens, so that an
        # update has the same work
        args=AsyncGRPOConfig(**common, vllm_server_base_url=work["server"], token_budget=0),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.add_callback(FreeRolloutWorker(trainer))
    return trainer


class FreeRolloutWorker(TrainerCallback):
    """Lets TRL's rollout process run on every core, as this project's coordinator does; it inherits
    the trainer's one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        process = self._trainer.rollout_worker._process
        if process is not None:
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))


_post = async_rollout_worker._AsyncRolloutLoop._post


async def _post_fixed(
    self: Any, path: str, payload: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """AsyncGRPOConfig has no generation_kwargs to ask for responses of one length with."""
    if os.environ.get(_FIXED_LENGTHS):
        payload = {**payload, "ignore_eos": True}
    return await _post(self, path, payload, *rest, **named)


async_rollout_worker._AsyncRolloutLoop._post = _post_fixed

if __name__ == "__main__":
    main()
