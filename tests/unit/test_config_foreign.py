"""Names of TRL and verl: an error at one names our key, and their files are translated key by key with nothing lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pa_npu.config.foreign import import_config
from pa_npu.config.foreign_names import RELATED, SAME, our_key
from pa_npu.config.keys import all_keys
from pa_npu.config.load import load_config
from pa_npu.errors import ConfigError
from pa_npu.launcher.cli import main

OURS = {key.name for key in all_keys()}
NEEDED = ["model.path=m", "data.train=t.jsonl"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("beta=0.1", "algorithm.kl_coef"),
        ("learning_rate=1e-6", "optimizer.learning_rate"),
        ("num_generations=8", "rollout.responses_per_prompt"),
        ("max_completion_length=8", "rollout.max_response_tokens"),
        ("temperature=1", "rollout.temperature"),
        ("epsilon_high=0.28", "algorithm.clip_high"),
        ("lr=1e-6", "optimizer.learning_rate"),
        ("algorithm.beta=0.1", "algorithm.kl_coef"),
        ("rollout.n=8", "rollout.responses_per_prompt"),
        ("rollout.gpu_memory_utilization=0.5", "rollout.memory_fraction"),
        ("data.train_batch_size=64", "schedule.prompts_per_iteration"),
        ("data.max_response_length=8", "rollout.max_response_tokens"),
        ("trainer.total_training_steps=3", "schedule.iterations"),
        ("optimizer.beta=0.9", "optimizer.beta2"),
        ("optimizer.learning_rat=1", "optimizer.learning_rate"),
    ],
)
def test_a_foreign_or_mistyped_key_names_ours(typed: str, meant: str) -> None:
    name = typed.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        load_config([], [*NEEDED, typed])
    assert str(refused.value) == f"command line: {name}: unknown key; did you mean {meant}?"


def test_every_name_leads_to_a_key_that_exists() -> None:
    for origin in SAME:
        assert not SAME[origin].keys() & RELATED[origin].keys()
        for theirs, ours in (SAME[origin] | RELATED[origin]).items():
            assert ours in OURS, f"{theirs}: {ours}"
            assert our_key(theirs) in (ours, None)
    assert our_key("frobnicate") is None


TRL = """
model_name_or_path: models/Qwen2.5-7B
dtype: bfloat16
dataset_name: trl-lib/DeepMath-103K
output_dir: runs/trl
learning_rate: 1e-6
lr_scheduler_type: constant_with_warmup
warmup_steps: 10
num_generations: 16
generation_batch_size: 512
max_completion_length: 2048
beta: 0.001
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
top_k: 50
num_iterations: 2
per_device_train_batch_size: 8
use_vllm: true
vllm_mode: colocate
report_to: wandb
max_steps: 300
save_steps: 50
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_cap: 3.0
"""

VERL = """
data:
  train_files: data/gsm8k/train.parquet
  val_files: [data/gsm8k/test.parquet]
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
  train_max_samples: -1
  val_max_samples: 200
  prompt_key: problem
  apply_chat_template_kwargs: {enable_thinking: false}
  filter_overlong_prompts: true
  truncation: error
actor_rollout_ref:
  hybrid_engine: true
  model: {path: models/Qwen3-8B, use_remove_padding: true}
  actor:
    _target_: verl.workers.config.McoreActorConfig
    optim: {lr: 1e-6, betas: [0.9, 0.999], lr_warmup_steps: -1, lr_decay_style: constant}
    ppo_mini_batch_size: 256
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: seq-mean-token-mean
    ppo_epochs: 1
    entropy_coeff: 0
    megatron: {tensor_model_parallel_size: 2, sequence_parallel: true, context_parallel_size: 2}
  rollout:
    name: vllm
    n: 5
    gpu_memory_utilization: 0.6
    prompt_length: ${oc.select:data.max_prompt_length,512}
    enforce_eager: false
critic: {ppo_epochs: 1}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: true, use_kl_in_reward: false, gamma: 1.0}
trainer: {total_training_steps: 100, n_gpus_per_node: 8, nnodes: 1, save_freq: -1, test_freq: 5, logger: [console, wandb]}
"""


def test_a_file_of_trl_becomes_a_configuration_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "grpo.yaml", tmp_path / "ours.yaml"
    theirs.write_text(TRL)
    assert main(["import-config", "--from", "trl", str(theirs), "--output", str(ours)]) == 0
    lost = capsys.readouterr().err.splitlines()
    config = load_config([str(ours)], ["data.train=t.jsonl"])
    assert (config.model.path, config.model.dtype, config.run.dir) == ("models/Qwen2.5-7B", "bf16", "runs/trl")
    assert (config.optimizer.learning_rate, config.optimizer.warmup_iterations) == (1e-6, 10)
    assert (config.rollout.responses_per_prompt, config.schedule.prompts_per_iteration) == (16, 32)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (0.2, 0.28, 0.001)
    assert (config.algorithm.aggregation, config.algorithm.advantage) == ("dr-grpo", "centred")
    assert (config.algorithm.importance_sampling, config.algorithm.importance_cap) == ("token", 3.0)
    assert (config.schedule.iterations, config.checkpoint.every) == (300, 50)
    named = [line.split(": ")[1].split(" = ")[0] for line in lost if line.startswith("not translated: ")]
    assert set(named) == {"dataset_name", "top_k", "num_iterations", "per_device_train_batch_size"}
    assert config.telemetry.trackers == ("wandb",) and config.telemetry.metric_names == "trl"
    assert "still needed: data.train" in lost


def test_a_file_of_verl_becomes_a_configuration_and_a_list() -> None:
    imported = import_config("verl", yaml.safe_load(VERL.replace("1e-6", "1.0e-6")))
    values = imported.values
    assert values["data.train"] == "data/gsm8k/train.parquet" and values["data.test"] == "data/gsm8k/test.parquet"
    assert values["schedule.prompts_per_iteration"] == 1024 and values["schedule.updates_per_iteration"] == 4
    assert values["data.overlong_prompt"] == "skip"
    assert (values["data.max_test_rows"], values["data.question_column"]) == (200, "problem")
    assert values["data.template_options"] == {"enable_thinking": False} and "data.max_rows" not in values
    assert (values["algorithm.kl_coef"], values["algorithm.kl_in"], values["algorithm.kl_estimator"]) == (
        0.001,
        "loss",
        "k3",
    )
    assert (values["algorithm.clip_low"], values["algorithm.clip_high"], values["algorithm.dual_clip"]) == (
        0.2,
        0.28,
        10.0,
    )
    assert (values["optimizer.beta1"], values["optimizer.beta2"]) == (0.9, 0.999)
    assert values["trainer.tensor_parallel"] == 2 and values["trainer.sequence_parallel"] is True
    assert values["algorithm.aggregation"] == "sequence-mean" and values["algorithm.advantage"] == "group-std"
    assert (values["checkpoint.every"], values["schedule.evaluate_every"]) == (0, 5)
    assert (values["telemetry.trackers"], values["telemetry.metric_names"]) == (["wandb"], "verl")
    assert set(imported.untranslated) == {
        "actor_rollout_ref.actor.megatron.context_parallel_size",
        "algorithm.gamma",
        "trainer.n_gpus_per_node",
    }
    assert set(values) <= OURS


def test_trackers_without_a_counterpart_are_listed_and_none_is_an_empty_list() -> None:
    several = import_config("trl", {"report_to": ["tensorboard", "clearml"], "run_name": "first"})
    assert several.values == {
        "telemetry.trackers": ["tensorboard"],
        "telemetry.metric_names": "trl",
        "telemetry.run_name": "first",
    }
    assert list(several.untranslated) == ["report_to"]
    assert import_config("trl", {"report_to": "none"}).values == {"telemetry.trackers": []}


def test_every_key_is_translated_or_listed_or_known_to_be_unneeded() -> None:
    """A control: a key that nobody has heard of is listed, with its value."""
    for origin in SAME:
        imported = import_config(origin, {"frobnicate": 3, "nested": {"deep": {"key": "x"}}})
        assert imported.values == {} and imported.untranslated == {
            "frobnicate": "3: no counterpart here",
            "nested.deep.key": "'x': no counterpart here",
        }


@pytest.mark.parametrize("text", ["epsilon: [1]\ngeneration_batch_size: x", "- 1", "warmup_steps: x"])
def test_a_file_of_something_else_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert main(["import-config", "--from", "trl", str(tmp_path / "x.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "x.yaml" in line
