"""Every message that processes exchange has one type, one key and one place, and comes back as it was sent."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch.distributed as dist

import pa_npu
from pa_npu.control import held_out, messages, roster
from pa_npu.control.channel import StoreChannel
from pa_npu.control.typed import Counter, MessageError, Topic
from pa_npu.publish import messages as publish_messages
from tests.helpers.reports import iteration_report

ROOMS = (messages, held_out, publish_messages, roster)
TOPICS = {
    f"{room.__name__}.{name}": value
    for room in ROOMS
    for name, value in vars(room).items()
    if isinstance(value, Topic)
}

# The keys of the buffer and of the data module's shards hold bytes of samples, no messages. The
# commands of the service are a union of types, with keys that stand in their room alone.
_BYTES = re.compile(
    r"samples/(rollout_buffer|shards).py|control/(typed|channel).py|service/commands.py"
)


def example(kind: Any) -> Any:
    """Some value of a type as messages have it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{part.name: example(hints[part.name]) for part in fields(kind)})  # type: ignore[operator]
    if origin is tuple:
        return tuple(example(arguments[0]) for _ in range(2))
    if origin is list:
        return [example(arguments[0])]
    if origin is dict:
        return {"name": example(arguments[1])}
    if arguments:
        return example(arguments[0])
    return {int: 3, float: 0.1, str: "ä", bool: True, Any: [1, {"a": None}]}[kind]


@pytest.mark.parametrize("name", TOPICS)
def test_every_message_comes_back_equal(name: str) -> None:
    topic, channel = TOPICS[name], StoreChannel(dist.HashStore())
    place = {field: 1 for _, field, _, _ in Formatter().parse(topic.key) if field}
    message = example(topic.message)
    topic.put(channel, message, **place)
    assert topic.get(channel, **place) == message
    topic.description.format(**place)  # says what is waited for with the key's own fields
    assert topic.message.__dataclass_params__.frozen, "what another process said does not change"


def test_no_key_belongs_to_two_messages() -> None:
    """Under one prefix: the roster's keys have another than those of an attempt."""
    for rooms in ((messages, held_out, publish_messages), (roster,)):
        keys = [
            value.key
            for room in rooms
            for value in vars(room).values()
            if isinstance(value, (Topic, Counter))
        ]
        patterns = {re.sub(r"\{\w+\}", "{}", key) for key in keys}
        assert len(patterns) == len(keys), f"some key twice in {sorted(keys)}"


def test_topics_stand_in_their_rooms_and_nowhere_else_and_keys_are_spelled_there_alone() -> None:
    root = Path(pa_npu.__file__).parent
    rooms = {Path(str(room.__file__)) for room in ROOMS}
    for file in sorted(root.rglob("*.py")):
        if file in rooms or _BYTES.search(str(file)):
            continue
        text = file.read_text()
        assert not re.search(r"\b(Topic|Counter)\(\s*f?\"", text), (
            f"{file}: a topic outside of the rooms of messages"
        )
        by_hand = re.search(r"\.(put|get|wait)_bytes(_async)?\(", text)
        assert not by_hand, f"{file}: {by_hand and by_hand.group()} under a key that is no topic's"


def test_a_report_becomes_a_record_under_the_names_of_metrics_jsonl() -> None:
    record = iteration_report(3, loss=0.5, kl=0.1).record()
    assert record["loss"] == 0.5 and record["kl"] == 0.1
    assert "importance_weight_mean" not in record and "probe_diff_max" not in record
    crossed = messages.BorderReport(0.5, 0.25, messages.CheckpointReport(None, 0)).record()
    assert crossed == {"border_wait_s": 0.5, "border_send_s": 0.25, "checkpoint_failed": 0}, (
        "version 0 can fail too"
    )


def test_another_installations_report_is_one_clear_error() -> None:
    channel = StoreChannel(dist.HashStore(), "pa/0/")
    messages.REPORT.put(channel, iteration_report(2), iteration=2)
    theirs = make_dataclass(
        "IterationReport", [*get_type_hints(messages.IterationReport).items(), ("more", int)]
    )
    with pytest.raises(
        MessageError, match=r"IterationReport does not fit: .*missing required field `more`"
    ):
        Topic(messages.REPORT.key, theirs, "").get(channel, iteration=2)
    Topic(messages.REPORT.key, theirs, "").put(
        channel, theirs(**vars(iteration_report(2)), more=1), iteration=2
    )
    with pytest.raises(MessageError, match=r"IterationReport lacks, or does not know, more"):
        messages.REPORT.get(channel, iteration=2)


def test_what_a_run_runs_with_is_said_in_a_line_for_trainers_and_one_for_each_kind_of_engine() -> (
    None
):
    trainers = messages.TrainersRunOn(
        2,
        "npu",
        "hccl",
        "3.10.9",
        "2.7.1",
        "megatron-core 0.12.1",
        "bf16",
        "auto",
        "npu-fusion",
        "torch",
        "not built",
    )
    engines = tuple(
        messages.EngineRunsOn(f"http://{n}", "vllm", "0.23.0" if n else None) for n in range(3)
    )
    assert messages.RunsOn(trainers, engines).lines() == [
        "trainers: 2 x npu (hccl), megatron-core 0.12.1, torch 2.7.1, Python 3.10.9, bf16; "
        "attention auto on npu-fusion, merged by torch (fallback: not built)",
        "engines: 1 x vllm (version unknown)",
        "engines: 2 x vllm 0.23.0",
    ]
    sharded = replace(trainers, backend="FSDP2 of torch 2.7.1").line()
    assert sharded.startswith("trainers: 2 x npu (hccl), FSDP2 of torch 2.7.1, Python 3.10.9, ")
