"""Names of TRL and verl: their files are translated key by key with nothing lost in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pa_npu.config.keys import all_keys
from pa_npu.config.load import load_config
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from tools.foreign.names import RELATED, SAME
from tools.foreign.program import read_program
from tools.foreign.script import _Script
from tools.foreign.translate import import_config
from tools.import_config import main

OURS = {key.name for key in all_keys()}
NEEDED = ["model.path=m", "data.train=t.jsonl"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate=1e-6", "optimizer.learning_rate"),
        ("temperature=1", "rollout.temperature"),
        ("optimizer.beta=0.9", "optimizer.betas"),
        ("optimizer.learning_rat=1", "optimizer.learning_rate"),
    ],
)
def test_a_mistyped_key_names_the_nearest(typed: str, meant: str) -> None:
    name = typed.partition("=")[0]
    with pytest.raises(ConfigError) as refused:
        load_config([], [*NEEDED, typed])
    assert str(refused.value) == f"command line: {name}: unknown key; did you mean {meant}?"


def test_every_name_leads_to_a_key_that_exists() -> None:
    for origin in SAME:
        assert not SAME[origin].keys() & RELATED[origin].keys()
        for theirs, ours in (SAME[origin] | RELATED[origin]).items():
            assert ours in OURS, f"{theirs}: {ours}"


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


def test_a_file_of_trl_becomes_a_configuration_and_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "grpo.yaml", tmp_path / "ours.yaml"
    theirs.write_text(TRL)
    assert main(["--from", "trl", str(theirs), "--output", str(ours)]) == 0
    lost = capsys.readouterr().err.splitlines()
    config = load_config([str(ours)])
    assert (config.microbatch.responses, config.schedule.updates_per_iteration) == (8, 1)
    assert (config.model.path, config.model.dtype, config.run.dir) == (
        "models/Qwen2.5-7B",
        "bf16",
        "runs/trl",
    )
    assert (config.optimizer.learning_rate, config.optimizer.warmup_iterations) == (1e-6, 10)
    assert (config.rollout.responses_per_prompt, config.schedule.prompts_per_iteration) == (16, 32)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.kl_coef) == (
        0.2,
        0.28,
        0.001,
    )
    assert (config.algorithm.aggregation, config.algorithm.advantage) == ("dr-grpo", "centred")
    assert (config.algorithm.importance_sampling, config.algorithm.importance_cap) == ("token", 3.0)
    assert (config.schedule.iterations, config.checkpoint.every) == (300, 50)
    named = [
        line.split(": ")[1].split(" = ")[0] for line in lost if line.startswith("not translated: ")
    ]
    assert set(named) == {"top_k", "num_iterations"}
    assert config.telemetry.trackers == ("wandb",)
    (hub,) = [
        line
        for line in lost
        if line.startswith("changed: data.train = trl-lib/DeepMath-103K: is a name on a hub")
    ]
    assert config.data.train == "trl-lib/DeepMath-103K"
    assert "datasets:trl-lib/DeepMath-103K" in hub


def test_a_file_of_verl_becomes_a_configuration_and_a_list() -> None:
    imported = import_config("verl", yaml.safe_load(VERL.replace("1e-6", "1.0e-6")))
    values = imported.values
    assert values["data.train"] == "data/gsm8k/train.parquet" and values["data.test"] == {
        "path": "data/gsm8k/test.parquet",
        "max_rows": 200,
    }
    assert (
        values["schedule.prompts_per_iteration"] == 1024
        and values["schedule.updates_per_iteration"] == 4
    )
    assert values["data.overlong_prompt"] == "skip"
    assert values["data.question_column"] == "problem"
    assert values["data.template_options"] == {"enable_thinking": False}
    assert (
        values["algorithm.kl_coef"],
        values["algorithm.kl_in"],
        values["algorithm.kl_estimator"],
    ) == (
        0.001,
        "loss",
        "k3",
    )
    assert (
        values["algorithm.clip_low"],
        values["algorithm.clip_high"],
        values["algorithm.dual_clip"],
    ) == (
        0.2,
        0.28,
        10.0,
    )
    assert values["optimizer.betas"] == [0.9, 0.999]
    assert values["trainer.tensor_parallel"] == 2
    assert (
        values["algorithm.aggregation"] == "sequence-mean"
        and values["algorithm.advantage"] == "group-std"
    )
    assert (values["checkpoint.every"], values["schedule.evaluate_every"]) == (0, 5)
    assert values["telemetry.trackers"] == ["wandb"]
    assert values["trainer.context_parallel"] == 2
    assert not imported.untranslated
    assert (values["trainer.backend"], values["trainer.devices"], values["rollout.engines"]) == (
        "megatron",
        8,
        4,
    )
    assert (
        values["placement.colocate"] and values["data.answer_column"] == "reward_model.ground_truth"
    )
    assert set(values) <= OURS


def test_trackers_without_a_counterpart_are_listed_and_none_is_an_empty_list() -> None:
    several = import_config("trl", {"report_to": ["tensorboard", "clearml"], "adam_beta1": 0.8})
    values = several.values
    assert (values["telemetry.trackers"], values["optimizer.betas"]) == (
        ["tensorboard"],
        [0.8, 0.999],
    )
    assert list(several.untranslated) == ["report_to"]
    assert import_config("trl", {"report_to": "none"}).values["telemetry.trackers"] == []


def test_every_key_is_translated_or_listed_or_known_to_be_unneeded() -> None:
    """A control: a key that nobody has heard of is listed, with its value."""
    for origin in SAME:
        imported = import_config(origin, {"frobnicate": 3, "nested": {"deep": {"key": "x"}}})
        assert not imported.read_any and imported.untranslated == {
            "frobnicate": "3: no counterpart here",
            "nested.deep.key": "'x': no counterpart here",
        }


@pytest.mark.parametrize(
    "text", ["epsilon: [1]\ngeneration_batch_size: x", "- 1", "warmup_steps: x"]
)
def test_a_file_of_something_else_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert main(["--from", "trl", str(tmp_path / "x.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "x.yaml" in line


SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# one node
project_name='GRPO-Qwen3'   # shown in trackers
MODEL=${MODEL:-"Qwen3-8B"}
DATA_HOME=${DATA_HOME:-"${TEST_HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${DATA_HOME}/models/$MODEL"}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 4))
batch=64; mini=$((batch / 4))
STAMP=$(date +%m%d)
if [ "${NNODES:-1}" -gt 1 ]; then
    offload=True
else
    offload=False
fi
cat > /dev/null <<END
python3 -m verl.trainer.main_ppo trainer.nnodes=99
END
DATA=(
    data.train_files="['${DATA_HOME}/train.parquet']"   # one file
    data.val_files=${DATA_HOME}/test.parquet
    data.max_prompt_length=${max_prompt_length}
)
DATA+=(data.train_batch_size=${batch})
EXTRA="trainer.test_freq=5 trainer.save_freq=20"

HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.use_kl_loss=False \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    actor_rollout_ref.rollout.n=8 \
    data.apply_chat_template_kwargs='{enable_thinking:False}' \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${project_name}" trainer.experiment_name="$MODEL-$STAMP" \
    trainer.n_gpus_per_node=${GPUS_OF_NOBODY} \
    $EXTRA "$@" 2>&1 | tee log.txt
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HOME", "/home/me")
    for name in ("MODEL", "DATA_HOME", "MODEL_PATH", "NNODES", "GPUS_OF_NOBODY"):
        monkeypatch.delenv(name, raising=False)


def imported_file(
    path: Path, origin: str, text: str, capsys: pytest.CaptureFixture[str]
) -> tuple[Config, dict[str, str]]:
    """The configuration that the command writes, and what it says of the rest."""
    path.write_text(text)
    assert main(["--from", origin, str(path), "--output", f"{path}.yaml"]) == 0
    remarks = [line.partition(": ") for line in capsys.readouterr().err.splitlines()]
    lost = dict(rest.split(" = ", 1) for kind, _, rest in remarks if kind == "not translated")
    return load_config([f"{path}.yaml"]), lost


def test_verls_shell_script_is_read_as_bash_reads_it(
    tmp_path: Path, home: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config, lost = imported_file(tmp_path / "run.sh", "verl", SCRIPT, capsys)
    assert (config.data.train, config.data.test) == (
        "/home/me/verl/train.parquet",
        "/home/me/verl/test.parquet",
    )
    assert (config.model.path, config.trainer.backend) == (
        "/home/me/verl/models/Qwen3-8B",
        "megatron",
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 4096)
    assert (config.schedule.prompts_per_iteration, config.schedule.updates_per_iteration) == (64, 4)
    assert (config.optimizer.learning_rate, config.microbatch.max_tokens) == (1e-6, 12288)
    assert config.data.template_options == {"enable_thinking": False}
    assert (config.telemetry.trackers, config.telemetry.project) == (("wandb",), "GRPO-Qwen3")
    assert (config.schedule.evaluate_every, config.checkpoint.every) == (5, 20)
    actor = "actor_rollout_ref.actor.megatron"
    assert set(lost) == {
        f"{actor}.param_offload",
        "trainer.experiment_name",
        "trainer.n_gpus_per_node",
    }
    assert config.trainer.recompute == "full" and not config.placement.colocate, (
        "how many devices, nobody knows"
    )
    assert lost["trainer.experiment_name"].startswith(
        "line 11: the output of `date +%m%d`; it cannot be read without"
    )
    assert lost["trainer.n_gpus_per_node"].startswith(
        "line 45: $GPUS_OF_NOBODY is set neither in the script nor in"
    )
    assert "`offload` is set where a condition or a loop decides" in lost[f"{actor}.param_offload"]


def test_a_script_sees_the_environment_as_it_would_when_it_runs(
    tmp_path: Path, home: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", "Other")
    config, _ = imported_file(tmp_path / "run.sh", "verl", SCRIPT, capsys)
    assert config.model.path == "/home/me/verl/models/Other"


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize(
    "script",
    [
        SCRIPT.replace("$(date +%m%d)", "0101").replace("${GPUS_OF_NOBODY}", "8"),
        'A="x y"; main_ppo a=$A b="$A" c=\'$A\' d=${A}z e="${A:-q}" f=${B:-"p q"} g=${B-} '
        'h="${A:+set}${B:+not}"',
        'A=(k.a=1 \'k.b=2 3\'); A+=(k.c=4)\nmain_ppo ${A[@]} "${A[@]}" x="${A[@]}"',
        "A=a; A+=b; B='it'\\''s'\nmain_ppo $A=$B \\\n  x=1 # \\\n  y=2",
        'main_ppo x=$((2 * (3 + 4) - 1)) y=$(( -7 % 4 )) z="a\\"b\\$c" w=\\$HOME v=a#b "$@" # c=1',
        ": ${A:=3}\nfor i in 1 2; do :; done\nmain_ppo a=$A >/dev/null 2>&1 && echo b=1",
        'run() {\n  local X=5\n  main_ppo x=$X "$@"\n}\nrun',
    ],
)
def test_a_scripts_words_are_bashs(script: str, tmp_path: Path, home: None) -> None:
    """bash itself is the reference: a command of that name prints the arguments that it gets."""
    (tmp_path / "main_ppo").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$WORDS"\n')
    (tmp_path / "main_ppo").chmod(0o700)
    text = script.replace("python3 -m verl.trainer.main_ppo", "main_ppo")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WORDS": str(tmp_path / "words"),
    }
    subprocess.run(
        ["bash", "-c", text],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=30,
    )
    expected = (tmp_path / "words").read_text().splitlines()
    actual = _Script(text)
    (words,) = [words for _, words in actual.commands() if "main_ppo" in words]
    ours = [
        actual.variables["offload"][0] if "\0" in word else word
        for word in words[words.index("main_ppo") + 1 :]
    ]
    theirs = [
        word if "param_offload" not in word else actual.variables["offload"][0] for word in expected
    ]
    assert ours == theirs


PROGRAM = """
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
GROUP = 8
raise SystemExit("a program that is run does not get here")


def correct(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer)]


def main():
    dataset = load_dataset("json", data_files="train.jsonl", split="train")
    held_out = load_dataset("openai/gsm8k", "main")["test"].map(str)
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
    extra = {"top_k": 0, "seed": 7}
    training_args = GRPOConfig(
        f"runs/{GROUP}-each",
        learning_rate=1e-6,
        num_generations=GROUP,
        generation_batch_size=GROUP * 4,
        max_completion_length=1024 // 2,
        beta=0.04,
        loss_type="grpo",
        max_steps=compute_steps(),
        model_init_kwargs=dict(dtype="bfloat16"),
        report_to=["tensorboard"],
        **extra,
    )
    training_args.temperature = 0.9
    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=[correct],
        train_dataset=dataset,
        eval_dataset=held_out,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
"""


def test_trls_program_is_read_without_being_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, lost = imported_file(tmp_path / "train.py", "trl", PROGRAM, capsys)
    assert (config.model.path, config.data.train, config.run.dir) == (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "train.jsonl",
        "runs/8-each",
    )
    assert (config.rollout.responses_per_prompt, config.schedule.prompts_per_iteration) == (8, 4)
    assert (config.rollout.max_response_tokens, config.rollout.temperature) == (512, 0.9)
    assert (config.algorithm.kl_coef, config.algorithm.aggregation) == (0.04, "sequence-mean")
    assert (config.run.seed, config.telemetry.trackers) == (7, ("tensorboard",))
    assert set(lost) == {"reward_funcs", "max_steps"}
    assert (config.data.test, config.model.dtype) == ("openai/gsm8k", "bf16")
    assert lost["max_steps"] == (
        "compute_steps(): line 29: no literal; it cannot be read without running the program; set "
        "schedule.iterations"
    )
    assert (
        "'correct'" in lost["reward_funcs"]
        and "reward.functions=[{name: 'MODULE:correct'}]" in lost["reward_funcs"]
    )


def test_a_class_whose_methods_are_tools_stays_that_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PROGRAM.replace("reward_funcs=[correct],", "environment_factory=Wordle,")
    config, lost = imported_file(tmp_path / "train.py", "trl", program, capsys)
    assert config.environment.name == "tool_class"
    assert "environment.options.factory=MODULE:Wordle" in lost["environment_factory"]


def test_options_of_trls_command_line_are_read_from_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "LR=2e-6\naccelerate launch --num_processes 8 train_grpo.py --model_name_or_path m "
        "--learning_rate=$LR \\\n"
        "  --dataset_name t.jsonl --num_generations 4 --gradient_checkpointing --report_to wandb "
        "tensorboard\n"
    )
    config, lost = imported_file(tmp_path / "train.sh", "trl", script, capsys)
    assert (config.model.path, config.data.train, config.optimizer.learning_rate) == (
        "m",
        "t.jsonl",
        2e-6,
    )
    assert (config.trainer.recompute, config.telemetry.trackers) == (
        "full",
        ("wandb", "tensorboard"),
    )
    assert config.rollout.responses_per_prompt == 4 and not lost


@pytest.mark.parametrize(
    ("origin", "name", "text", "message"),
    [
        ("verl", "a.sh", "echo hello", "no training command with arguments is in it"),
        ("verl", "a.sh", "main_ppo a.b=1\nmain_ppo a.b=2", "training commands begin at lines 1, 2"),
        ("verl", "a.py", "x = 1", "verl is configured by a shell script or by YAML"),
        ("trl", "a.py", "x = ", "not a Python program (SyntaxError)"),
        ("trl", "a.py", "GRPOTrainer()", "no GRPOConfig(...) is called in it"),
        ("trl", "a.py", "GRPOConfig('a')\nGRPOConfig('b')", "several of them, at lines 1, 2"),
        ("trl", "a.py", "\0", "not a Python program"),
        ("trl", "a.py", "(" * 100_000, "not a Python program"),
        ("verl", "a.sh", "X=(((" + "${" * 3000 + "'\"`", "no training command"),
    ],
)
def test_a_file_without_a_configuration_is_one_line_too(
    origin: str,
    name: str,
    text: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["--from", origin, str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and name in line and message in line


@given(text=st.text(alphabet=" \n\\'\"${}()[]@#:-=+<>|&;`aif1", max_size=60))
def test_reading_a_script_always_ends(text: str) -> None:
    script = _Script(text)
    script.commands()
    assert script.at >= len(text)


@given(
    text=st.recursive(
        st.sampled_from(["1", "'a'", "x", "f()", "None", "a.b", "torch.bfloat16"]),
        lambda inner: st.one_of(
            *(
                st.tuples(st.just(form), inner, inner)
                for form in ("{0} + {1}", "[{0}, {1}]", "{{{0}: {1}}}", "{0} // {1}", "{0}[{1}]")
            )
        ).map(lambda made: made[0].format(*made[1:])),
        max_leaves=6,
    )
)
def test_every_argument_of_a_program_is_read_or_named(text: str) -> None:
    given_ = read_program(
        f"x = {text}\nx2 = x\nGRPOConfig(learning_rate={text}, seed=x2)", "train.py"
    )
    assert {*given_.values, *given_.unread} == {"learning_rate", "seed"}
