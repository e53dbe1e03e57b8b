"""What several systems say alike: datasets, trackers, adapters, devices, epochs; and what makes a translation whole."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from pa_npu.config.sections.operation import TRACKERS
from tools.foreign.rows import count_rows
from tools.foreign.translation import Translation

DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}
DECAYS = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_DATA_FILES = (".jsonl", ".parquet", ".csv")
_MOST_DEVICES = 131072


def set_template_options(work: Translation, name: str) -> None:
    """A mapping, which is one key per entry here, or an empty one."""
    options = work.take_all(f"{name}.")
    work.take(name)
    if options:
        work.set("data.template_options", options, name)


def set_training_data(work: Translation, name: str) -> None:
    """One file, or several of which each gives as many prompts as it has rows of all."""
    paths = _paths(work, name)
    if paths is None:
        return
    if len(paths) == 1:
        return work.set("data.train", paths[0], name)
    entries: list[dict[str, Any]] = [{"path": path} for path in paths]
    counts = count_rows(entries)
    if counts is None:
        work.adapt(
            "data.train",
            entries,
            f"each file of {name} gives as many prompts as the others, not by its rows; set their "
            "weights to these",
        )
    else:
        entries = [{**entry, "weight": count} for entry, count in zip(entries, counts, strict=True)]
        work.set("data.train", entries, name)


def set_held_out(work: Translation, name: str) -> None:
    """Sets data.test to the first file of a list, and evaluate.sets to the others, by what they are
    called.
    """
    paths = _paths(work, name)
    if not paths:
        return
    work.set("data.test", paths[0], name)
    sets: dict[str, str] = {}
    for path in paths[1:]:
        called = [
            part
            for part in (Path(path).parent.name, Path(path).stem)
            if part not in ("test", "data", "", ".")
        ]
        label = called[0] if called else "held_out"
        while label in sets or label == "test":
            label += "_"
        sets[label] = path
    if sets:
        work.set("evaluate.sets", sets, name)


def _paths(work: Translation, name: str) -> list[str] | None:
    """Returns the files that a key names; None where it names none, or what is no file."""
    value = work.take(name)
    if value is None or value == []:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        work.lose(
            name, value, "is no file; name JSONL or parquet files, or directories of datasets"
        )
        return None
    if wrong := [
        item
        for item in items
        if Path(item).suffix.lower() in (".json", ".arrow", ".txt", ".tsv", ".yaml")
    ]:
        work.lose(
            name, wrong[0], "is no JSONL or parquet file; write its rows to one and name that"
        )
        return None
    return [str(Path(item).expanduser()) if item.startswith("~") else item for item in items]


def is_hub_name(value: Any) -> bool:
    """Returns whether a dataset is named as a hub does: owner/name, and no such file or directory
    is here.
    """
    if not isinstance(value, str) or Path(value).suffix in _DATA_FILES or Path(value).exists():
        return False
    return value.count("/") <= 1 and not value.startswith((".", "~", "/"))


def whole_distribution(work: Translation, top_p: str, top_k: str) -> None:
    """Engines sample from all of it, whose log-probs the trainer matches exactly."""
    work.choose(top_p, "rollout.temperature", {1.0: None})
    work.choose(top_k, "rollout.temperature", {0: None, -1: None})


def set_clip_range(work: Translation, name: str) -> None:
    """Sets both ends; names of single ends, where they are given, come later and win."""
    if (clip := work.take(name)) is not None:
        work.set("algorithm.clip_low", clip, name)
        work.set("algorithm.clip_high", clip, name)


def set_trackers(work: Translation, name: str) -> None:
    """One tracker or several."""
    value = work.take(name)
    if value is None:
        return
    several = [value] if isinstance(value, str) else value
    named = [tracker for tracker in several if tracker not in ("none", "console")]
    chosen = [tracker for tracker in named if tracker in TRACKERS]
    work.set("telemetry.trackers", chosen, name)
    if len(chosen) < len(named):
        work.lose(
            name,
            value,
            f"not all have a counterpart; telemetry.trackers takes {', '.join(TRACKERS)}",
        )


def set_adapters(
    work: Translation, rank: Any, alpha: Any, targets: Any, *, by_root: bool = False
) -> None:
    """Adapters (LoRA). by_root: their factor is alpha over the rank's root."""
    work.set("lora.rank", rank)
    if isinstance(alpha, (int, float)) and isinstance(rank, int) and by_root:
        alpha = round(alpha * math.sqrt(rank), 6)
    work.set("lora.alpha", alpha)
    if isinstance(targets, str):
        targets = targets if targets == "all-linear" else [targets]
    work.set("lora.targets", targets)


def set_reward_function(work: Translation, name: str, path: Any, function: str) -> str | None:
    """Returns `module:function` of a function in a file that is here; lists one that is not."""
    file = Path(str(path)).expanduser()
    if not file.is_file():
        reference = f"{file.stem}:{function}"
        work.lose(
            name,
            str(path),
            f"is not here; put its directory on PYTHONPATH and set reward.functions=[{{name: "
            f"'{reference}'}}]",
        )
        return None
    relative = Path(os.path.relpath(file))
    if ".." not in relative.parts and all(
        part.isidentifier() for part in relative.with_suffix("").parts
    ):
        return f"{'.'.join(relative.with_suffix('').parts)}:{function}"
    work.done.adapted["reward.functions"] = (
        f"{file.stem}:{function}: put {file.parent} on PYTHONPATH"
    )
    return f"{file.stem}:{function}"


def set_colocated(work: Translation, devices: int, size: int, per_node: int) -> None:
    """All devices decode and train. size: of an engine."""
    size = _fitting_size(work, size, devices, per_node)
    work.set("trainer.devices", devices)
    work.set("rollout.engines", devices // size)
    work.set("rollout.tensor_parallel", size)
    work.set("placement.colocate", True)
    _set_nodes(work, devices, per_node)


def set_separate(work: Translation, training: int, decoding: int, size: int, per_node: int) -> None:
    """Some devices decode, others train. size: of an engine."""
    size = _fitting_size(work, size, decoding, per_node)
    work.set("trainer.devices", training)
    work.set("rollout.engines", decoding // size)
    work.set("rollout.tensor_parallel", size)
    work.set("placement.colocate", False)
    _set_nodes(work, training + decoding, per_node)


def _fitting_size(work: Translation, size: int, devices: int, per_node: int) -> int:
    """Returns the size of an engine, made smaller where so many devices hold none, or a node holds
    none.
    """
    max_size = min(devices, per_node)
    fitting = next(n for n in range(min(max(1, size), max_size), 0, -1) if devices % n == 0)
    if fitting != size:
        work.done.adapted["rollout.tensor_parallel"] = (
            f"{fitting}: an engine of {size} does not go into {max_size} devices of a node"
        )
    return fitting


def _set_nodes(work: Translation, devices: int, per_node: int) -> None:
    nodes = -(-devices // per_node)
    if nodes > 1:
        work.set("placement.nnodes", nodes)
        work.set("placement.devices_per_node", per_node)
        work.set("placement.cluster", "ray")
    else:
        work.values.pop("placement.nnodes", None)


def epochs_to_iterations(work: Translation, name: str, epochs: Any, *, keeps_last: bool) -> None:
    """Sets the iterations of so many epochs, where the number of rows is known. keeps_last: a batch
    that is not full.
    """
    batch = work.values.get("schedule.prompts_per_iteration")
    counts = (
        [work.extent.rows]
        if work.extent.rows is not None
        else count_rows(work.values.get("data.train"))
    )
    if counts is None or not isinstance(batch, int):
        return work.lose(
            name,
            epochs,
            f"set schedule.iterations = {epochs} x the rows of data.train / "
            f"{batch or 'prompts of an iteration'} (--rows N does it)",
        )
    batches = sum(counts) / batch
    whole = math.ceil(batches) if keeps_last else math.floor(batches)
    work.set("schedule.iterations", max(1, round(epochs * whole)), name)


def make_whole(work: Translation) -> None:
    """Changes what would be refused together: numbers that do not divide, keys that nothing would
    read.
    """
    values = work.values
    _hold_sequences(work)
    if (
        values.get("environment.name") == "agents"
        and values.get("trainer.pipeline_parallel", 1) > 1
    ):
        work.adapt(
            "trainer.pipeline_parallel",
            1,
            "sessions are any number of samples, which pipeline stages cannot know beforehand",
        )
    if (
        values.get("algorithm.name") == "rloo"
        and values.get("schedule.updates_per_iteration", 1) != 1
    ):
        work.adapt(
            "schedule.updates_per_iteration",
            1,
            "algorithm.loss=reinforce has no ratio to the policy that sampled",
        )
    _divide_groups(work)
    low = values.get("algorithm.clip_low")
    if isinstance(low, (int, float)) and not isinstance(low, bool) and low > 1:
        work.adapt("algorithm.clip_low", 1.0, f"{low}, which never clips either")
    if values.get("algorithm.kl_coef", 0) == 0 and values.get("algorithm.name") is None:
        for key in ("algorithm.kl_in", "algorithm.kl_estimator"):
            values.pop(key, None)
    if values.get("telemetry.trackers") == []:
        values.pop("telemetry.project", None)
    if values.get("optimizer.decay", "constant") == "constant":
        values.pop("optimizer.min_learning_rate", None)
    if values.get("trainer.backend") == "fsdp":
        values.pop("trainer.distributed_optimizer", None)
        for key in (
            "trainer.tensor_parallel",
            "trainer.pipeline_parallel",
            "trainer.expert_parallel",
        ):
            if values.pop(key, None) not in (None, 1):
                work.done.adapted["trainer.devices"] = (
                    f"{values.get('trainer.devices')}: every weight is sharded over all of them"
                )
        if values.get("algorithm.router_replay") == "rollout":
            del values["algorithm.router_replay"]
            work.lose("router_replay", "rollout", "needs trainer.backend=megatron")
    elif values.get("model.trust_remote_code"):
        work.lose(
            "trust_remote_code", values.pop("model.trust_remote_code"), "needs trainer.backend=fsdp"
        )
    if values.get("algorithm.dual_clip") is not None and values.get("algorithm.loss") in (
        "cispo",
        "reinforce",
        "dpo",
    ):
        del values["algorithm.dual_clip"]
    if "data.test" not in values:
        values.pop("schedule.evaluate_every", None)
        for key in [
            key for key in values if key.startswith("evaluate.") and key != "evaluate.sets"
        ]:
            del values[key]


def _hold_sequences(work: Translation) -> None:
    """A step of an engine holds the longest prompt and response at once, since none is computed in
    parts.
    """
    values = work.values
    default = 32768
    lengths = [
        values.get(key, usual)
        for key, usual in (("data.max_prompt_tokens", 512), ("rollout.max_response_tokens", 256))
    ]
    if not all(isinstance(length, int) for length in lengths):
        return
    longest = sum(lengths)
    held = values.get("rollout.max_num_batched_tokens", default)
    if isinstance(held, int) and held < longest:
        work.adapt(
            "rollout.max_num_batched_tokens",
            longest,
            "a prompt is never computed in chunks, so that a step holds one whole",
        )
        held = longest
    sequences = values.get("rollout.max_num_seqs", 256)
    if isinstance(held, int) and isinstance(sequences, int) and sequences > held:
        work.adapt("rollout.max_num_seqs", held, "a step has one token per sequence at least")


def _divide_groups(work: Translation) -> None:
    """An iteration has as many whole groups for each replica and update."""
    values = work.values
    sizes = [values.get(key, 1) for key in ("trainer.tensor_parallel", "trainer.pipeline_parallel")]
    context = values.get("trainer.context_parallel", 1)
    devices = values.get("trainer.devices", 1)
    groups = values.get("schedule.prompts_per_iteration", 16)
    updates = values.get("schedule.updates_per_iteration", 1)
    if not all(
        isinstance(n, int) and 0 < n <= _MOST_DEVICES
        for n in (devices, groups, updates, context, *sizes)
    ):
        return
    ranks = 1 if values.get("trainer.backend") == "fsdp" else math.prod(sizes)
    shards = values.get("trainer.shards", context)
    if context > 1 and (devices % (ranks * context) or shards % context):
        values.pop("trainer.context_parallel")
        work.lose(
            "context_parallel_size",
            context,
            f"does not divide the {devices} devices evenly; these ranks are further replicas",
        )
        context = 1
    replicas = max(1, devices // (ranks * context))
    if groups % replicas:
        more = math.ceil(groups / replicas) * replicas
        work.adapt(
            "schedule.prompts_per_iteration",
            more,
            f"{groups} groups do not divide among {replicas} replicas, which train whole ones",
        )
        groups = more
    if groups // replicas % updates:
        fewer = max(n for n in range(1, updates + 1) if groups // replicas % n == 0)
        work.adapt(
            "schedule.updates_per_iteration",
            fewer,
            f"{updates} do not divide the {groups // replicas} groups of each replica",
        )
