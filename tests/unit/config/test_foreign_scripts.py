"""Scripts of other systems: each plans on the devices that it was written for, or is named as another system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.launcher.cli import main as launcher
from tools.import_config import main

VERL_HEAD = "set -x\npython3 -m verl.trainer.main_ppo \\\n"
VERL_DATA = """    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.max_prompt_length=512 data.max_response_length=1024 \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.rollout.name=vllm \\
    trainer.logger='["console","tensorboard"]' trainer.project_name=p trainer.experiment_name=e \\
"""
VERL_8B = (
    VERL_HEAD
    + VERL_DATA
    + """    data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
)
VERL_LORA = (
    VERL_HEAD
    + VERL_DATA
    + """    data.train_batch_size=16 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \\
    actor_rollout_ref.model.target_modules=[q_proj,v_proj] \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \\
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps=90
"""
)
VERL_MIXTURE = r"""#!/usr/bin/env bash
set -xeuo pipefail
NNODES=${NNODES:-1}
offload=True
max_prompt_length=$((1024 * 1))
max_response_length=$((1024 * 2))
EP=${EP:-8}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    data.train_files="['$HOME/a/train.parquet', '$HOME/b/train.parquet']" \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    data.train_batch_size=512 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Base \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    actor_rollout_ref.actor.megatron.grad_offload=${offload} \
    actor_rollout_ref.actor.megatron.optimizer_offload=${offload} \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP} \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.max_num_batched_tokens=2048 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=512 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.log=False \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" trainer.total_epochs=10
"""
VERL_COLOCATED = VERL_8B.replace("trainer.nnodes=1", "trainer.nnodes=2").replace(
    "Qwen3-8B", "Qwen2.5-32B-Instruct"
)
VERL_TURNS = (
    'PROJECT_DIR="$(pwd)"\n'
    + VERL_HEAD
    + '    --config-path="$PROJECT_DIR/config" --config-name=gsm8k_multiturn_grpo \\\n'
    + VERL_DATA
    + """    data.train_batch_size=256 data.return_raw_chat=True \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.n=16 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=100
"""
)
TRL_OPTIONS = (
    " --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/DeepMath-103K "
    "--learning_rate 1e-6 --num_generations 8 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 4 --max_completion_length 512 --max_steps 100 --report_to none "
    "--reward_funcs accuracy_reward think_format_reward"
)
TRL_GRPO = (
    f"accelerate launch --num_processes 4 --mixed_precision bf16 trl/scripts/grpo.py{TRL_OPTIONS}\n"
)
TRL_SERVER = (
    "CUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model Qwen/Qwen2.5-7B --tensor-parallel-size 2 "
    "--data-parallel-size 2 &\n"
    "CUDA_VISIBLE_DEVICES=4,5,6,7 accelerate launch grpo.py --use_vllm --vllm_mode server"
    f"{TRL_OPTIONS.replace('Qwen2.5-1.5B-Instruct', 'Qwen2.5-7B')}\n"
)
TRL_LORA = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("openai/gsm8k", "main", split="train")
dataset = dataset.map(lambda row: {"prompt": row["question"]}).shuffle(seed=1)
peft_config = LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM")
args = GRPOConfig(
    output_dir="runs/lora", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, num_generations=8,
    per_device_train_batch_size=8, max_completion_length=256, max_steps=50, model_init_kwargs={"dtype": "bfloat16"},
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct", reward_funcs=[accuracy_reward], args=args, train_dataset=dataset, peft_config=peft_config
)
trainer.train()
"""
TRL_ONLINE_DPO = (
    "accelerate launch --num_processes 2 examples/scripts/online_dpo.py --model_name_or_path "
    "Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/tldr --learning_rate 5e-7 "
    "--per_device_train_batch_size 8 --gradient_accumulation_steps 4 --max_new_tokens 128 --beta "
    "0.1 --missing_eos_penalty 1.0 --use_peft --lora_r 32 --max_steps 60 --report_to none\n"
)


def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, *options: str
) -> Config:
    """The configuration that the tool writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for variable in ("NNODES", "EP", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    Path(name).write_text(text)
    origin = "verl" if "verl" in text else "trl"
    assert main(["--from", origin, name, "--output", "ours.yaml", *options]) == 0
    return load_config(["ours.yaml"])


def plan(*options: str) -> int:
    return launcher(
        ["plan", "--config", "ours.yaml", "--device", "cuda", "--device-memory-gib", "96", *options]
    )


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the tool says of each key, by the key."""
    lines = [
        line.partition(": ")[2].partition(" = ") for line in capsys.readouterr().err.splitlines()
    ]
    return {name: why for name, _, why in lines}


@pytest.mark.parametrize(
    ("name", "text", "devices", "expected"),
    [
        (
            "8b.sh",
            VERL_8B,
            8,
            {
                "trainer.backend": "fsdp",
                "trainer.recompute": "full",
                "optimizer.offload": True,
                "placement.colocate": True,
                "rollout.engines": 4,
                "rollout.tensor_parallel": 2,
                "data.answer_column": "reward_model.ground_truth",
                "schedule.updates_per_iteration": 4,
                "run.dir": "runs/e",
            },
        ),
        (
            "lora.sh",
            VERL_LORA,
            2,
            {
                "trainer.backend": "fsdp",
                "lora.rank": 64,
                "lora.alpha": 32,
                "lora.targets": ("q_proj", "v_proj"),
                "placement.colocate": True,
                "schedule.iterations": 90,
            },
        ),
        (
            "mixture.sh",
            VERL_MIXTURE,
            8,
            {
                "trainer.backend": "megatron",
                "trainer.expert_parallel": 8,
                "trainer.recompute": "full",
                "optimizer.offload": True,
                "rollout.tensor_parallel": 4,
                "rollout.max_num_batched_tokens": 3072,
            },
        ),
        (
            "colocated.sh",
            VERL_COLOCATED,
            16,
            {
                "placement.colocate": True,
                "placement.nnodes": 2,
                "placement.devices_per_node": 8,
                "placement.cluster": "ray",
            },
        ),
        ("turns.sh", VERL_TURNS, 8, {"environment.name": "agents", "environment.max_turns": 5}),
        (
            "grpo_trl.sh",
            TRL_GRPO,
            4,
            {
                "trainer.backend": "fsdp",
                "placement.colocate": True,
                "schedule.prompts_per_iteration": 8,
                "microbatch.responses": 4,
                "data.train": "trl-lib/DeepMath-103K",
            },
        ),
        (
            "server_trl.sh",
            TRL_SERVER,
            8,
            {
                "placement.colocate": False,
                "rollout.engines": 2,
                "rollout.tensor_parallel": 2,
                "trainer.devices": 4,
            },
        ),
        (
            "online_dpo_trl.sh",
            TRL_ONLINE_DPO,
            2,
            {
                "algorithm.name": "online-dpo",
                "algorithm.kl_coef": 0.1,
                "rollout.responses_per_prompt": 2,
                "rollout.max_response_tokens": 128,
                "schedule.prompts_per_iteration": 64,
                "lora.rank": 32,
            },
        ),
        (
            "lora_trl.py",
            TRL_LORA,
            1,
            {
                "lora.rank": 16,
                "lora.alpha": 64,
                "lora.targets": ("q_proj", "v_proj"),
                "rollout.memory_fraction": 0.3,
                "placement.colocate": True,
                "data.train": "openai/gsm8k",
                "model.dtype": "bf16",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_script_of_another_system_plans_on_the_devices_that_it_was_written_for(
    name: str,
    text: str,
    devices: int,
    expected: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = planned(tmp_path, monkeypatch, name, text)
    assert config.devices.num_devices == devices
    values = {
        key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2])
        for key in expected
    }
    assert values == expected
    assert plan() == 0


def test_devices_that_a_program_does_not_say_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(tmp_path, monkeypatch, "lora_trl.py", TRL_LORA, "--devices", "8")
    assert (
        config.devices.num_devices == 8
        and config.placement.colocate
        and config.schedule.prompts_per_iteration == 8
    )
    assert plan() == 0


def test_the_punishment_of_long_responses_is_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(tmp_path, monkeypatch, "mixture.sh", VERL_MIXTURE)
    first, second = config.reward.functions
    assert (first.name, second.name, second.buffer_tokens, second.weight) == (
        "math",
        "overlong",
        512,
        0.5,
    )


def test_all_training_files_are_kept_and_their_rows_are_the_weights_where_they_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = planned(tmp_path, monkeypatch, "mixture.sh", VERL_MIXTURE)
    assert [entry.path for entry in config.data.datasets] == [
        "/home/me/a/train.parquet",
        "/home/me/b/train.parquet",
    ]
    assert "set their weights" in said(capsys)["data.train"]
    row = '{"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}\n'
    for name, rows in (("a", 300), ("b", 900)):
        (tmp_path / f"{name}.jsonl").write_text(row * rows)
    here = VERL_MIXTURE.replace("$HOME/a/train.parquet", "a.jsonl").replace(
        "$HOME/b/train.parquet", "b.jsonl"
    )
    config = planned(tmp_path, monkeypatch, "mixture.sh", here)
    assert config.data.shares == [0.25, 0.75]
    assert config.schedule.iterations == 10 * (1200 // 512), (
        "epochs of all rows, without the last batch"
    )
    assert "trainer.total_epochs" not in said(capsys)


def test_epochs_become_iterations_by_the_number_of_rows_or_the_line_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, monkeypatch, "8b.sh", VERL_8B)
    assert said(capsys)["trainer.total_epochs"].startswith(
        "15: set schedule.iterations = 15 x the rows of data.train / 1024"
    )
    config = planned(tmp_path, monkeypatch, "8b.sh", VERL_8B, "--rows", "7473")
    assert config.schedule.iterations == 15 * 7


def test_adapters_of_megatron_go_to_the_backend_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = VERL_MIXTURE.replace("Qwen3-30B-A3B-Base", "Qwen2.5-7B").replace(
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64",
    )
    config = planned(tmp_path, monkeypatch, "lora.sh", text)
    assert (config.lora.rank, config.lora.alpha, config.trainer.backend) == (32, 64, "fsdp")
    assert said(capsys)["trainer.backend"].startswith("fsdp: adapters are trained by")
    assert plan() == 0


def test_unsloths_adapters_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained(model_name="Qwen/Qwen2.5-3B-Instruct", load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=32, target_modules=["q_proj", "k_proj"])
trainer = GRPOTrainer(model=model, args=GRPOConfig(max_steps=5), train_dataset="train.jsonl")
"""
    config = planned(tmp_path, monkeypatch, "unsloth_trl.py", program)
    assert (config.lora.rank, config.lora.targets) == (32, ("q_proj", "k_proj"))


def test_a_factor_over_the_ranks_root_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """alpha / sqrt(rank) = 32 / 4 = 8 is our alpha / rank with alpha = 128."""
    text = TRL_ONLINE_DPO.replace("--lora_r 32", "--lora_r 16 --lora_alpha 32 --use_rslora")
    config = planned(tmp_path, monkeypatch, "rslora_trl.sh", text)
    assert config.lora.alpha / config.lora.rank == 8.0


NEMO_RL = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 1000000}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 1}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
PRIME_RL = (
    "max_steps = 100\n[model]\nname = 'Qwen/Qwen3-0.6B'\n[orchestrator]\nbatch_size = "
    "512\nrollouts_per_example = 16\n"
)
OPENRLHF = (
    "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 "
    "--actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 "
    "--colocate_all_models --pretrain Qwen/Qwen2.5-7B --advantage_estimator group_norm "
    "--n_samples_per_prompt 8 --learning_rate 5e-7\n"
)


@pytest.mark.parametrize("origin", ["trl", "verl"])
@pytest.mark.parametrize(
    ("system", "name", "text"),
    [
        ("NeMo-RL", "grpo_math.yaml", NEMO_RL),
        (
            "NeMo-RL",
            "run.sh",
            "uv run examples/run_grpo.py cluster.num_nodes=2 grpo.num_prompts_per_step=64\n",
        ),
        ("prime-rl", "rl.toml", PRIME_RL),
        ("prime-rl", "rl.sh", "uv run rl @ rl.toml --orchestrator.batch-size 256\n"),
        ("OpenRLHF", "train.sh", OPENRLHF),
        ("slime", "run.sh", "python3 train.py --rollout-num-gpus 8 --hf-checkpoint m\n"),
        ("ms-swift", "grpo.sh", "swift rlhf --rlhf_type grpo --model m --num_generations 8\n"),
        ("AReaL", "gsm8k.yaml", "allocation_mode: sglang.d4+d4\ngconfig: {n_samples: 4}\n"),
    ],
)
def test_a_file_of_another_system_is_named_in_one_line(
    origin: str,
    system: str,
    name: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["--from", origin, str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (
        line.startswith(
            f"error: {tmp_path / name}: it is a file of {system}, which is not translated"
        )
        and not printed.out
    )


@pytest.mark.parametrize(
    ("origin", "name", "text", "line"),
    [
        ("trl", "run.sh", VERL_LORA, "it is a file of verl; give --from verl"),
        (
            "verl",
            "train.yaml",
            "num_generations: 8\nlearning_rate: 1e-6\n",
            "it is a file of TRL; give --from trl",
        ),
        ("trl", "empty.yaml", "{}", "no key of trl is in it"),
        ("trl", "some.yaml", "frobnicate: 3", "no key of trl is in it"),
        ("verl", "some.yaml", "model: {path: x}", "no key of verl is in it"),
        (
            "trl",
            "kto.py",
            "from trl import KTOTrainer\nKTOTrainer(model='m')",
            "KTOTrainer does not train as this project does",
        ),
        (
            "trl",
            "kto.sh",
            "trl kto --model_name_or_path m --dataset_name d\n",
            "line 1 starts kto, which is not translated",
        ),
        (
            "verl",
            "generate.sh",
            "python -m verl.trainer.main_generation data.path=a.parquet\n",
            "line 1 starts verl.trainer.main_generation, which is not translated",
        ),
    ],
)
def test_a_file_that_holds_no_such_training_is_refused_in_one_line(
    origin: str, name: str, text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["--from", origin, str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert line in error and not printed.out


@pytest.mark.parametrize(
    ("origin", "text", "line"),
    [
        (
            "trl",
            "num_generations: 8\nlearning_rate: abc",
            "learning_rate: 'abc' is not allowed; optimizer.learning_rate takes number > 0",
        ),
        (
            "trl",
            "num_generations: many",
            "num_generations: 'many' is not allowed; rollout.responses_per_prompt takes int >= 2",
        ),
        (
            "trl",
            "num_generations: 8\nbeta: -1",
            "beta: -1 is not allowed; algorithm.kl_coef takes number >= 0",
        ),
        ("trl", "num_generations: 8\nmax_steps: soon", "max_steps: 'soon' is not a number"),
        (
            "trl",
            "num_generations: 8\nlora_r: x\nuse_peft: true",
            "lora.rank: 'x' is not allowed; lora.rank takes int >= 0",
        ),
        (
            "verl",
            "actor_rollout_ref: {rollout: {n: 1}}",
            "actor_rollout_ref.rollout.n: 1 is not allowed",
        ),
        (
            "verl",
            "actor_rollout_ref: {actor: {clip_ratio: wide}}",
            "actor_rollout_ref.actor.clip_ratio: 'wide' is not allowed",
        ),
        (
            "verl",
            "trainer: {n_gpus_per_node: eight}",
            "trainer.n_gpus_per_node: 'eight' is no whole number above 0",
        ),
        ("verl", "data: {train_batch_size: [1]}", "data.train_batch_size: [1] is not allowed"),
    ],
)
def test_a_value_that_its_key_does_not_take_is_refused_by_their_name(
    origin: str, text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert main(["--from", origin, str(tmp_path / "x.yaml")]) == 2
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert error.startswith(f"error: {tmp_path / 'x.yaml'}: ") and line in error and not printed.out


def test_a_reward_function_of_verl_that_is_here_is_set_and_one_that_is_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = VERL_LORA.replace(
        "trainer.nnodes=1", "trainer.nnodes=1 custom_reward_function.path=mine/score.py"
    )
    planned(tmp_path, monkeypatch, "own.sh", text)
    assert (
        "reward.functions=[{name: 'score:compute_score'}]"
        in said(capsys)["custom_reward_function.path"]
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): return 1.0\n"
    )
    config = planned(tmp_path, monkeypatch, "own.sh", text)
    assert [function.name for function in config.reward.functions] == ["mine.score:compute_score"]


def test_verls_own_devices_for_engines_stay_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        VERL_8B.replace("main_ppo", "one_step_off_policy.main_ppo", 1)
        .replace(
            "trainer.n_gpus_per_node=8",
            "trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2",
        )
        .replace("data.train_batch_size=1024", "data.train_batch_size=768")
        .replace("size=256", "size=192")
    )
    config = planned(tmp_path, monkeypatch, "async.sh", text)
    assert (config.devices.num_devices, config.trainer.devices, config.rollout.engines) == (8, 6, 1)
    assert not config.placement.colocate and config.schedule.max_staleness == 1


def test_a_launcher_without_options_reads_the_program_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRL_LORA)
    (tmp_path / "eight.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\nnum_processes: 8\nnum_machines: 1\n"
    )
    script = "accelerate launch --config_file eight.yaml train.py\n"
    config = planned(tmp_path, monkeypatch, "run_trl.sh", script)
    assert config.devices.num_devices == 8 and config.lora.rank == 16
