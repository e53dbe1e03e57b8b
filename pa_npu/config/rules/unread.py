"""Keys that are set though nothing reads them with the others as they are: a table of what each needs to be read.

A key with its default, or with the value of algorithm.name's preset, counts as not set: the
resolved configuration that a run writes has every key. What depends on the device or on attached
engines is not here, since one file serves several of them. What depends on the algorithm is the
algorithm's own (Algorithm.unread).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pa_npu.config.presets import preset_keys
from pa_npu.config.tree import ConfigTree
from pa_npu.config.words import as_json


@dataclass(frozen=True)
class Condition:
    """keys: dotted, or a section's name for all of it. read: whether they are. remedy: what would
    let them be.
    """

    keys: str
    read: Callable[[ConfigTree], bool]
    remedy: str


def never_read(c: ConfigTree) -> bool:
    """Returns False, as the condition of a key that nothing reads."""
    return False


def _has_function(name: str) -> Callable[[ConfigTree], bool]:
    return lambda c: any(function.name == name for function in c.reward.functions)


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "data.template_options",
        lambda c: c.data.chat_template != "never",
        "set data.chat_template to another than never",
    ),
    Condition(
        "schedule.evaluate_every evaluate.samples evaluate.temperature evaluate.top_p "
        "evaluate.max_response_tokens evaluate.overlap",
        lambda c: bool(c.evaluate.all_sets(c.data.test)),
        "there are no held-out sets, set data.test or evaluate.sets",
    ),
    Condition(
        "evaluate.temperature evaluate.top_p",
        lambda c: c.evaluate.samples > 0,
        "set evaluate.samples above 0",
    ),
    Condition(
        "rollout.sleep",
        lambda c: c.placement.colocate,
        "it is for engines on the trainers' devices, of which there are none: set "
        "placement.colocate",
    ),
    Condition(
        "environment.options environment.max_turns environment.timeout_s",
        lambda c: c.environment.name != "single_turn",
        "set environment.name to another than single_turn",
    ),
    Condition(
        "agent.command agent.programs agent.output_kib agent.container",
        lambda c: c.environment.name == "agents",
        "set environment.name=agents",
    ),
    Condition(
        "agent.concurrent",
        lambda c: c.environment.has_gateway,
        "set environment.name=agents",
    ),
    Condition(
        "agent.discards",
        lambda c: c.environment.has_sessions,
        "set environment.name=agents",
    ),
    Condition(
        "agent.tool_parser",
        lambda c: c.environment.has_gateway or c.environment.name == "tool_class",
        "set environment.name=agents",
    ),
    Condition(
        "agent.programs agent.output_kib agent.container",
        lambda c: c.agent.command is not None,
        "set agent.command",
    ),
    Condition(
        "environment.options",
        lambda c: c.environment.name != "agents",
        "environment.name=agents has the keys of agent",
    ),
    Condition(
        "trainer.distributed_optimizer",
        lambda c: c.trainer.backend != "fsdp",
        "trainer.backend=fsdp shards the optimizer, always",
    ),
    Condition(
        "trainer.shards model.trust_remote_code",
        lambda c: c.trainer.backend == "fsdp",
        "it is for the models of transformers: set trainer.backend=fsdp",
    ),
    Condition(
        "lora.alpha lora.targets",
        lambda c: c.lora.rank > 0,
        "there are no adapters to begin: set lora.rank",
    ),
    Condition("publish.lora", lambda c: c.has_adapters, "set lora.rank or model.adapter"),
    Condition("reward.judge", _has_function("judge"), "add {name: judge} to reward.functions"),
    Condition("reward.code", _has_function("code"), "add {name: code} to reward.functions"),
    Condition(
        "algorithm.kl_in algorithm.kl_estimator",
        lambda c: c.algorithm.kl_coef > 0,
        "set algorithm.kl_coef",
    ),
    Condition(
        "algorithm.distill_clip algorithm.distill_discount algorithm.distill_divergence "
        "algorithm.distill_top_k algorithm.distill_beta",
        lambda c: c.algorithm.distill_coef > 0,
        "set algorithm.distill_coef",
    ),
    Condition(
        "algorithm.importance_cap algorithm.importance_floor",
        lambda c: c.algorithm.importance_sampling != "none",
        "set algorithm.importance_sampling to token or sequence",
    ),
    Condition(
        "publish.probe_tolerance",
        lambda c: c.publish.probe_tokens > 0,
        "set publish.probe_tokens above 0",
    ),
    Condition(
        "optimizer.min_learning_rate",
        lambda c: c.optimizer.decay != "constant",
        "set optimizer.decay",
    ),
    Condition(
        "telemetry.project telemetry.metric_names",
        lambda c: bool(c.telemetry.trackers),
        "name a tracker in telemetry.trackers",
    ),
)
_OF_FUNCTIONS = {"pattern": "format", "buffer_tokens": "overlong"}


def broken_unread(c: ConfigTree) -> Iterator[str]:
    """Yields one line per key that is set and read by nothing, whatever the algorithm is."""
    yield from unread_keys(c, CONDITIONS)
    for number, function in enumerate(c.reward.functions):
        for key, name in _OF_FUNCTIONS.items():
            if getattr(function, key) is not None and function.name != name:
                yield (
                    f"reward.functions.{number}.{key}: is read by {name}, not by "
                    f"{function.name}; remove it"
                )


def unread_keys(c: ConfigTree, conditions: Iterable[Condition]) -> Iterator[str]:
    """Yields one line per key that is set while its condition says that nothing reads it."""
    preset = preset_keys(c.algorithm.name)
    for condition in conditions:
        for key in condition.keys.split():
            value, default = value_and_default(c, key)
            if value not in (default, preset.get(key, default)) and not condition.read(c):
                shown = (
                    f"{as_json(value, 60)} ".replace('"', "")
                    if isinstance(value, (str, bool, int, float))
                    else ""
                )
                yield (
                    f"{key}: {shown}would be read by nothing; {condition.remedy}, or remove the key"
                )


def value_and_default(c: ConfigTree, key: str) -> tuple[Any, Any]:
    """Returns the values of a dotted key."""
    section, _, name = key.partition(".")
    model = getattr(c, section)
    return getattr(model, name), type(model).model_fields[name].get_default(
        call_default_factory=True
    )
