"""The commands that README and docs show, and for each: a test that runs it as it is written, or the reason why none does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SETS_SOMETHING = re.compile(r"(?:export\s+)?\w+=\S*(?:\s+\w+=\S*)*$|source\s")

AS_WRITTEN = {
    "pa-npu --help": "evaluate",
    "pa-npu run --help all": "rollout.max_response_tokens",
    "pa-npu plan --config configs/grpo_qwen2.5_7b.yaml --device npu": "trainer ranks",
    "pa-npu plan --config configs/grpo_qwen3_8b.yaml --device npu "
    "data.template_options.enable_thinking=false": "trainer ranks",
    "pa-npu run --config configs/grpo_tiny.yaml --dry-run": "first prompt",
    "pa-npu doctor": "torch",
    "pa-npu report runs/grpo_tiny": "TPSPD",
    "pa-npu report runs/grpo_tiny runs/sync": "TPSPD",
    "python tools/import_config.py --from verl run_qwen3_8b.sh --output ours.yaml": "not translated: "
    "trainer.total_epochs",
    "python tools/import_config.py --from trl train.py --devices 8 --output ours.yaml": "not translated: "
    "reward_funcs",
    "python tools/import_config.py --from trl grpo.yaml --output ours.yaml": "still needed: "
    "data.train",
    "python tools/import_config.py --from verl ppo_trainer.yaml --output ours.yaml": "not translated: "
    "algorithm.adv_estimator",
    "pa-npu plan --config ours.yaml": "trainer ranks",
    "pa-npu evaluate --results runs/grpo_tiny/evaluations/version_000020.parquet --compare "
    "runs/grpo_tiny/evaluations/version_000000.parquet": "questions in both",
}
"""Run by tests/integration/test_documented_commands.py; a word of what each prints."""

PLANNED = {
    "pa-npu run --config configs/sft_tiny.yaml": {},
    "pa-npu run --config configs/dpo_rows_tiny.yaml": {},
    "pa-npu run --config configs/grpo_tiny.yaml model.path=runs/sft_tiny/hf": {
        "runs/sft_tiny/hf": ".cache/tiny/model"
    },
    "pa-npu run --config configs/grpo_tiny.yaml run.dir=runs/mine model.path=DIR data.train=train.jsonl 'reward.functions=[{name: "
    '"my_rewards:brevity"}]\'': {"DIR": ".cache/tiny/model"},
    "pa-npu run --config configs/grpo_tiny.yaml run.dir=runs/mine model.path=/models/Qwen2.5-0.5B-Instruct model.dtype=bf16 "
    "data.train=train.jsonl data.test=test.jsonl data.max_prompt_tokens=512 rollout.max_response_tokens=1024 "
    "'reward.functions=[{name: math}, {name: "
    '"my_rewards:brevity", weight: 0.1}]\'': {"/models/Qwen2.5-0.5B-Instruct": ".cache/tiny/model"},
}
"""The same, with these names replaced, as a dry run: what they start is tested elsewhere with other
keys.
"""

_QUICK_START = "tests/integration/test_new_user.py::test_the_path_of_a_new_user"
_LAUNCH_SCRIPT = (
    "tests/integration/test_launch_scripts.py::"
    "test_environment_variables_name_model_and_data_and_the_command_line_wins"
)
ELSEWHERE = {
    "bash launch/run_grpo_tiny.sh": _QUICK_START,
    "pa-npu view runs/grpo_tiny": _QUICK_START,
    "python tools/make_tiny_model.py --task vision --out .cache/tiny_vision": "tests/integration/"
    "test_images_run.py::test_the_tiny_task_is_learned",
    "pa-npu run --config configs/grpo_tiny_vision.yaml": "tests/integration/test_images_run.py::"
    "test_the_tiny_task_is_learned",
    "pa-npu verify runs/grpo_tiny": "tests/unit/launcher/test_verify.py::test_a_run_as_it_was_written_holds",
    "python examples/verify_a_run.py": "tests/integration/test_examples.py::"
    "test_the_example_of_verify_prints_what_the_document_shows",
    "pa-npu verify RUN": "tests/unit/launcher/test_verify.py::test_a_run_as_it_was_written_holds",
    "pa-npu verify RUN --replay 4:8": "tests/integration/test_verify.py",
    "pa-npu diff RUN1 RUN2": "tests/unit/launcher/test_verify.py::test_diff_names_the_token_that_differs_first",
    "pa-npu evaluate --model DIR --data NAME=FILE": "tests/unit/launcher/test_evaluation.py::"
    "test_a_model_is_evaluated_and_compared_by_question",
    "pa-npu evaluate --model .cache/tiny/model --data sums=.cache/tiny/test.jsonl --device cpu "
    "model.dtype=fp32 rollout.kv_cache_gib=0.25 evaluate.samples=4": _QUICK_START,
    "bash launch/run_grpo_tiny.sh schedule.iterations=5 schedule.stream=false run.dir=runs/sync": _QUICK_START,
    "pa-npu run --config ... checkpoint.every=10 checkpoint.resume=auto": "tests/integration/test_recovery.py::"
    "test_engines_trainers_coordinator_reward_workers_and_launcher_that_are_killed_whenever_change_nothing",
    "pa-npu export --checkpoint RUN/checkpoints/iteration_000010 --output DIR [--merged]": "tests/unit/backends/test_lora.py::"
    "test_exports_load_in_peft_and_transformers_and_give_the_trainers_logprobs",
    "pa-npu export --checkpoint RUN/checkpoints/iteration_000010 --output HF_DIR": "tests/integration/test_backends_hf_export.py::"
    "test_export_of_a_parallel_job_is_the_model",
    "pa-npu run --config configs/grpo_tiny.yaml 'telemetry.trackers=[tensorboard, wandb]' "
    "telemetry.project=arithmetic run.dir=runs/first": "tests/integration/test_trackers_offline.py",
    "python tools/check_equivalence.py": "tests/integration/test_check_equivalence.py",
    "pa-npu serve model.path=/models/Qwen2.5-0.5B-Instruct lora.rank=32 "
    "service.unembed=leave_out": "tests/integration/test_service.py",
    "pa-npu join HOST:PORT [--devices 6,7] [--host ADDRESS] [--python ENGINE_PYTHON]": "tests/integration/"
    "test_elastic_engines.py",
    "bash launch/run_grpo_7b.sh --device npu --dry-run": _LAUNCH_SCRIPT,
    "bash launch/run_grpo_7b.sh --device cuda --dry-run": _LAUNCH_SCRIPT,
}
"""By the test that runs the command, with a model and directories of its own."""

_CI = "it is what runs this test"
_DEVICES = "needs devices, or packages of a vendor, that continuous integration has not"
_RECORDS = (
    "needs the records of a run of that model; tests/unit/planning/test_prediction.py makes some up"
)
NOT_RUN = {
    "bash tests/run.sh": _CI,
    "bash tests/run.sh unit": _CI,
    "bash launch/install_cpu.sh dev docs": _CI,
    "bash launch/run_grpo_7b.sh --device npu --backend fsdp --dry-run": "tests/integration/test_launch_scripts.py::"
    "test_the_recipe_script_plans_sharded_trainers",
    "bash launch/run_grpo_tiny.sh trainer.backend=fsdp lora.rank=8 optimizer.learning_rate=2e-3": "slow; test_recovery "
    "trains adapters",
    "RECIPE=configs/grpo_qwen3_8b.yaml bash launch/run_grpo_7b.sh --device npu "
    "--config configs/lengths/8b_32k_16_devices.yaml": _DEVICES,
    "bash launch/run_grpo_tiny_8k.sh": "tests/integration/test_long_run.py::"
    "test_two_ranks_of_a_context_group_learn_behind_long_prompts_as_one_rank_does",
    "bash launch/run_grpo_tiny_8k.sh trainer.devices=1 trainer.context_parallel=1 "
    "run.dir=runs/grpo_tiny_8k_one_rank": "tests/integration/test_long_run.py::"
    "test_two_ranks_of_a_context_group_learn_behind_long_prompts_as_one_rank_does",
    "bash launch/run_grpo_tiny.sh trainer.devices=2 trainer.context_parallel=2": "slow; "
    "test_exact_schedules trains with a context group",
    "bash launch/run_grpo_tiny.sh trainer.backend=fsdp": "slow; test_backends_fsdp trains on it",
    "bash launch/run_grpo_tiny.sh rollout.backend=transformers run.dir=runs/slow": "slow; test_launcher_run "
    "has a smaller one",
    "python tools/plan_cluster.py --from runs/grpo_qwen2.5_7b": _RECORDS,
    "python tools/plan_cluster.py --from runs/grpo_qwen2.5_7b --devices 64 --model "
    "models/Qwen2.5-32B --json": _RECORDS,
    "python tools/plan_cluster.py --config configs/grpo_qwen2.5_7b.yaml --devices 8..512 "
    "--hardware a3": "most of a minute; tests/unit/planning/test_prediction.py has smaller ones",
    "pa-npu plan --config configs/grpo_qwen2.5_7b.yaml --device npu rollout.engines=auto "
    "trainer.devices=auto placement.colocate=auto placement.devices_per_node=8": "tests/unit/planning/test_automatic.py",
    "python tools/make_tiny_model.py --out .cache/tiny": "the quick start's script makes this "
    "model",
    "python tools/make_tiny_model.py --out .cache/tiny --seed 1": "the quick start's script makes "
    "this model",
    "python tools/bench_agreement.py --model .cache/tiny/model": "minutes; "
    "tests/unit/trainer/test_agreement.py has the same faults",
    "bash launch/run_distill_tiny.sh": "minutes; tests/unit/planning/test_recipes.py reads its "
    "configuration, tests/unit/algorithm/test_distillation.py has its updates",
    "pa-npu evaluate --model models/Qwen2.5-32B-Instruct --data sums=sums.jsonl --rows "
    "rows/sums.jsonl --only-correct evaluate.samples=4": "tests/unit/evaluation/test_written_rows.py writes such rows",
    "pa-npu run --config student.yaml algorithm.name=sft data.train=rows/sums.jsonl": "test_supervised_run has such a run",
    "export OPENAI_API_KEY=$(cat RUN/api_key)": "tests/integration/test_harnesses.py",
    "lm_eval run --model local-completions --tasks arc_easy --model_args "
    "model=policy,base_url=http://HOST:PORT/v1/completions,tokenizer_backend=huggingface,"
    "tokenizer=RUN/hf,max_length=4096": "tests/integration/test_harnesses.py, with a task of its own",
    "inspect eval task.py --model openai-api/run/policy --temperature 0": "tests/integration/"
    "test_harnesses.py, with a task of its own",
    "bash launch/run_sft_grpo_tiny.sh": "minutes; tests/unit/planning/test_recipes.py reads its "
    "configurations, tests/integration/test_supervised_run.py has its first half, smaller",
    "bash launch/run_distill_two_tiny.sh": "minutes; tests/unit/planning/test_recipes.py reads its "
    "configuration, tests/integration/test_teacher_engine_runs.py has such runs, smaller",
    "bash launch/run_grpo_tiny_tools.sh": "test_tool_environment has such a run, smaller",
    "bash launch/run_grpo_7b.sh --device npu [--config OVERLAY.yaml ...] [key=value ...]": "a synopsis",
    "docker build -f docker/cpu.Dockerfile -t pa_npu:cpu . && docker run --rm --shm-size 1g "
    "pa_npu:cpu": "needs docker; its steps run in tests/unit/launcher/test_containers.py",
    "MINDSPEED_HOME=.../MindSpeed MEGATRON_LM_HOME=.../Megatron-LM python -m pytest tests/npu_sim": _CI,
}
PAGES_NOT_RUN = {
    "docs/ascend.md": _DEVICES,
    "docs/selftest.md": _DEVICES,
    "docs/cuda.md": _DEVICES,
    "docs/cluster.md": _DEVICES,
    "docs/multi_node.md": _DEVICES,
}
"""Commands of these pages that are not among the ones above."""


def documented() -> dict[str, list[str]]:
    """Commands with the pages that show them: continued lines joined, comments and what only sets
    variables left out.
    """
    actual: dict[str, list[str]] = {}
    for page in PAGES:
        for command in commands(page.read_text(encoding="utf-8")):
            actual.setdefault(command, []).append(str(page.relative_to(ROOT)))
    return actual


def commands(text: str) -> list[str]:
    lines = [
        line for block in _FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    bare = [" ".join(re.sub(r"(^|\s)#\s.*$", "", line).split()) for line in lines]
    return [line for line in bare if line and not _SETS_SOMETHING.match(line)]


def arguments(command: str) -> list[str]:
    return shlex.split(command)
