"""A checkpoint's origin: its configuration and model, and what may change when a run continues."""

from __future__ import annotations

import hashlib
import json
from enum import Enum
from pathlib import Path
from typing import Any

from pa_npu.config.keys import all_keys
from pa_npu.config.schema import Config
from pa_npu.errors import ConfigError
from pa_npu.telemetry.secrets import HIDDEN, Secrets

# Enough of a weight file's ends to tell two models apart without reading all of it.
_SAMPLE_BYTES = 2**20
_HIDDEN = HIDDEN.removesuffix(")")


class Change(Enum):
    """Consequences of another value of a key for a run that continues."""

    SILENT = (
        "nothing that is computed depends on it: it is free, also in a run that begins again, "
        "and not worth a word"
    )
    SAME_RUN = "the run goes on in its directory, and a line names the former value"
    NEW_RUN = "it would be another run: only in another directory, from this one's checkpoint"
    NEVER = "the checkpoint could not be loaded, or would mean something else"


# The names of all keys of the configuration. A dictionary (rollout.env) stands for all its keys.
_KEYS: dict[Change, dict[str, str]] = {
    Change.SILENT: {
        "run": "dir device restarts startup_timeout_s",
        "rollout": "request_timeout_s probe_timeout_s",
        "reward": "workers judge.concurrency judge.timeout_s",
        "trainer": "wait_timeout_s",
        "publish": "timeout_s lora senders",
        "buffer": "shards",
        "checkpoint": "every load resume keep_last keep_best export_hf",
        "telemetry": "samples trackers project metric_names profile_iterations",
        "placement": "cluster nnodes devices_per_node host port devices",
        "agent": "port",
        # of `pa-npu serve`, which has a log of its own to go on from
        "service": "host port model_name slots sessions snapshots saved answers pending samples "
        "datums request_mib gap_timeout_s session_timeout_s call_timeout_s sample_timeout_s "
        "checkpoint_every unembed strict",
    },
    Change.SAME_RUN: {
        "run": "deterministic",
        "model": "path head_chunk_tokens trust_remote_code",
        "data": "test",
        "rollout": "backend engines max_engines attach engine_settings tensor_parallel python "
        "window max_num_batched_tokens max_num_seqs memory_fraction sleep "
        "kv_cache_gib graph_mode statistics batch_invariant extra_args env",
        "environment": "timeout_s",
        "agent": "concurrent programs output_kib",
        "reward": "timeout_s judge.url judge.on_failure code.memory_mib code.timeout_s "
        "code.require",
        "trainer": "devices shards tensor_parallel pipeline_parallel expert_parallel "
        "context_parallel recompute frozen_pass",
        "microbatch": "responses max_tokens tokens depth_first",
        "optimizer": "offload",
        "teacher": "NAME.model NAME.engines NAME.tensor_parallel NAME.backend NAME.url "
        "NAME.max_prompt_tokens NAME.concurrent",
        "attention": "shared_prompt implementation",
        "evaluate": "sets samples temperature top_p max_response_tokens overlap metric",
        "schedule": "iterations epochs stream compare_iterations dispatch evaluate_every "
        "finite_difference_every skip_zero_advantage",
        "placement": "colocate",
        "publish": "mode probe_tokens probe_tolerance noise_margin only_logged",
    },
    Change.NEW_RUN: {
        "teacher": "NAME.weight NAME.hint_column NAME.hint_text",
        "data": "train demonstrations question_column answer_column teacher_column chat_template template_options "
        "images_column max_image_pixels "
        "system_prompt instruction max_prompt_tokens overlong_prompt shuffle",
        "rollout": "responses_per_prompt max_response_tokens temperature ignore_eos",
        "environment": "name max_turns observations options",
        "agent": "command container discards serve_as_sampled tool_parser",
        "reward": "functions judge.model judge.api judge.template judge.score_pattern "
        "judge.scores judge.request code.tests code.score",
        "algorithm": "name loss advantage clip_low clip_high kl_coef kl_estimator kl_in "
        "reference_refresh_every ratio importance_sampling importance_cap "
        "importance_floor age_exponent entropy_coef router_aux_coef router_replay "
        "delta dual_clip aggregation preference_loss label_smoothing distill_coef distill_clip "
        "distill_discount distill_divergence distill_top_k distill_beta",
        "optimizer": "learning_rate min_learning_rate warmup_iterations warmup_share decay "
        "weight_decay betas epsilon clip_grad",
        "schedule": "max_staleness tokens_per_update updates_per_iteration "
        "prompts_per_iteration order dynamic_sampling",
        "publish": "divergence",
    },
    Change.NEVER: {
        "run": "seed",
        "model": "dtype adapter vision",
        "lora": "rank alpha targets",
        "trainer": "backend distributed_optimizer",
    },
}


def _changes() -> dict[str, Change]:
    """Returns the consequence of changing each key."""
    changes = {}
    for change, sections in _KEYS.items():
        for section, names in sections.items():
            for name in names.split():
                changes[f"{section}.{name}"] = change
    return changes


CHANGES = _changes()
REFUSED = {
    "run.seed": "the data order and every sampling seed depend on it",
    "model.dtype": "the weights are saved in it",
    "model.adapter": "the shape of what is trained is that directory's",
    "model.vision": "the optimizer's state is that of what is trained",
    "lora.rank": "the adapters are saved in that shape",
    "lora.targets": "the adapters are saved in that shape",
    "lora.alpha": "the adapters that are saved count with that factor",
    "trainer.backend": "the weights are saved in its form",
    "trainer.distributed_optimizer": "the optimizer's state is saved in its form",
}


def change_of(key: str) -> Change:
    """Returns the consequence of changing `key`, or a key of its dictionary.

    A key that this version does not have is SILENT.
    """
    section, _, rest = key.partition(".")
    if section == "teacher":
        return CHANGES.get(f"teacher.NAME.{rest.rpartition('.')[2]}", Change.SILENT)
    return CHANGES.get(key) or CHANGES.get(f"{section}.{rest.partition('.')[0]}", Change.SILENT)


def layout_of(config: Config) -> dict[str, int]:
    """Returns the sizes that decide which trainer rank holds which part of a checkpoint."""
    trainer = config.trainer
    return {
        "devices": trainer.devices,
        "tensor_parallel": trainer.tensor_parallel,
        "pipeline_parallel": trainer.pipeline_parallel,
    }


def config_tree(config: Config) -> dict[str, Any]:
    """Returns the resolved configuration as JSON values."""
    return config.model_dump(mode="json")


def shared_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as checkpoints hold it, with short digests in place of secrets.

    Checkpoints are given to others. All values of rollout.env count as secret. A tree of this form
    is returned unchanged.
    """
    shown = Secrets(tree, _digest).tree
    rollout = shown.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("env"), dict):
        rollout["env"] = {name: _digest(str(value)) for name, value in rollout["env"].items()}
    return shown


def _digest(value: str) -> str:
    """Returns a digest that shows most changes, and is too short to confirm a guessed password."""
    if value.startswith(_HIDDEN):
        return value
    return f"{_HIDDEN}, digest {hashlib.blake2b(value.encode(), digest_size=2).hexdigest()})"


def config_digest(config: Config) -> str:
    """Returns a digest of the resolved configuration as checkpoints hold it."""
    text = json.dumps(shared_tree(config_tree(config)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Paths whose content has a fingerprint of its own, and whose names only this machine knows.
_PLACES = ("data.train", "model.adapter")
# Keys that may change the bits of what is computed, and nothing else about it.
_ARRANGEMENT = (
    "run.device",
    "run.deterministic",
    "model.dtype",
    "model.head_chunk_tokens",
    "rollout.backend",
    "rollout.tensor_parallel",
    "rollout.batch_invariant",
    "trainer.backend",
    "trainer.devices",
    "trainer.shards",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.expert_parallel",
    "trainer.context_parallel",
    "trainer.recompute",
    "trainer.frozen_pass",
    "microbatch.responses",
    "microbatch.max_tokens",
    "microbatch.tokens",
    "microbatch.depth_first",
    "attention.shared_prompt",
    "attention.implementation",
    "schedule.order",
    "publish.mode",
)


def trained_configuration(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that make a run another run, by name, unless they have their defaults.

    Secrets and paths of data are left out. `tree`: a resolved configuration, as it is or as
    checkpoints hold it.
    """
    defaults = {key.name: _plain(key.default) for key in all_keys() if not key.required}
    values = {}
    for key, value in sorted(_flat(shared_tree(tree)).items()):
        makes_another_run = change_of(key) in (Change.NEW_RUN, Change.NEVER)
        if makes_another_run and not key.startswith(_PLACES) and value != defaults.get(key):
            values[key] = value
    return values


def arrangement_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that may change the bits of what is computed and nothing else, by name."""
    values = _flat(tree)
    return {key: values.get(key) for key in _ARRANGEMENT}


def model_fingerprint(path: str | Path) -> str:
    """Returns a digest of an HF model's config.json, and of size, begin and end of weight files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in (Path(path) / "config.json", *sorted(Path(path).glob("*.safetensors"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def fingerprints(config: Config) -> dict[str, str]:
    """Returns the digests of a run's models as checkpoints hold them: the path and the fingerprint
    of the one that is trained, and by key those of teachers.
    """
    digests = {"path": config.model.path, "fingerprint": model_fingerprint(config.model.path)}
    for name, teacher in config.teacher.items():
        if teacher.model is not None:
            digests[f"teacher.{name}"] = model_fingerprint(teacher.model)
    return digests


def models_fingerprint(config: Config) -> str:
    """Returns the fingerprint of the model that a run begins with; with teachers a digest of theirs
    too.
    """
    digests = fingerprints(config)
    del digests["path"]
    if len(digests) == 1:
        return digests["fingerprint"]
    together = json.dumps(digests, sort_keys=True).encode()
    return hashlib.blake2b(together, digest_size=8).hexdigest()


def differences(saved: dict[str, Any], config: Config) -> list[str]:
    """Returns the keys (section.key) whose values differ between `saved` and `config`.

    A key that the version which saved it did not have counts with its default. `saved`: a resolved
    configuration, as it is or as checkpoints hold it.
    """
    defaults = {key.name: key.default for key in all_keys() if not key.required}
    tree = config_tree(config)
    former = _flat(saved)
    before = defaults | former
    now = _flat(tree)
    shared = _flat(shared_tree(tree))
    changed = []
    for key in sorted(now.keys() | former.keys()):
        if _plain(before.get(key)) not in (now.get(key), shared.get(key)):
            changed.append(key)
    return changed


def changes_the_run(keys: list[str], *, continues: bool) -> list[str]:
    """Returns those of `keys` with which this would be another run.

    `continues`: whether it continues from a checkpoint of its own, or begins again.
    """
    same = (Change.SILENT, Change.SAME_RUN) if continues else (Change.SILENT,)
    return [key for key in keys if change_of(key) not in same]


def check_continuation(saved: dict[str, Any], config: Config, checkpoint: str) -> str | None:
    """Checks that a checkpoint of the configuration `saved` can be continued with `config`.

    Returns a line that names the other keys with new values, if any, and their former values
    without secrets. Raises ConfigError. `checkpoint` names the checkpoint.
    """
    before = _flat(shared_tree(saved))
    changed = [key for key in differences(saved, config) if change_of(key) is not Change.SILENT]
    for key in changed:
        if change_of(key) is Change.NEVER:
            raise ConfigError(
                f"{key}: {checkpoint} was written with {_shown(before.get(key))}, and {REFUSED[key]}; "
                "restore the value, or start from an HF export of the checkpoint (launcher export) "
                "as model.path"
            )
    if not changed:
        return None
    former = [f"{key}={_shown(before.get(key))}" for key in changed]
    line = f"{checkpoint} was written with {', '.join(former)}"
    if "schedule.iterations" in changed and config.optimizer.decay != "constant":
        line += (
            f"; the {config.optimizer.decay} decay of the learning rate now ends at iteration "
            f"{config.schedule.iterations} instead of {before['schedule.iterations']}, so that the "
            "rate jumps where the run continues"
        )
    return line


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _plain(value: Any) -> Any:
    """Returns a default as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
