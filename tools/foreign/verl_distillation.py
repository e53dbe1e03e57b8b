"""verl's on-policy distillation (the section `distillation` beside its ppo_trainer.yaml) as teachers of ours."""

from __future__ import annotations

from typing import Any

from tools.foreign.translation import Translation

_SECTION = "distillation"
_LOSS = f"{_SECTION}.distillation_loss"
_MODELS = f"{_SECTION}.teacher_models"
# of verl's own files
_USUAL_MODE = "k3"
_USUAL_CLAMP = 10.0
_USUAL_TOP_K = 128


def set_teachers(work: Translation) -> None:
    """Sets teachers, their devices and the loss, where distillation is enabled."""
    settings = work.take_all(f"{_SECTION}.")
    if not settings.get("enabled"):
        return
    teachers = _teachers(work, settings)
    if not teachers:
        work.lose(f"{_MODELS}", "nothing", "name teachers: teacher.NAME.model")
        return
    for name, teacher, _ in teachers:
        work.set(f"teacher.{name}", teacher, f"{_MODELS}.{name}")
    _choose_by_row(work, settings, teachers)
    _loss(work, settings)
    if work.values.get("rollout.responses_per_prompt") == 1:
        work.adapt(
            "rollout.responses_per_prompt", 2, "a group has at least two, of half the prompts"
        )
        prompts = work.values.get("schedule.prompts_per_iteration")
        if isinstance(prompts, int):
            work.set("schedule.prompts_per_iteration", max(1, prompts // 2))


def _teachers(work: Translation, settings: dict[str, Any]) -> list[tuple[str, dict[str, Any], Any]]:
    """Returns name, settings here and verl's key of each teacher."""
    of_names: dict[str, dict[str, Any]] = {}
    for prefix, name_of_one in (("teacher_models.", None), ("teacher_model.", "teacher_model")):
        for key, value in settings.items():
            if not key.startswith(prefix):
                continue
            name, _, rest = key.removeprefix(prefix).partition(".")
            if name_of_one is not None:
                name, rest = name_of_one, key.removeprefix(prefix)
            of_names.setdefault(name, {})[rest] = value
    teachers = []
    for name, values in of_names.items():
        if (path := values.get("model_path")) is None:
            continue
        if (engine := values.get("inference.name")) not in (None, "vllm"):
            work.lose(f"{_MODELS}.{name}.inference.name", engine, "engines are vLLM's")
        teacher: dict[str, Any] = {"model": path}
        size = values.get("inference.tensor_model_parallel_size", 1)
        if work.values.get("placement.cluster") == "ray":
            work.done.adapted[f"teacher.{name}"] = (
                "trainers hold it: a run starts engines of teachers on one machine only; else start "
                f"them with pa-npu engines, and set teacher.{name}.url"
            )
        else:
            pool = (settings.get("n_gpus_per_node") or 0) * (settings.get("nnodes") or 1)
            replicas = values.get("num_replicas")
            teacher["engines"] = replicas or max(1, pool // size // len(of_names))
            teacher["tensor_parallel"] = size
        teachers.append((name, teacher, values.get("key")))
    return teachers


def _choose_by_row(
    work: Translation,
    settings: dict[str, Any],
    teachers: list[tuple[str, dict[str, Any], Any]],
) -> None:
    if len(teachers) == 1:
        return
    column = settings.get("teacher_key") or "data_source"
    work.set("data.teacher_column", column, f"{_SECTION}.teacher_key")
    for name, _, key in teachers:
        if key not in (None, name):
            work.done.adapted[f"teacher.{name}"] = (
                f"rows must say {name} in {column} where they say {key}; or call the teacher so"
            )


def _loss(work: Translation, settings: dict[str, Any]) -> None:
    """Sets what is added to a token's loss, and whether a reward is there besides."""

    def setting(name: str, usual: Any) -> Any:
        value = settings.get(f"distillation_loss.{name}")
        return usual if value is None else value

    mode, is_advantage = setting("loss_mode", _USUAL_MODE), setting("use_policy_gradient", True)
    coefficient = setting("distillation_loss_coef", 1.0)
    work.set("algorithm.distill_coef", coefficient, f"{_LOSS}.distillation_loss_coef")
    if not setting("use_task_rewards", True):
        work.set("algorithm.name", "distill")
        # an advantage of rewards, and what only the loss of one reads
        for key in ("advantage", "kl_coef", "kl_in", "kl_estimator"):
            work.values.pop(f"algorithm.{key}", None)
    clamp = settings.get("distillation_loss.loss_max_clamp", _USUAL_CLAMP)
    if mode == "forward_kl_topk" and not is_advantage:
        work.set("algorithm.distill_divergence", "forward", f"{_LOSS}.loss_mode")
        work.set("algorithm.distill_top_k", setting("topk", _USUAL_TOP_K), f"{_LOSS}.topk")
        if clamp is not None:
            work.lose(f"{_LOSS}.loss_max_clamp", clamp, "a divergence has no bound here")
    else:
        if mode != "k1" or not is_advantage:
            work.lose(
                f"{_LOSS}.loss_mode",
                mode,
                "at the sampled token the advantage is the log-ratio (k1); see "
                "algorithm.distill_divergence",
            )
        if clamp is not None:
            work.set("algorithm.distill_clip", clamp, f"{_LOSS}.loss_max_clamp")
    if (floor := settings.get("distillation_loss.log_prob_min_clamp")) is not None:
        work.lose(f"{_LOSS}.log_prob_min_clamp", floor, "log-probs are taken as they are")
