"""Files of TRL's and verl's supervised stage, of preferences on data and of distillation become configurations that hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_npu.algorithm.rules import load_config
from pa_npu.config.schema import Config
from tools.import_config import main

TRL_SFT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig

config = SFTConfig(
    output_dir="runs/sft",
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    num_train_epochs=2,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    max_length=2048,
    packing=True,
    assistant_only_loss=True,
    neftune_noise_alpha=5,
    eval_steps=50,
    bf16=True,
)
trainer = SFTTrainer(
    model="models/Qwen2.5-7B",
    args=config,
    train_dataset=load_dataset("json", data_files="conversations.jsonl", split="train"),
    eval_dataset="held_out.jsonl",
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
"""
TRL_DPO = """
accelerate launch --num_processes 8 trl/scripts/dpo.py \\
    --model_name_or_path models/Qwen2.5-7B-Instruct \\
    --dataset_name pairs.jsonl \\
    --learning_rate 5e-7 \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 4 \\
    --max_steps 500 \\
    --loss_type ipo \\
    --beta 0.05 \\
    --max_length 1024 --max_prompt_length 640 \\
    --rpo_alpha 1.0 \\
    --output_dir runs/dpo
"""
TRL_GKD = """
from trl.experimental.gkd import GKDConfig, GKDTrainer

args = GKDConfig(
    output_dir="runs/gkd",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=100,
    learning_rate=1e-5,
    lmbda=1.0,
    beta=0.5,
    temperature=0.8,
    max_new_tokens=256,
)
trainer = GKDTrainer(
    model="models/student", teacher_model="models/teacher", args=args, train_dataset="prompts.jsonl"
)
"""
VERL_SFT = """
set -x
nproc_per_node=8
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \\
    -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.prompt_key=extra_info data.response_key=extra_info \\
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \\
    data.train_batch_size=128 data.micro_batch_size_per_gpu=4 data.max_length=2048 \\
    data.truncation=right \\
    optim.lr=1e-4 optim.lr_warmup_steps_ratio=0.1 optim.weight_decay=0.01 \\
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct model.lora_rank=32 model.lora_alpha=16 \\
    model.target_modules=all-linear model.fsdp_config.cpu_offload=False \\
    ulysses_sequence_parallel_size=2 use_remove_padding=true \\
    trainer.default_local_dir=runs/verl trainer.project_name=gsm8k-sft \\
    trainer.logger=['console','tensorboard'] trainer.total_epochs=3 trainer.total_training_steps=null
"""
VERL_DISTILLATION = """
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=a.parquet data.train_batch_size=128 data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=models/student actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=1 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_training_steps=50 \\
    distillation.enabled=True distillation.n_gpus_per_node=2 distillation.nnodes=1 \\
    distillation.teacher_models.teacher_model.model_path=models/teacher \\
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2 \\
    distillation.teacher_models.teacher_model.inference.gpu_memory_utilization=0.8 \\
    distillation.distillation_loss.loss_mode=k1 \\
    distillation.distillation_loss.use_task_rewards=False \\
    distillation.distillation_loss.loss_max_clamp=5.0
"""
VERL_YAML = """
data: {train_batch_size: 64, train_files: a.parquet, val_files: b.parquet, max_length: 1000,
       truncation: error, multiturn: {enable: true, messages_key: messages}}
model: {path: models/m, enable_gradient_checkpointing: true}
optim: {lr: 2.0e-5, lr_scheduler_type: cosine, min_lr_ratio: 0.1, clip_grad: 1.0}
engine: {strategy: fsdp}
trainer: {total_epochs: 1, nnodes: 1, n_gpus_per_node: 4, save_freq: 100, seed: 3}
"""


def imported(
    origin: str, name: str, text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Config, str]:
    """The configuration that the file becomes, checked by all rules, and the lines about the rest."""
    (directory / name).write_text(text)
    ours = directory / "ours.yaml"
    assert main(["--from", origin, str(directory / name), "--output", str(ours)]) == 0
    return load_config([str(ours)]), capsys.readouterr().err


def test_a_program_of_sfttrainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = imported("trl", "train.py", TRL_SFT, tmp_path, capsys)
    assert (config.algorithm.name, config.rollout.engines) == ("sft", 0)
    assert (config.model.path, config.data.train) == ("models/Qwen2.5-7B", "conversations.jsonl")
    assert config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt == 32
    assert (config.schedule.epochs, config.schedule.evaluate_every) == (2.0, 50)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.decay) == (1e-4, "cosine")
    assert (optimizer.warmup_share, optimizer.betas) == (0.03, (0.9, 0.999))
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens == 2048
    assert config.data.overlong_prompt == "truncate"
    assert (config.microbatch.responses, config.microbatch.max_tokens) == (4, 4 * 2048)
    assert (config.lora.rank, config.lora.alpha, config.trainer.backend) == (16, 32.0, "fsdp")
    assert "not translated: packing = True: a batch of TRL counts packed sequences" in output
    assert "not translated: neftune_noise_alpha = 5: no counterpart here" in output
    assert "assistant_only_loss" not in output and "still to settle" not in output


def test_what_trl_trains_of_messages_otherwise_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = TRL_SFT.replace("    assistant_only_loss=True,\n", "").replace(
        "    learning_rate=1e-4,\n", "    completion_only_loss=False,\n    loss_type='dft',\n"
    )
    config, output = imported("trl", "train.py", whole, tmp_path, capsys)
    assert config.optimizer.learning_rate == 2e-5, "TRL's own"
    for name in ("assistant_only_loss", "completion_only_loss", "loss_type"):
        assert f"not translated: {name} = " in output


def test_a_command_of_dpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = imported("trl", "dpo.sh", TRL_DPO, tmp_path, capsys)
    keys = config.algorithm
    assert (keys.name, keys.preference_loss, keys.kl_coef) == ("dpo", "ipo", 0.05)
    assert (config.trainer.devices, config.schedule.prompts_per_iteration) == (8, 64)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (640, 384)
    assert (config.schedule.iterations, config.data.train) == (500, "pairs.jsonl")
    assert "not translated: rpo_alpha = 1.0" in output
    hinge = TRL_DPO.replace("--loss_type ipo", "--loss_type hinge")
    _, output = imported("trl", "dpo.sh", hinge, tmp_path, capsys)
    assert "not translated: loss_type = 'hinge': has no counterpart" in output


def test_a_program_of_gkdtrainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = imported("trl", "gkd.py", TRL_GKD, tmp_path, capsys)
    assert config.algorithm.name == "distill"
    assert [teacher.model for teacher in config.teacher.values()] == ["models/teacher"]
    assert (config.rollout.responses_per_prompt, config.rollout.temperature) == (2, 0.8)
    assert (config.rollout.max_response_tokens, config.schedule.prompts_per_iteration) == (256, 4)
    assert config.algorithm.kl_coef == 0, "beta is no coefficient there"
    assert "not translated: beta = 0.5: the divergence is the reverse KL" in output
    assert "lmbda" not in output
    mixed = TRL_GKD.replace("lmbda=1.0", "lmbda=0.25")
    _, output = imported("trl", "gkd.py", mixed, tmp_path, capsys)
    assert "not translated: lmbda = 0.25" in output


def test_a_script_of_verls_supervised_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = imported("verl", "sft.sh", VERL_SFT, tmp_path, capsys)
    assert (config.algorithm.name, config.trainer.backend) == ("sft", "fsdp")
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.data.question_column, config.data.answer_column) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert config.schedule.prompts_per_iteration * config.rollout.responses_per_prompt == 128
    assert (config.microbatch.responses, config.schedule.epochs) == (4, 3.0)
    assert (config.optimizer.warmup_share, config.optimizer.weight_decay) == (0.1, 0.01)
    assert (config.optimizer.decay, config.lora.rank) == ("cosine", 32)
    assert config.telemetry.trackers == ("tensorboard",)
    assert (config.trainer.context_parallel, config.trainer.devices) == (2, 8)
    assert "ulysses_sequence_parallel_size" not in output
    assert "use_remove_padding" not in output and "fsdp_config" not in output


def test_a_file_of_verls_sft_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = imported("verl", "sft_trainer.yaml", VERL_YAML, tmp_path, capsys)
    assert (config.model.path, config.trainer.devices, config.run.seed) == ("models/m", 4, 3)
    assert (config.checkpoint.every, config.data.overlong_prompt) == (100, "refuse")
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens == 1000
    assert (config.trainer.recompute, config.schedule.epochs) == ("full", 1.0)
    assert "not translated: optim.min_lr_ratio = 0.1" in output


def test_a_script_of_verls_distillation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = imported("verl", "opd.sh", VERL_DISTILLATION, tmp_path, capsys)
    keys = config.algorithm
    assert (keys.name, keys.distill_coef, keys.advantage) == ("distill", 1.0, "no-reward")
    assert (keys.distill_divergence, keys.distill_clip) == ("sampled", 5.0)
    (teacher,) = config.teacher.values()
    assert (teacher.model, teacher.engines, teacher.tensor_parallel) == ("models/teacher", 1, 2)
    assert config.devices.num_devices == 6, "the teacher's devices beside the hybrid ones"
    assert (config.rollout.responses_per_prompt, config.schedule.prompts_per_iteration) == (2, 64)
    assert "distillation" not in said.replace("verl_distillation", "")


def test_verls_divergences_several_teachers_and_task_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    further = """ \\
    distillation.teacher_key=data_source \\
    distillation.teacher_models.code.key=code/live \\
    distillation.teacher_models.code.model_path=models/code"""
    text = VERL_DISTILLATION.rstrip() + further + "\n"
    text = text.replace(
        "loss_mode=k1", "loss_mode=forward_kl_topk distillation.distillation_loss.topk=16"
    )
    text = text.replace("use_task_rewards=False", "use_policy_gradient=False")
    config, said = imported("verl", "opd.sh", text, tmp_path, capsys)
    keys = config.algorithm
    assert (keys.advantage, keys.distill_coef) == ("group-std", 1.0)
    assert (keys.distill_divergence, keys.distill_top_k) == ("forward", 16)
    assert config.data.teacher_column == "data_source" and list(config.teacher) == [
        "teacher_model",
        "code",
    ]
    assert "rows must say code in data_source where they say code/live" in said
    assert "not translated: distillation.distillation_loss.loss_max_clamp = 5.0" in said
    other = VERL_DISTILLATION.replace("loss_mode=k1", "loss_mode=k3")
    _, said = imported("verl", "opd.sh", other, tmp_path, capsys)
    assert "not translated: distillation.distillation_loss.loss_mode = 'k3'" in said
    nodes = VERL_DISTILLATION.replace("trainer.nnodes=1", "trainer.nnodes=2")
    config, said = imported("verl", "opd.sh", nodes, tmp_path, capsys)
    assert (
        not config.teacher_engines and "changed: teacher.teacher_model = trainers hold it" in said
    )
