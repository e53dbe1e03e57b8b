"""TRL's trainers that learn from rows of data or from a teacher, SFTConfig, DPOConfig and GKDConfig, as ours."""

from __future__ import annotations

from tools.foreign.common import set_colocated
from tools.foreign.translation import Translation

NAMES = ("SFT", "DPO", "GKD")
# TRL's own values, where ours are others and the file says nothing.
_USUAL_BATCH, _USUAL_LENGTH, _USUAL_EPOCHS = 8, 1024, 3.0
_USUAL_RATES = {"SFT": 2e-5, "DPO": 1e-6, "GKD": 2e-5}
_MAX_GROUP = 8  # rows whose common beginning is looked for
_RESPONSES = 2  # of a prompt, at least
TEACHER = "teacher"


def set_usual(work: Translation, trainer: str) -> None:
    """Gives what the file leaves to TRL the values that it has there."""
    work.left.setdefault("learning_rate", _USUAL_RATES[trainer])
    work.left.setdefault("lr_scheduler_type", "linear")
    work.left.setdefault("adam_beta2", 0.999)
    if "max_steps" not in work.left:
        work.left.setdefault("num_train_epochs", _USUAL_EPOCHS)


def from_sft(work: Translation) -> None:
    """Rows that are trained as they are."""
    work.set("algorithm.name", "sft")
    if work.take("assistant_only_loss") is not True:
        work.lose(
            "assistant_only_loss",
            False,
            "of messages only the assistant's are trained; write the rows as texts to train all",
        )
    if work.take("completion_only_loss") is False:
        work.lose(
            "completion_only_loss",
            False,
            "behind a prompt only the completion is trained; write the rows as texts to train all",
        )
    work.choose("loss_type", "algorithm.loss", {"nll": None, "chunked_nll": None})
    work.choose("dataset_text_field", "data.train", {"text": None})
    length = _row_length(work)
    if work.take("packing"):
        batch = work.left.get("per_device_train_batch_size", _USUAL_BATCH)
        work.set("microbatch.max_tokens", length * batch if isinstance(batch, int) else length)
        work.lose(
            "packing",
            True,
            "a batch of TRL counts packed sequences, schedule.prompts_per_iteration rows; raise it "
            "by the rows that went into one (microbatch.max_tokens packs)",
        )
    work.ignore("packing_strategy", "padding_free", "eval_packing", "dataset_kwargs")


def from_dpo(work: Translation) -> None:
    """Pairs of a chosen and a rejected answer."""
    work.set("algorithm.name", "dpo")
    losses = work.take("loss_type")
    several = losses if isinstance(losses, list) else [losses]
    known = {"sigmoid": None, "robust": "robust", "ipo": "ipo", "sigmoid_norm": "sigmoid-norm"}
    if len(several) > 1 or (several[0] is not None and several[0] not in known):
        work.lose("loss_type", losses, "has no counterpart; see algorithm.preference_loss")
    elif several[0] is not None and known[several[0]]:
        work.set("algorithm.preference_loss", known[several[0]], "loss_type")
    if (share := work.take_number("label_smoothing")) is not None:
        work.set("algorithm.label_smoothing", share, "label_smoothing")
    work.choose("f_divergence_type", "algorithm.preference_loss", {"reverse_kl": None})
    work.choose("use_weighting", "algorithm.preference_loss", {False: None})
    if not work.take("sync_ref_model"):
        work.ignore("ref_model_sync_steps", "ref_model_mixup_alpha")
    elif (every := work.take_count("ref_model_sync_steps")) is not None:
        work.set("algorithm.reference_refresh_every", every, "ref_model_sync_steps")
    reference = work.take("ref_model")
    if reference is not None:
        work.lose("ref_model", reference, "the reference is the model that the run begins with")
    work.ignore(
        "precompute_ref_log_probs",
        "precompute_ref_batch_size",
        "padding_free",
        "f_alpha_divergence_coef",
        "discopop_tau",
        "reference_free",
    )
    _row_length(work)


def from_gkd(work: Translation) -> None:
    """Distillation on the student's own responses."""
    work.set("algorithm.name", "distill")
    teacher = work.take("teacher_model_name_or_path") or work.take("teacher_model")
    if isinstance(teacher, str):
        work.set(f"teacher.{TEACHER}", {"model": teacher}, "teacher_model_name_or_path")
    else:
        work.lose("teacher_model", teacher, f"set teacher.{TEACHER}.model to its directory")
    work.ignore("teacher_model", "teacher_model_init_kwargs", "packing", "assistant_only_loss")
    share = work.take_number("lmbda")
    if share != 1.0:
        work.lose(
            "lmbda", 0.5 if share is None else share, "all responses are the student's own here (1)"
        )
    beta = work.take_number("beta")
    if beta != 1.0:
        work.lose(
            "beta",
            0.5 if beta is None else beta,
            "the divergence is the reverse KL (1), at the sampled token; see docs/distillation.md",
        )
    if work.take("seq_kd"):
        work.lose(
            "seq_kd", True, "train on the teacher's texts as rows of data, with algorithm.name=sft"
        )
    work.left.setdefault("temperature", 0.9)
    work.left.setdefault("max_new_tokens", 128)
    work.set("rollout.max_response_tokens", work.take_count("max_new_tokens"), "max_new_tokens")
    if (longest := work.take_count("max_length")) is not None:
        work.set("data.max_prompt_tokens", longest, "max_length")
    work.adapt(
        "rollout.responses_per_prompt",
        _RESPONSES,
        "TRL samples one response of each prompt; here a group has at least two, of half as many "
        "prompts",
    )


def set_batch(work: Translation, trainer: str) -> None:
    """Devices, and the rows, pairs or prompts of an update."""
    processes_set = work.take_count("num_processes")
    per_node = work.take_count("devices_per_node")
    work.ignore("starts_on_all_devices")
    processes = work.extent.devices or processes_set or 1
    if processes_set is None and work.extent.devices is None:
        work.done.adapted["trainer.devices"] = (
            f"{processes}: the file does not say how many processes train; --devices N does"
        )
    if trainer == "GKD":
        set_colocated(work, processes, 1, per_node or processes)
    else:
        work.set("trainer.devices", processes)
    batch_per_device = work.take_count("per_device_train_batch_size") or _USUAL_BATCH
    of_process = batch_per_device * (work.take_count("gradient_accumulation_steps") or 1)
    size = _RESPONSES if trainer == "GKD" else 1
    if trainer == "SFT":
        size = max(n for n in range(1, _MAX_GROUP + 1) if of_process % n == 0)
        work.set("rollout.responses_per_prompt", size)
        work.set(
            "microbatch.responses",
            max(n for n in range(1, min(batch_per_device, size) + 1) if size % n == 0),
        )
    work.set("schedule.prompts_per_iteration", max(1, of_process * processes // size))


def set_epochs(work: Translation) -> None:
    """The run's length, and its warm-up as a share of it."""
    steps, epochs = work.take_number("max_steps"), work.take_number("num_train_epochs")
    if steps is not None and steps > 0:
        work.set("schedule.iterations", int(steps), "max_steps")
    elif epochs:
        work.set("schedule.epochs", float(epochs), "num_train_epochs")
    share, warmup = work.take_number("warmup_ratio"), work.take_number("warmup_steps")
    if warmup is not None and 0 < warmup < 1:
        share, warmup = warmup, None
    if warmup:
        work.set("optimizer.warmup_iterations", round(warmup), "warmup_steps")
    elif share:
        work.set("optimizer.warmup_share", share, "warmup_ratio")


def _row_length(work: Translation) -> int:
    """Sets the length of the longest row, and that a longer one is cut; returns it."""
    length = work.take_count("max_length") or _USUAL_LENGTH
    prompt = work.take_count("max_prompt_length") or max(1, length // 2)
    work.take("max_completion_length")
    prompt = min(prompt, length - 1) or 1
    work.set("data.max_prompt_tokens", prompt, "max_length")
    work.set("rollout.max_response_tokens", max(1, length - prompt), "max_length")
    work.set("data.overlong_prompt", "truncate")
    work.choose("truncation_mode", "data.overlong_prompt", {"keep_start": None})
    return length
